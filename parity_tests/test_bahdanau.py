"""Additive attention against its twin: padding, one query, many queries, one that sees nothing."""

import numpy as np

from flax_attn.layers.bahdanau import BahdanauAttention
from flax_attn.parity import Case

SIZES = {"d_encoder": 11, "d_decoder": 7, "units": 6}
PADDING = (np.arange(9) < np.asarray([[9], [2], [5]])).reshape(3, 1, 1, 9)
RAGGED = np.random.RandomState(0).rand(3, 1, 5, 9) < 0.6
RAGGED[1, 0, 2] = False

CASES = [
    Case(BahdanauAttention, SIZES, h=(9, 11), s=(5, 7)),
    Case(BahdanauAttention, SIZES, h=(3, 9, 11), s=(3, 5, 7)),
    Case(BahdanauAttention, SIZES, h=(3, 5, 11), s=(3, 9, 7)),
    Case(BahdanauAttention, SIZES, h=(3, 9, 11), s=(3, 1, 7), mask=PADDING),
    Case(BahdanauAttention, SIZES, h=(3, 9, 11), s=(3, 5, 7), mask=RAGGED),
    Case(BahdanauAttention, SIZES, h=(2, 4, 33, 11), s=(2, 4, 34, 7)),
    Case(
        BahdanauAttention,
        {"d_encoder": 6, "d_decoder": 6, "units": 6},
        h=(6, 6, 6),
        s=(6, 6, 6),
    ),
]


def test_parity(case):
    case.check()
