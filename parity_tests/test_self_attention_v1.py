from flax_attn.layers import SelfAttentionV1
from flax_attn.parity import Case, Rule

NOTEBOOK = {"d_in": 3, "d_out": 2}
ODD = {"d_in": 11, "d_out": 6}
SQUARE = {"d_in": 7, "d_out": 7}  # with 7 tokens no wrong axis shows in a shape

# Version 2's Linear weights are (d_out, d_in): into version 1 they go transposed.
FROM_V2 = [
    Rule(f"{name}.weight -> {name}", "o i -> i o") for name in ("W_query", "W_key", "W_value")
]

CASES = [
    Case(SelfAttentionV1, NOTEBOOK, x=(6, 3)),
    Case(SelfAttentionV1, NOTEBOOK, x=(2, 6, 3)),
    Case(SelfAttentionV1, ODD, x=(2, 5, 11)),
    Case(SelfAttentionV1, ODD, x=(2, 1, 11)),
    Case(SelfAttentionV1, ODD, x=(2, 33, 11)),
    Case(SelfAttentionV1, ODD, x=(4, 2, 5, 11)),
    Case(SelfAttentionV1, SQUARE, x=(7, 7)),
    Case(SelfAttentionV1, SQUARE, x=(7, 7, 7)),
    *(
        Case(
            SelfAttentionV1,
            config,
            reference="torch_ref.self_attention_v2.SelfAttentionV2",
            rules=FROM_V2,
            x=shape,
        )
        for config, shape in [(NOTEBOOK, (6, 3)), (ODD, (2, 5, 11)), (SQUARE, (7, 7, 7))]
    ),
]


def test_parity(case):
    case.check()
