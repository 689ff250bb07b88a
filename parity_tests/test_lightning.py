"""Lightning attention against its quadratic form and the class of MiniMax."""

import numpy as np

from flax_attn.layers.lightning import LightningAttention
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 11, "num_heads": 3, "key_dim": 4, "value_dim": 5}
IDS = np.asarray([[0] * 5 + [3] * 2 + [0] * 12, [1] * 19])
FLOAT64 = {"dtypes": ("float64",)}


def minimax():
    """A config of 3 heads of width 4, of tokens of width 18; its second layer of four."""
    from transformers import MiniMaxConfig

    kinds = ["linear_attention"] * 3 + ["full_attention"]
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4, "block_size": 4}
    return {
        "config": MiniMaxConfig(hidden_size=18, num_hidden_layers=4, layer_types=kinds, **heads),
        "layer_idx": 1,
    }


def in_float64(module, x):
    """The call, with slopes that are made in the run's dtype and not kept from float32."""
    module.slope_rate = module.get_slope_rate().to(x.dtype)
    parts = module.decay_factors(module.slope_rate)
    module.query_decay, module.key_decay, module.diagonal_decay = parts
    return module(x, None, None)[0]


CASES = [
    Case(LightningAttention, SIZES, x=(2, 7, 11)),
    Case(
        LightningAttention,
        {**SIZES, "slope_factor": 0.3, "chunk": 16},
        x=(2, 19, 11),
        segments=IDS,
        **FLOAT64,
    ),
    Case(
        LightningAttention,
        {"in_features": 18, "num_heads": 3, "key_dim": 4, "value_dim": 4}
        | {"slope_factor": 1 - 1 / (4 - 1 + 1e-5) + 1e-5},
        reference="transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention",
        reference_config=minimax,
        torch_call=in_float64,
        rules=(
            Rule("qkv_proj.weight -> {q,k,v}_proj.kernel", "(h n o) i -> n i (h o)", o=(4, 4, 4)),
        ),
        name="second of four layers",
        x=(2, 13, 18),
        **FLOAT64,
    ),
]


def test_parity(case):
    case.check()
