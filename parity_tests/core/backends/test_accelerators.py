"""Every variant lowers for CPU, GPU and TPU, forward and backward, without any of them at hand."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from parity_tests.core.cases import every_case, pure, smallest
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

PLATFORMS = ("cpu", "cuda", "tpu")


# Each way of computing of which a layer is made: `attend`, steps of its own, and recurrences.
KINDS = ("grouped_query", "latent", "differential", "longformer", "t5", "window", "gated_delta")
KINDS += ("mamba", "mamba2", "rg_lru")
SMALLEST = smallest(every_case())
FIRST = [next(case for case in SMALLEST if case.variant == kind) for kind in KINDS]


@pytest.mark.parametrize("case", with_nightly(SMALLEST, commit=FIRST), ids=str)
def test_every_case_lowers_for_all_platforms(case):
    f, params, floats = pure(case)

    def both_ways(params, floats):
        out, back = jax.vjp(f, params, floats)
        return out, *back(jnp.sin(out))

    with jax.numpy_dtype_promotion("standard"):  # nnx's own norms cannot run under the strict one
        exported = jax.export.export(jax.jit(both_ways), platforms=PLATFORMS)(params, floats)
    assert exported.platforms == PLATFORMS
    gradients = jax.tree.unflatten(exported.out_tree, exported.out_avals)[1:]
    for avals, given in zip(gradients, (params, floats), strict=True):
        assert {k: x.shape for k, x in avals.items()} == {k: x.shape for k, x in given.items()}


def test_a_primitive_that_a_platform_lacks_fails_to_export():
    def f(x):
        return jax.lax.linalg.eig(x)[0]

    with pytest.raises(NotImplementedError, match="tpu"):
        jax.export.export(jax.jit(f), platforms=PLATFORMS)(jnp.eye(3))
