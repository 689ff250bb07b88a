"""Value residual attention against its twin and x-transformers."""

import numpy as np

from flax_attn.layers.value_residual import ValueResidualAttention
from flax_attn.parity import Case, Decode, Rule

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
NAMES = [Rule(f"to_{x} -> {y}_proj") for x, y in ("qq", "kk", "vv", ("out", "o"))]
# x-transformers' head n reads key head n % K, so here each has its own.
THEIRS = {"dim": 11, "heads": 6, "dim_head": 4, "causal": True, "flash": False}

ONE = {"dtypes": ("float64",), "x": (2, 7, 11)}
FIRST = {"values": (2, 7, 3, 4)}


def theirs(layer, x, values):
    """x-transformers' call; its values are `B N T H`."""
    return layer(x, value_residual=values.transpose(1, 2))


def published(learned):
    mix = [Rule("to_value_residual_mix.0 -> mix_proj")] if learned else []
    return Case(
        ValueResidualAttention,
        {**SIZES, "num_kv_heads": 6, "learned_mix": learned},
        reference="x_transformers.x_transformers.Attention",
        reference_config={**THEIRS, "learned_value_residual_mix": learned},
        torch_call=theirs,
        rules=[*NAMES, *mix],
        name=f"by x-transformers,learned_mix={learned}",
        values=(2, 7, 6, 4),
        **ONE,
    )


CASES = [
    Case(ValueResidualAttention, SIZES, **ONE, decode=Decode()),
    Case(ValueResidualAttention, SIZES, x=(2, 7, 11), values=(2, 7, 3, 4)),
    Case(ValueResidualAttention, {**SIZES, "learned_mix": True}, **ONE, **FIRST, mask=RAGGED),
    Case(ValueResidualAttention, {**SIZES, "learned_mix": True}, **ONE, **FIRST, valid=VALID),
    Case(ValueResidualAttention, {**SIZES, "sinks": True, "qkv_bias": True}, **ONE, **FIRST),
    Case(ValueResidualAttention, {**SIZES, "dropout": 0.3}, **ONE, **FIRST, train=True),
    Case(
        ValueResidualAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        dtypes=("float64",),
        x=(3, 12, 12),
        values=(3, 12, 3, 4),
    ),
    published(learned=False),
    published(learned=True),
]


def test_parity(case):
    case.check()
