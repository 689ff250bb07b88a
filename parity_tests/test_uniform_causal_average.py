import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.layers import UniformCausalAverage
from flax_attn.parity import Case, judge

SDPA = "torch.nn.functional.scaled_dot_product_attention"
SHAPES = [(8, 2), (4, 8, 32), (3, 5, 11), (7, 7, 7), (2, 33, 5), (4, 2, 5, 7)]


def equal_scores(attention, x):
    """Queries of zeros find every key equally interesting."""
    return attention(0.0 * x, x, x, is_causal=True)


CASES = [
    *(Case(UniformCausalAverage, {}, x=shape) for shape in SHAPES),
    *(
        Case(
            UniformCausalAverage,
            {},
            reference=SDPA,
            reference_config={},
            torch_call=equal_scores,
            x=shape,
        )
        for shape in [(4, 8, 32), (3, 33, 11), (7, 7, 7)]
    ),
]


def test_parity(case):
    case.check()


def test_running_mean():
    with jax.enable_x64(True):
        x = np.random.RandomState(0).standard_normal((2, 33, 5))
        means = np.cumsum(x, axis=1) / np.arange(1, 34)[:, None]
        assert judge.same_function(np.asarray(UniformCausalAverage()(jnp.asarray(x))), means).ok


def test_one_token_is_its_own_mean():
    x = jnp.asarray([[0.1, -0.7, 3.0]])
    assert (UniformCausalAverage()(x) == x).all()
