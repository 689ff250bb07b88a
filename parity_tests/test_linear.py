"""Linear attention in sums against its quadratic form: both directions, padding, the recurrence."""

import numpy as np

from flax_attn.layers.linear import LinearAttention
from flax_attn.parity import Case

SIZES = {"in_features": 11, "num_heads": 3, "head_dim": 4}
FORWARD = {**SIZES, "causal": True}
THERE = np.arange(9) < np.asarray([[9], [2], [0]])

CASES = [
    *(
        case
        for config in (SIZES, FORWARD)
        for case in (
            Case(LinearAttention, config, x=(9, 11)),
            Case(LinearAttention, config, x=(3, 9, 11), mask=THERE),
            Case(LinearAttention, config, x=(2, 5, 1, 11)),
            Case(LinearAttention, config, x=(2, 150, 11)),
        )
    ),
    Case(LinearAttention, {"in_features": 6, "num_heads": 2, "head_dim": 3}, x=(6, 6, 6)),
    Case(
        LinearAttention,
        FORWARD,
        flax_call=lambda layer, x: layer.recurrent(x),
        name="recurrent",
        x=(3, 9, 11),
    ),
]


def test_parity(case):
    case.check()
