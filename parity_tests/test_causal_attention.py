from flax_attn.layers import CausalAttention
from flax_attn.parity import Case, Decode

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0}
ODD = {"d_in": 11, "d_out": 6, "context_length": 9, "dropout": 0.0}
BIASED = {**ODD, "qkv_bias": True}
SQUARE = {"d_in": 7, "d_out": 7, "context_length": 7, "dropout": 0.0}

CASES = [
    Case(CausalAttention, NOTEBOOK, x=(6, 3), decode=Decode()),
    Case(CausalAttention, NOTEBOOK, x=(2, 6, 3)),
    Case(CausalAttention, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(CausalAttention, BIASED, x=(2, 9, 11)),
    Case(CausalAttention, BIASED, x=(2, 1, 11)),
    Case(CausalAttention, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(CausalAttention, BIASED, x=(4, 2, 5, 11)),
    Case(CausalAttention, SQUARE, x=(7, 7, 7)),
    Case(CausalAttention, {**SQUARE, "qkv_bias": True}, x=(7, 7, 7)),
    Case(CausalAttention, {**BIASED, "dropout": 0.5, "context_dropout": 0.5}, x=(2, 5, 11)),
    *(
        Case(CausalAttention, {**config, "dropout": rate, **also}, train=True, x=shape)
        for also in ({}, {"context_dropout": 0.2})
        for rate, config, shape in [
            (0.1, ODD, (2, 5, 11)),
            (0.2, BIASED, (4, 2, 5, 11)),
            (0.5, SQUARE, (7, 7, 7)),
        ]
    ),
    *(
        Case(CausalAttention, {**ODD, "context_dropout": rate}, train=True, x=(2, 5, 11))
        for rate in (0.1, 0.2, 0.5)
    ),
]


def test_parity(case):
    case.check()
