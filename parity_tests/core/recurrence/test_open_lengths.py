"""Recurrences over a length that `jax.export` left open: values, gradients, documents, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flax_attn.parity import judge
from flax_attn.recurrence import causal_convolution, elementwise_recurrence, linear_recurrence
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal

pytestmark = pytest.mark.nightly

N, H = 2, 3


def of_keys(x, **how):
    q, k = x + 1, x - 1
    decay = -jnp.abs(x).sum(-1)
    return linear_recurrence(q, k, x, log_decay=decay, beta=jnp.tanh(decay), **how)


def of_channels(x, **how):
    return linear_recurrence(x, x, x + 1, log_decay=-jnp.abs(x), delta=True, **how)


def of_components(x, **how):
    x = x.reshape(*x.shape[:2], N * H)
    return elementwise_recurrence(x, -jnp.abs(x), **how)


def of_neighbours(x, **how):
    x = x.reshape(*x.shape[:2], N * H)
    return causal_convolution(x, jnp.asarray(normal(3, N * H, 4)), **how)


FUNCTIONS = {
    "heads": of_keys,
    "channels": of_channels,
    "one by one": lambda x, **how: of_keys(x, chunk=None, **how),
    "components": of_components,
    "convolution": of_neighbours,
}


def both_ways(function):
    def run(x, segments, valid):
        results, back = jax.vjp(lambda x: function(x, segments=segments, valid=valid), x)
        return results, back(jax.tree.map(jnp.ones_like, results))

    return jax.jit(run)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_symbolic_length_gives_the_results_of_known_lengths(name, padded):
    run = both_ways(FUNCTIONS[name])
    b, t = export.symbolic_shape("b, t")
    shapes = [jax.ShapeDtypeStruct((b, t, N, H), float), jax.ShapeDtypeStruct((b, t), int)]
    token_mask = jax.ShapeDtypeStruct((b, t), bool) if padded else None
    program = export.export(run)(*shapes, token_mask)
    for batch, length in [(2, 140), (1, 1)]:
        x = jnp.asarray(normal(0, batch, length, N, H))
        segments = jnp.arange(batch * length).reshape(batch, length) // 50
        valid = segments + jnp.arange(length)[None] % 7 != 3 if padded else None
        pairs = zip(
            *map(jax.tree.leaves, (program.call(x, segments, valid), run(x, segments, valid))),
            strict=True,
        )
        for got, want in pairs:
            verdict = judge.same_function(np.asarray(got), np.asarray(want), zero=True)
            assert verdict.ok, verdict
