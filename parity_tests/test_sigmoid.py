"""Sigmoid attention against its twin and x-transformers, whose sigmoid is plain."""

import numpy as np

from flax_attn.layers.sigmoid import SigmoidAttention
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
    Case(SigmoidAttention, SIZES, x=(2, 7, 11)),
    Case(SigmoidAttention, {**SIZES, "logit_bias": -0.4}, **ONE),
    Case(SigmoidAttention, {**SIZES, "qkv_bias": True}, **ONE, mask=RAGGED),
    Case(SigmoidAttention, {**SIZES, "out_bias": True}, **ONE, valid=VALID),
    Case(SigmoidAttention, {**SIZES, "dropout": 0.3}, **ONE, train=True),
    Case(
        SigmoidAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        dtypes=("float64",),
        x=(3, 12, 12),
    ),
    Case(
        SigmoidAttention,
        {**SIZES, "num_kv_heads": 6, "logit_bias": 0.0},
        reference="x_transformers.x_transformers.Attention",
        reference_config={**THEIRS, "sigmoid": True},
        rules=NAMES,
        name="by x-transformers,plain",
        dtypes=("float64",),
        x=(2, 7, 11),
    ),
]


def test_parity(case):
    case.check()
