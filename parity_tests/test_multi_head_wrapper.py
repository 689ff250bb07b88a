import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.layers import MultiHeadAttentionWrapper
from flax_attn.parity import Case

NOTEBOOK = {"d_in": 3, "d_out": 2, "context_length": 6, "dropout": 0.0, "num_heads": 2}
ODD = {"d_in": 11, "d_out": 6, "context_length": 9, "dropout": 0.0, "num_heads": 3}
BIASED = {**ODD, "qkv_bias": True}
SQUARE = {"d_in": 4, "d_out": 4, "context_length": 4, "dropout": 0.0, "num_heads": 4}

CASES = [
    Case(MultiHeadAttentionWrapper, NOTEBOOK, x=(6, 3)),
    Case(MultiHeadAttentionWrapper, NOTEBOOK, x=(2, 6, 3)),
    Case(MultiHeadAttentionWrapper, {**NOTEBOOK, "num_heads": 1}, x=(2, 6, 3)),
    Case(MultiHeadAttentionWrapper, ODD, x=(2, 5, 11)),  # shorter than the context
    Case(MultiHeadAttentionWrapper, BIASED, x=(2, 9, 11)),
    Case(MultiHeadAttentionWrapper, BIASED, x=(2, 1, 11)),
    Case(MultiHeadAttentionWrapper, {**BIASED, "context_length": 40}, x=(2, 33, 11)),
    Case(MultiHeadAttentionWrapper, BIASED, x=(4, 2, 5, 11)),
    Case(MultiHeadAttentionWrapper, SQUARE, x=(4, 4, 4)),
    Case(MultiHeadAttentionWrapper, {**SQUARE, "qkv_bias": True}, x=(4, 4, 4)),
    *(
        Case(MultiHeadAttentionWrapper, {**config, "dropout": rate}, train=True, x=shape)
        for rate, config, shape in [
            (0.1, ODD, (2, 5, 11)),
            (0.2, BIASED, (4, 2, 5, 11)),
            (0.5, SQUARE, (4, 4, 4)),
        ]
    ),
]


def test_parity(case):
    case.check()


def test_heads_stand_side_by_side_in_their_order():
    layer = MultiHeadAttentionWrapper(**ODD, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 5, 11)), jnp.float32)
    whole = layer(x)
    for i, head in enumerate(layer.heads):
        assert (whole[..., 6 * i : 6 * (i + 1)] == head(x)).all()
