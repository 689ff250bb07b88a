"""Cross-covariance attention against its twin and the attention of vit-pytorch's XCiT."""

import numpy as np

from flax_attn.layers.cross_covariance import CrossCovarianceAttention
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "num_heads": 3}
BIASED = {**SIZES, "qkv_bias": True}
ONE = {"dtypes": ("float64",)}
VALID = np.asarray([[True] * 7, [False] * 2 + [True] * 3 + [False] * 2, [False] * 7])


def xcit():
    return {
        "reference": "vit_pytorch.xcit.XCAttention",
        "made_by": "parity_tests.witnesses.vit.xcit_attention",
        "reference_config": {"dim": 12, "heads": 3, "dim_head": 4},
        "rules": [
            Rule("to_qkv -> qkv"),
            Rule("temperature.weight -> temperature"),
            Rule("to_out.0 -> proj"),
        ],
    }


CASES = [
    Case(CrossCovarianceAttention, SIZES, x=(2, 7, 12)),
    Case(CrossCovarianceAttention, BIASED, x=(7, 12), **ONE),
    Case(CrossCovarianceAttention, BIASED, x=(3, 7, 12), valid=VALID, **ONE),
    Case(CrossCovarianceAttention, {**SIZES, "dropout": 0.3}, x=(2, 7, 12), train=True, **ONE),
    Case(CrossCovarianceAttention, BIASED, x=(2, 5, 1, 12), **ONE),
    Case(CrossCovarianceAttention, {"dim": 12, "num_heads": 12}, x=(12, 12, 12), **ONE),
    Case(CrossCovarianceAttention, SIZES, x=(2, 7, 12), **xcit(), **ONE),
]


def test_parity(case):
    case.check()
