"""Kernels compile for the machines that they are made for: asked for and chosen."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Documents, ScoreFn, Segments, Softcap, Window, attend

from . import registers
from .programs import both_ways, largest
from .targets import GPUS, TPUS, compiled, lower

T, N, K, H = 1536, 4, 2, 128
KERNELS = {  # as machine code names them
    "splash": "tpu_custom_call",
    "cudnn": "__cudnn$fmha",
    "pallas": "__gpu$xla.gpu.triton",
}
MASKS = {"causal": CAUSAL, "window": CAUSAL & Window(511, 0)}
DOCUMENTS = Documents(np.asarray([500, 0, 700, 300]))
SEGMENTS = Segments(np.arange(T)[None] // 500)


def code_of(name: str, **how: object) -> jax.stages.Compiled:
    q, k = (jax.ShapeDtypeStruct((1, T, n, H), jnp.bfloat16) for n in (N, K))
    sinks = jax.ShapeDtypeStruct((N,), jnp.float32)

    def run(q, k, v, sinks):
        return attend(q, k, v, sinks=sinks, return_lse=True, **how)

    return compiled(lower(name, both_ways(run), q, k, k, sinks), name)


def calls(code: jax.stages.Compiled, backend: str) -> int:
    return (code.as_text() or "").count(KERNELS[backend])


def check(code: jax.stages.Compiled, backend: str) -> None:
    assert calls(code, backend) >= 2  # forward and backward
    assert largest(code) < T * T


@pytest.mark.parametrize("target", TPUS, indirect=True)
def test_splash_is_chosen_on_a_tpu(target):
    check(code_of(target, backend="auto", mask=CAUSAL), "splash")


@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_splash_with_its_rules(target):
    how = {"mask": MASKS["window"] & SEGMENTS, "score": Softcap(30.0)}
    check(code_of(target, backend="splash", **how), "splash")


@pytest.mark.parametrize("target", ["v5e"], indirect=True)
def test_packed_documents_on_a_tpu(target):
    """By their ids; lengths are arguments."""
    check(code_of(target, backend="auto", mask=CAUSAL & DOCUMENTS), "splash")


@pytest.mark.parametrize("target", ["h200"], indirect=True)
def test_packed_documents_on_a_gpu(target):
    """In blocks where tokamax is not installed; no array is larger than without documents."""
    masks = (CAUSAL & DOCUMENTS, CAUSAL)
    packed, plain = (code_of(target, backend="blockwise", mask=mask) for mask in masks)
    assert largest(packed) <= largest(plain)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["cudnn", "auto"])
@pytest.mark.parametrize("target", GPUS, indirect=True)
def test_cudnn_on_a_gpu(target, backend, mask):
    check(code_of(target, backend=backend, mask=MASKS[mask]), "cudnn")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("target", GPUS, indirect=True)
def test_pallas_on_a_gpu(target, mask):
    """With a function as its score, which no other kernel takes."""
    score = ScoreFn(lambda x, b, n, q, k: x - 0.01 * jnp.abs(q - k))
    check(code_of(target, backend="pallas", mask=MASKS[mask], score=score), "pallas")


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="NVIDIA's ptxas is not on the PATH")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("width", registers.WIDTHS)
@pytest.mark.parametrize("target", GPUS, indirect=True)
def test_pallas_fits_into_registers(target, width, dtype):
    """Tensor cores where numbers are short; in float32 no product is rounded to TF32."""
    each = registers.needs("`CAUSAL`", width, dtype)
    assert {*each} == {*registers.KERNELS}
    for needs in each.values():
        assert needs.spilled <= 40 and needs.in_tf32 == 0
        assert (needs.products > 0) == (dtype == "bfloat16")


@pytest.mark.parametrize("target", ["v5e", *GPUS], indirect=True)
def test_other_backends_call_no_kernel(target):
    code = code_of(target, backend="blockwise", mask=CAUSAL)
    assert not any(calls(code, backend) for backend in KERNELS)
