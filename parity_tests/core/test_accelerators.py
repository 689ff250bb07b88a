"""Every variant lowers for CPU, GPU and TPU, forward and backward, without any of them at hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Case
from flax_attn.parity.collect import collect

PLATFORMS = ("cpu", "cuda", "tpu")


def smallest(cases: list[Case]) -> list[Case]:
    """Three at most of each variant, set up unlike each other: one that drops, then the least."""
    best: dict[tuple, Case] = {}
    for case in sorted(cases, key=order):
        flags = str(case).partition("|")[0] if not case.train else ""
        taken = [key for key in best if key[0] == case.variant]
        if len(taken) < 3:
            best.setdefault((case.variant, case.train, flags), case)
    return list(best.values())


def order(case: Case) -> tuple[bool, bool, int]:
    size = sum(x.size for x in case.arrays().values())
    return not case.train, not callable(case.config), size


def pure(case: Case) -> tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]:
    """The case as `f(params, floats)` on plain dicts of arrays, and these two dicts."""
    module = case.flax_module()
    module.train() if case.train else module.eval()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    paths = {".".join(map(str, path)): path for path, _ in nnx.to_flat_state(params)}
    held = dict(nnx.to_flat_state(params))
    arrays = {
        name: np.asarray(x, np.float32) if np.issubdtype(x.dtype, np.floating) else x
        for name, x in case.arrays().items()
    }
    floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}

    def f(params, floats):
        pairs = [(paths[name], held[paths[name]].replace(value)) for name, value in params.items()]
        copy = nnx.merge(graph, nnx.from_flat_state(pairs), rest, copy=True)
        return case.flax_call(copy, **{**arrays, **floats})

    return f, {name: held[path][...] for name, path in paths.items()}, floats


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # nnx's own norms cannot run under the strict one
        yield


@pytest.mark.parametrize("case", smallest(collect("parity_tests")), ids=str)
def test_lowers_everywhere(case):
    f, params, floats = pure(case)

    def both_ways(params, floats):
        out, back = jax.vjp(f, params, floats)
        return out, *back(jax.tree.map(jnp.sin, out))

    exported = jax.export.export(jax.jit(both_ways), platforms=PLATFORMS)(params, floats)
    assert exported.platforms == PLATFORMS
    gradients = jax.tree.unflatten(exported.out_tree, exported.out_avals)[1:]
    for avals, given in zip(gradients, (params, floats), strict=True):
        assert {name: x.shape for name, x in avals.items()} == {
            name: x.shape for name, x in given.items()
        }


def test_what_a_platform_lacks_is_seen():
    def f(x):
        return jax.lax.linalg.eig(x)[0]

    with pytest.raises(NotImplementedError, match="tpu"):
        jax.export.export(jax.jit(f), platforms=PLATFORMS)(jnp.eye(3))
