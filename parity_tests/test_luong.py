"""Luong's three scores against their twin, and "dot" against torch's own attention."""

import numpy as np

from flax_attn.layers.luong import LuongAttention
from flax_attn.parity import Case

DOT = {"d_decoder": 7, "d_encoder": 7, "score": "dot"}
GENERAL = {"d_decoder": 7, "d_encoder": 11, "score": "general"}
CONCAT = {"d_decoder": 7, "d_encoder": 11, "score": "concat", "units": 6}
PADDING = (np.arange(9) < np.asarray([[9], [2], [5]])).reshape(3, 1, 1, 9)
RAGGED = np.random.RandomState(0).rand(3, 1, 5, 9) < 0.6
RAGGED[1, 0, 2] = False


def cases_of(config):
    width = config["d_encoder"]
    return [
        Case(LuongAttention, config, h=(9, width), s=(5, 7)),
        Case(LuongAttention, config, h=(3, 9, width), s=(3, 1, 7), mask=PADDING),
        Case(LuongAttention, config, h=(3, 9, width), s=(3, 5, 7), mask=RAGGED),
        Case(LuongAttention, config, h=(2, 4, 33, width), s=(2, 4, 34, 7)),
    ]


CASES = [
    *cases_of(DOT),
    *cases_of(GENERAL),
    *cases_of(CONCAT),
    Case(LuongAttention, {"d_decoder": 6, "d_encoder": 6}, h=(6, 6, 6), s=(6, 6, 6)),
    Case(
        LuongAttention,
        DOT,
        reference="torch.nn.functional.scaled_dot_product_attention",
        torch_call=lambda sdpa, h, s: sdpa(s, h, h, scale=1.0),
        h=(3, 9, 7),
        s=(3, 5, 7),
    ),
]


def test_parity(case):
    case.check()
