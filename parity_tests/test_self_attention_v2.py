from flax_attn.layers import SelfAttentionV2
from flax_attn.parity import Case

NOTEBOOK = {"d_in": 3, "d_out": 2}
ODD = {"d_in": 11, "d_out": 6}
BIASED = {**ODD, "qkv_bias": True}
SQUARE = {"d_in": 7, "d_out": 7}  # with 7 tokens no wrong axis shows in a shape

CASES = [
    Case(SelfAttentionV2, NOTEBOOK, x=(6, 3)),
    Case(SelfAttentionV2, NOTEBOOK, x=(2, 6, 3)),
    Case(SelfAttentionV2, ODD, x=(2, 5, 11)),
    Case(SelfAttentionV2, BIASED, x=(2, 5, 11)),
    Case(SelfAttentionV2, BIASED, x=(2, 1, 11)),
    Case(SelfAttentionV2, BIASED, x=(2, 33, 11)),
    Case(SelfAttentionV2, BIASED, x=(4, 2, 5, 11)),
    Case(SelfAttentionV2, SQUARE, x=(7, 7, 7)),
    Case(SelfAttentionV2, {**SQUARE, "qkv_bias": True}, x=(7, 7, 7)),
]


def test_parity(case):
    case.check()
