"""Kimi's delta attention against its twin and the class of Kimi Linear."""

import numpy as np

from flax_attn.layers.kimi_delta import KimiDeltaAttention
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 11, "num_heads": 3, "key_dim": 4, "value_dim": 5}
IDS = np.asarray([[0] * 5 + [3] * 2 + [0] * 12, [1] * 19])
FLOAT64 = {"dtypes": ("float64",)}


def kimi_linear():
    """A config whose layers have 3 heads of width 4, of tokens of width 18."""
    from transformers import KimiLinearConfig

    heads = {"linear_num_heads": 3, "linear_head_dim": 4, "linear_conv_kernel_dim": 3}
    kinds = ["linear_attention", "full_attention"]
    return {
        "config": KimiLinearConfig(
            hidden_size=18, num_hidden_layers=2, layer_types=kinds, rms_norm_eps=1e-5, **heads
        ),
        "layer_idx": 0,
    }


CASES = [
    Case(KimiDeltaAttention, SIZES, x=(2, 7, 11)),
    Case(KimiDeltaAttention, {**SIZES, "chunk": 16}, x=(2, 19, 11), segments=IDS, **FLOAT64),
    Case(
        KimiDeltaAttention,
        {"in_features": 18, "num_heads": 3, "key_dim": 4, "value_dim": 4, "conv_size": 3},
        reference="transformers.models.kimi_linear.modeling_kimi_linear.KimiLinearDeltaAttention",
        reference_config=kimi_linear,
        torch_call=lambda module, x: module(x),
        rules=(
            Rule("forget_gate.f_a_proj -> f_a_proj"),
            Rule("forget_gate.f_b_proj -> f_b_proj"),
            Rule("forget_gate.dt_bias -> dt_bias"),
            Rule("forget_gate.A_log -> A_log", "1 1 n 1 -> n"),
            Rule("o_norm.weight -> o_norm.scale"),
        ),
        x=(2, 13, 18),
        **FLOAT64,
    ),
]


def test_parity(case):
    case.check()
