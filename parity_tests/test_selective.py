"""Selective attention against its twin and x-transformers."""

import numpy as np

from flax_attn.layers.selective import SelectiveAttention
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
NAMES = [Rule(f"to_{x} -> {y}_proj") for x, y in ("qq", "kk", "vv", ("out", "o"))]
# x-transformers' head n reads key head n % K, so here each has its own.
THEIRS = {"dim": 11, "heads": 6, "dim_head": 4, "causal": True, "flash": False}

ONE = {"dtypes": ("float64",), "x": (2, 7, 11)}

CASES = [
    Case(SelectiveAttention, SIZES, x=(2, 7, 11)),
    Case(SelectiveAttention, {**SIZES, "qkv_bias": True}, **ONE, mask=RAGGED),
    Case(SelectiveAttention, {**SIZES, "out_bias": True}, **ONE, valid=VALID),
    Case(SelectiveAttention, {**SIZES, "dropout": 0.3}, **ONE, train=True),
    Case(
        SelectiveAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        dtypes=("float64",),
        x=(3, 12, 12),
    ),
    Case(
        SelectiveAttention,
        {**SIZES, "num_kv_heads": 6},
        reference="x_transformers.x_transformers.Attention",
        reference_config={**THEIRS, "selective": True},
        rules=NAMES,
        name="by x-transformers",
        dtypes=("float64",),
        x=(2, 7, 11),
    ),
]


def test_parity(case):
    case.check()
