"""Entmax attention against its twin, and x-transformers with the package entmax."""

import numpy as np

from flax_attn.layers.entmax import EntmaxAttention
from flax_attn.parity import Case, Rule

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
NAMES = [Rule(f"to_{x} -> {y}_proj") for x, y in ("qq", "kk", "vv", ("out", "o"))]
# x-transformers' head n reads key head n % K, so here each has its own.
THEIRS = {"dim": 11, "heads": 6, "dim_head": 4, "causal": True, "flash": False}


def by_package(name):
    """x-transformers' arguments, its softmax replaced by the package's function of this name."""

    def theirs():
        from functools import partial

        import entmax

        return {**THEIRS, "custom_attn_fn": partial(getattr(entmax, name), dim=-1)}

    return theirs


ONE = {"dtypes": ("float64",), "x": (2, 7, 11)}

CASES = [
    Case(EntmaxAttention, SIZES, x=(2, 7, 11)),
    Case(EntmaxAttention, {**SIZES, "alpha": 2}, **ONE, mask=RAGGED),
    Case(EntmaxAttention, {**SIZES, "qkv_bias": True}, **ONE, mask=RAGGED),
    Case(EntmaxAttention, {**SIZES, "out_bias": True}, **ONE, valid=VALID),
    Case(EntmaxAttention, {**SIZES, "dropout": 0.3}, **ONE, train=True),
    Case(
        EntmaxAttention,
        {"in_features": 12, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
        dtypes=("float64",),
        x=(3, 12, 12),
    ),
    Case(
        EntmaxAttention,
        {**SIZES, "num_kv_heads": 6},
        reference="x_transformers.x_transformers.Attention",
        reference_config=by_package("entmax15"),
        rules=NAMES,
        name="by x-transformers and entmax",
        dtypes=("float64",),
        x=(2, 7, 11),
    ),
    Case(
        EntmaxAttention,
        {**SIZES, "num_kv_heads": 6, "alpha": 2},
        reference="x_transformers.x_transformers.Attention",
        reference_config=by_package("sparsemax"),
        rules=NAMES,
        name="by x-transformers and entmax,alpha=2",
        dtypes=("float64",),
        x=(2, 7, 11),
    ),
]


def test_parity(case):
    case.check()
