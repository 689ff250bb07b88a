"""Every layer, forward and backward, in machine code for TPU v5e, v5p, v6e and for an H200."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import flax_attn.layers
from flax_attn.parity import Case
from flax_attn.parity.cases.collect import collect
from parity_tests.core.cases import smallest

from .programs import of_cases
from .targets import GPUS, NAMES, compiled, lower

COVERED = tuple(smallest(collect("parity_tests"), most=2))
of_all_targets = pytest.mark.parametrize("target", NAMES, indirect=True)
of_both_dtypes = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])


def compiles(name: str, cases: tuple[Case, ...], dtype: object) -> jax.stages.Compiled:
    run, avals = of_cases(cases, dtype)
    with jax.numpy_dtype_promotion("standard"):  # nnx's own norms cannot run under the strict one
        lowered = lower(name, run, avals)
    code = compiled(lowered, name)
    for case, (out, grads), given in zip(cases, lowered.out_info, avals, strict=True):
        assert {x.dtype for x in jax.tree.leaves(out)} == {jnp.dtype(dtype)}, case
        assert jax.tree.map(_kind, tuple(grads)) == jax.tree.map(_kind, given), case
    return code


def refusals(name: str, cases: tuple[Case, ...], dtype: object) -> dict[str, str]:
    """The cases that do not compile by themselves, with the compiler's first words."""
    found = {}
    for case in cases:
        try:
            compiles(name, (case,), dtype)
        except Exception as error:
            found[str(case)] = str(error)[:300]
    return found


def _kind(x: jax.ShapeDtypeStruct) -> tuple:
    return x.shape, x.dtype


@of_all_targets
@of_both_dtypes
def test_every_layer_compiles_forward_and_backward(target, dtype):
    try:
        code = compiles(target, COVERED, dtype)
    except Exception as error:
        pytest.fail(f"{refusals(target, COVERED, dtype) or error}")
    assert {x.device_set.pop().platform for x in jax.tree.leaves(code.output_shardings)} == {
        "gpu" if target in GPUS else "tpu"
    }


def test_no_layer_is_left_out():
    layers = {x for _, x in inspect.getmembers(flax_attn.layers, inspect.isclass)}
    assert {case.flax_class for case in COVERED} == layers
