from flax_attn.layers import MultiHeadAttentionCombined
from flax_attn.parity import Case, Rule

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2}
ODD = {"d_in": 11, "d_out": 12, "context_length": 9, "dropout": 0.0, "num_heads": 3}
BIASED = {**ODD, "qkv_bias": True}
# Four heads of width 4 over 4 tokens in 4 sentences: no wrong axis shows in a shape.
SQUARE = {"d_in": 16, "d_out": 16, "context_length": 4, "dropout": 0.0, "num_heads": 4}

WEIGHTS = Rule("{W_query,W_key,W_value}.weight -> qkv.kernel", "n o i -> i (n o)")
BIASES = Rule("{W_query,W_key,W_value}.bias -> qkv.bias", "n o -> (n o)")


def of_multi_head(config, **given):
    """Against the three separate projections, laid side by side."""
    return Case(
        MultiHeadAttentionCombined,
        config,
        reference="torch_ref.multi_head.MultiHeadAttention",
        rules=[WEIGHTS, BIASES] if config.get("qkv_bias") else [WEIGHTS],
        **given,
    )


CASES = [
    Case(MultiHeadAttentionCombined, NOTEBOOK, x=(6, 3)),
    Case(MultiHeadAttentionCombined, NOTEBOOK, x=(2, 6, 3)),
    Case(MultiHeadAttentionCombined, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(MultiHeadAttentionCombined, BIASED, x=(2, 9, 11)),
    Case(MultiHeadAttentionCombined, BIASED, x=(2, 1, 11)),
    Case(MultiHeadAttentionCombined, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(MultiHeadAttentionCombined, BIASED, x=(3, 3, 5, 11)),  # as many sentences as heads
    Case(MultiHeadAttentionCombined, SQUARE, x=(4, 4, 16)),
    Case(MultiHeadAttentionCombined, {**SQUARE, "qkv_bias": True}, x=(4, 4, 16)),
    *(
        Case(MultiHeadAttentionCombined, {**config, "dropout": rate}, train=True, x=shape)
        for rate, config, shape in [
            (0.1, ODD, (2, 5, 11)),
            (0.2, BIASED, (3, 3, 5, 11)),
            (0.5, SQUARE, (4, 4, 16)),
        ]
    ),
    of_multi_head(ODD, x=(2, 5, 11)),
    of_multi_head(BIASED, x=(2, 5, 11)),
    of_multi_head({**SQUARE, "qkv_bias": True}, x=(4, 4, 16)),
    of_multi_head({**BIASED, "dropout": 0.5}, train=True, x=(2, 5, 11)),
]


def test_parity(case):
    case.check()
