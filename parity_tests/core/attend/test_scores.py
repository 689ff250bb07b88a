"""A score that reads an array has the same gradient in every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import ScoreFn, attend
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal


@pytest.mark.usefixtures("float64")
def test_an_index_beyond_an_array_has_one_gradient_in_every_backend():
    """That of the entry that it reads; indices are drawn, many of them outside on either side."""
    length, (q, k, v) = 9, (normal(seed, 1, 13, 2, 4) for seed in range(3))

    def at(params, i, j):
        return params["a"] * i + params["b"] * j + params["c"]

    def read(params, x, b, n, i, j):
        return x * params["array"][at(params, i, j)]

    def inside(params, x, b, n, i, j):
        index = at(params, i, j)
        index = jnp.where(index < 0, index + length, index)  # negative ones count from the end
        return x * params["array"][jnp.clip(index, 0, length - 1)]

    def loss(array, steps, fn, backend):
        params = {"array": array, **steps}
        return (attend(q, k, v, score=ScoreFn(fn, params), backend=backend) * v).sum()

    gradient = jax.jit(jax.grad(loss), static_argnames=("fn", "backend"))
    draw = np.random.default_rng(0)
    for _ in range(20):
        steps = dict(zip("abc", map(np.int32, draw.integers(-2, 3, 3) * [1, 1, 6]), strict=True))
        array = draw.normal(size=length)
        want = gradient(array, steps, inside, "reference")
        for backend in ("reference", "blockwise"):
            assert judge.allclose(gradient(array, steps, read, backend), want), (steps, backend)
