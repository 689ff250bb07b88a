"""`listen` collects what its own trace has, and says so where a transformation keeps the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import GatedDeltaAttention, GroupedQueryAttention, Rotary
from flax_attn.parity import judge
from flax_attn.taps import listen, tap
from parity_tests.core.backends.refusal import told

D = 12
LAYERS = {
    "softmax": lambda: GroupedQueryAttention(D, 4, 2, 8, rotary=Rotary(), rngs=nnx.Rngs(0)),
    "recurrent": lambda: GatedDeltaAttention(D, 2, 4, 5, rngs=nnx.Rngs(0)),
}
TRANSFORMED = {
    "scan": lambda f, x: jax.lax.scan(lambda x, _: (f(x), None), x, None, length=2),
    "while": lambda f, x: jax.lax.fori_loop(0, 2, lambda _, x: f(x), x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "remat": lambda f, x: jax.checkpoint(f)(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
}


@pytest.mark.nightly(but=["False-jit-softmax"])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("of", TRANSFORMED)
@pytest.mark.parametrize("traced", [False, True])
def test_a_block_opened_outside_of_a_transformation_says_what_to_do(of, name, traced):
    layer, x = LAYERS[name](), jnp.ones((2, 3, D))

    def outside(x):
        with listen():
            return TRANSFORMED[of](layer, x)

    advice = "Open listen inside the function that is transformed, and return the values"
    with told(ValueError, "tap ", "scan", "remat", "vmap", advice):
        (jax.jit(outside) if traced else outside)(x)


@pytest.mark.nightly
@pytest.mark.parametrize("of", TRANSFORMED)
def test_what_only_replaces_values_may_be_opened_outside(of):
    layer, x = LAYERS["softmax"](), jnp.ones((2, 3, D))
    with listen(lambda name, value: value * 0 if name == "context" else None):
        assert jax.tree.leaves(TRANSFORMED[of](layer, x))


def weights_of(layer, x):
    with listen() as heard:
        y = layer(x)
    return y, dict(heard)["weights"]


@pytest.mark.nightly
def test_a_block_inside_brings_the_values_out():
    layer, x = LAYERS["softmax"](), jax.random.normal(jax.random.key(0), (2, 3, D))
    first, second = weights_of(layer, x), weights_of(layer, layer(x))
    _, scanned = jax.lax.scan(lambda x, _: weights_of(layer, x), x, None, length=2)
    rows = jax.vmap(lambda x: weights_of(layer, x)[1])(x)[:, 0]  # one row has a batch of one
    kept = jax.checkpoint(lambda x: weights_of(layer, x)[1])(x)
    pairs = [(scanned[0], first[1]), (scanned[1], second[1]), (rows, first[1]), (kept, first[1])]
    for got, want in pairs:
        want = np.asarray(want)
        assert judge.no_worse(np.asarray(got), want, want.astype(np.float64), "float32").ok


def test_known_values_and_one_trace_are_collected():
    @jax.jit
    def both(x):
        with listen() as heard:
            _ = tap("mine", x + 1)
            jax.lax.cond(True, lambda: tap("known", np.ones(2)), lambda: np.ones(2))
        return dict(heard)

    assert both(jnp.zeros(2)).keys() == {"mine", "known"}
