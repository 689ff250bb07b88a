from flax_attn.layers import MultiHeadAttentionEinsum
from flax_attn.parity import Case, Rule

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2}
ODD = {"d_in": 11, "d_out": 12, "context_length": 9, "dropout": 0.0, "num_heads": 3}
BIASED = {**ODD, "qkv_bias": True}
# Four heads of width 4 over 4 tokens in 4 sentences: no wrong axis shows in a shape.
SQUARE = {"d_in": 16, "d_out": 16, "context_length": 4, "dropout": 0.0, "num_heads": 4}

PROJECTIONS = ("query", "key", "value")
WEIGHTS = [Rule(f"W_{name}.weight -> W_{name}", "o i -> o i") for name in PROJECTIONS]
BIASES = [Rule(f"W_{name}.bias -> b_{name}", "o -> o") for name in PROJECTIONS]


def of_multi_head(config, **given):
    """Against Linear layers, whose weights lie here as they lie there."""
    return Case(
        MultiHeadAttentionEinsum,
        config,
        reference="torch_ref.multi_head.MultiHeadAttention",
        rules=WEIGHTS + BIASES if config.get("qkv_bias") else WEIGHTS,
        **given,
    )


CASES = [
    Case(MultiHeadAttentionEinsum, NOTEBOOK, x=(6, 3)),
    Case(MultiHeadAttentionEinsum, NOTEBOOK, x=(2, 6, 3)),
    Case(MultiHeadAttentionEinsum, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(MultiHeadAttentionEinsum, BIASED, x=(2, 9, 11)),
    Case(MultiHeadAttentionEinsum, BIASED, x=(2, 1, 11)),
    Case(MultiHeadAttentionEinsum, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(MultiHeadAttentionEinsum, BIASED, x=(3, 3, 5, 11)),  # as many sentences as heads
    Case(MultiHeadAttentionEinsum, SQUARE, x=(4, 4, 16)),
    Case(MultiHeadAttentionEinsum, {**SQUARE, "qkv_bias": True}, x=(4, 4, 16)),
    *(
        Case(MultiHeadAttentionEinsum, {**config, "dropout": rate}, train=True, x=shape)
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
