import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.layers import SingleHeadAttention
from flax_attn.parity import Case, judge

NOTEBOOK = {"d_in": 32, "head_size": 16}
ODD = {"d_in": 11, "head_size": 6}
SQUARE = {"d_in": 7, "head_size": 7}  # with 7 tokens no wrong axis shows in a shape
OPTIONS = [{"scale": scale, "value": value} for scale in (False, True) for value in (True, False)]

CASES = [
    *(
        Case(SingleHeadAttention, {**config, **options}, x=shape)
        for options in OPTIONS
        for config, shape in [(NOTEBOOK, (4, 8, 32)), (ODD, (2, 5, 11)), (SQUARE, (7, 7, 7))]
    ),
    Case(SingleHeadAttention, ODD, x=(5, 11)),
    Case(SingleHeadAttention, ODD, x=(2, 1, 11)),
    Case(SingleHeadAttention, ODD, x=(2, 33, 11)),
    Case(SingleHeadAttention, ODD, x=(4, 2, 5, 11)),
]


def test_parity(case):
    case.check()


def test_scaling_the_scores_is_scaling_the_queries():
    """By the head's width, 16, whose root is exact; the width of a token, 11, plays no part."""
    with jax.enable_x64(True):
        scaled, plain = (
            SingleHeadAttention(11, 16, scale=scale, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
            for scale in (True, False)
        )
        plain.query.kernel[...] = plain.query.kernel[...] / 4
        x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 5, 11)))
        assert judge.same_function(np.asarray(scaled(x)), np.asarray(plain(x))).ok
