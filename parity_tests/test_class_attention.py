"""Class attention against its twin and the attention of vit-pytorch's CaiT."""

import numpy as np

from flax_attn.layers.class_attention import ClassAttention
from flax_attn.parity import Case, Rule

SIZES = {"dim": 12, "num_heads": 3}
ONE = {"dtypes": ("float64",)}
VALID = np.asarray([[True] * 3 + [False] * 4, [True] + [False] * 2 + [True] * 4, [False] * 7])
RAGGED = np.random.RandomState(0).rand(2, 3, 1, 7) < 0.6
RAGGED[1, 2, 0] = False


def ask(layer, x):
    """The first token asks, all tokens are its context."""
    return layer(x[:, :1], context=x[:, 1:])


def cait():
    """The attention of vit-pytorch's CaiT over a class token and its context."""
    return {
        "reference": "vit_pytorch.cait.Attention",
        "made_by": "parity_tests.witnesses.vit.cait_class_attention",
        "reference_config": {"dim": 12, "heads": 3, "dim_head": 4},
        "torch_call": ask,
        "rules": [
            Rule("to_q -> q"),
            Rule("to_kv.weight -> {k,v}.kernel", "(n o) i -> n i o"),
            Rule("to_out.0 -> proj"),
        ],
    }


CASES = [
    Case(ClassAttention, SIZES, x=(2, 7, 12)),
    Case(ClassAttention, {**SIZES, "qkv_bias": True}, x=(7, 12), **ONE),
    Case(ClassAttention, SIZES, x=(2, 7, 12), mask=RAGGED, **ONE),
    Case(ClassAttention, {**SIZES, "qkv_bias": True}, x=(3, 7, 12), valid=VALID, **ONE),
    Case(ClassAttention, {**SIZES, "dropout": 0.3}, x=(2, 7, 12), train=True, **ONE),
    Case(ClassAttention, SIZES, x=(2, 5, 1, 12), **ONE),
    Case(ClassAttention, {"dim": 12, "num_heads": 12}, x=(12, 12, 12), **ONE),
    Case(ClassAttention, SIZES, x=(2, 7, 12), **cait(), **ONE),
]


def test_parity(case):
    case.check()
