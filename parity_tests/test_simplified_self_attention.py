import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import taps
from flax_attn.layers import SimplifiedSelfAttention
from flax_attn.parity import Case, judge

SDPA = "torch.nn.functional.scaled_dot_product_attention"
SHAPES = [(6, 3), (2, 6, 3), (3, 5, 11), (7, 7, 7), (2, 1, 11), (2, 33, 5), (4, 2, 5, 7)]


def positive(*shape):
    """Tokens without negative numbers, as the notebook's: no row of scores sums to nearly zero."""
    return np.random.RandomState(0).uniform(0.0, 1.0, shape)


CASES = [
    *(Case(SimplifiedSelfAttention, {}, x=shape) for shape in SHAPES),
    *(
        Case(SimplifiedSelfAttention, {"normalise": "sum"}, x=positive(*shape))
        for shape in [(6, 3), (2, 6, 3), (3, 33, 11), (7, 7, 7), (4, 2, 5, 7)]
    ),
    Case(SimplifiedSelfAttention, {}, name="large logits", x=30 * positive(2, 9, 5)),
    Case(SimplifiedSelfAttention, {}, name="small logits", x=1e-3 * positive(2, 9, 5)),
    *(
        Case(
            SimplifiedSelfAttention,
            {},
            reference=SDPA,
            reference_config={},
            torch_call=lambda attention, x: attention(x, x, x, scale=1.0),
            x=shape,
        )
        for shape in [(2, 6, 3), (3, 33, 11), (7, 7, 7)]
    ),
]


def test_parity(case):
    case.check()


def test_every_row_of_weights_sums_to_one():
    with jax.enable_x64(True):
        x = jnp.asarray(positive(2, 6, 3))
        for normalise in ("softmax", "sum"):
            with taps.listen() as heard:
                SimplifiedSelfAttention(normalise=normalise)(x)
            sums = np.asarray(dict(heard)["weights"]).sum(-1)
            assert judge.same_function(sums, np.ones((2, 6))).ok, normalise
