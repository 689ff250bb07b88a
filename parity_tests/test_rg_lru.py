"""Griffin's recurrent block against its twin and the class of RecurrentGemma."""

import numpy as np

from flax_attn.layers.rg_lru import RGLRU
from flax_attn.parity import Case, Rule

IDS = np.asarray([[0] * 5 + [3] * 2 + [0] * 6, [1] * 13])
FLOAT64 = {"dtypes": ("float64",)}


def griffin():
    """A config of tokens of width 18 and 15 components in 3 blocks."""
    from transformers import RecurrentGemmaConfig

    given = {"hidden_size": 18, "lru_width": 15, "num_attention_heads": 3, "conv1d_width": 3}
    return {"config": RecurrentGemmaConfig(**given, num_hidden_layers=3), "layer_idx": 0}


def from_the_first_token(module, x):
    """The call without a cache, at positions 0, 1, 2, ..."""
    import torch

    positions = torch.arange(x.shape[1])[None].expand(x.shape[:2])
    return module(x, positions, None, use_cache=False)[0]


CASES = [
    Case(RGLRU, {"in_features": 11, "num_heads": 3, "width": 12}, x=(2, 7, 11)),
    Case(
        RGLRU,
        {"in_features": 12, "num_heads": 4, "conv_size": 2},
        x=(2, 13, 12),
        segments=IDS,
        **FLOAT64,
    ),
    Case(
        RGLRU,
        {"in_features": 18, "num_heads": 3, "width": 15, "conv_size": 3},
        reference="transformers.models.recurrent_gemma.modeling_recurrent_gemma."
        "RecurrentGemmaRecurrentBlock",
        reference_config=griffin,
        torch_call=from_the_first_token,
        rules=(Rule("rg_lru.* -> *"),),
        x=(2, 7, 18),
        **FLOAT64,
    ),
]


def test_parity(case):
    case.check()
