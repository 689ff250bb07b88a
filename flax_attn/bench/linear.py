"""Competitors for the gated delta rule: chunks, steps, two chunked torch forms, and softmax.

All take q and k of unit length, v, and per token and head a log decay g and a strength beta; each
scales q by `H**-0.5`. Softmax attention is a different function, of q, k and v alone: it shows
above which length a linear recurrence is faster.

The reference is the step form in float64, one token after another, differentiated by JAX.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..recurrence import linear_recurrence
from . import functions, proof
from .competitor import OWN_FAMILY, Competitor
from .program import JaxProgram, Program, TorchProgram
from .proof import Arrays, Proof
from .workload import BOTH, GATED, Workload

PROVEN = 1000  # tokens, with two heads: sixteen chunks, the last one partial
CHUNK = 64  # tokens per chunk, in every chunked form
FLA = "ops/gated_delta_rule/naive.py"  # plain torch; fla's kernels need a GPU
Call = Callable[..., Any]


def competitors() -> list[Competitor]:
    """Returns the competitors, this library's chunked form first."""

    def torch(name: str, load: Callable[[], Call], refusal: Callable) -> Competitor:
        build = partial(_torch, load)
        return Competitor(name, "torch", build, refusal, prove=partial(_prove, build))

    return [
        Competitor(OWN_FAMILY, OWN_FAMILY, _chunked, prove=partial(_prove, _chunked)),
        torch("transformers, chunked", _transformers, _without("transformers")),
        torch("fla, chunked", _fla, _without("fla")),
        Competitor(f"{OWN_FAMILY}, scan", OWN_FAMILY, _steps, prove=partial(_prove, _steps)),
        Competitor(f"{OWN_FAMILY}, softmax", OWN_FAMILY, _softmax, prove=_prove_softmax),
    ]


def _without(package: str) -> Callable[[Workload, str], str | None]:
    reason = f"{package} is not installed"
    return lambda w, which: None if find_spec(package) else reason


def _recurrence(chunk: int | None) -> Call:
    def call(inputs: Any) -> Any:
        q, k, v, g, beta = inputs
        q = q * q.shape[-1] ** -0.5
        return linear_recurrence(q, k, v, log_decay=g, beta=beta, delta=True, chunk=chunk)[0]

    return call


def _jax(call: Call, w: Workload, which: str) -> Program:
    def pack(arrays: Any) -> Any:
        return tuple(arrays[name] for name in GATED)

    return JaxProgram(call, pack, lambda grads: dict(zip(GATED, grads, strict=True)), which)


_chunked = partial(_jax, _recurrence(CHUNK))
_steps = partial(_jax, _recurrence(None))


def _softmax(w: Workload, which: str) -> Program:
    return functions.flax_attn_competitors(("auto",))[0].build(replace(w, layer=None), which)


def _transformers() -> Call:
    file: Any = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    return file.torch_chunk_gated_delta_rule


def _fla() -> Call:
    """Loads fla's plain reference by file path, since importing fla also imports its kernels."""
    package: Any = find_spec("fla")
    path = Path(package.submodule_search_locations[0], FLA)
    spec: Any = spec_from_file_location("fla_gated_delta_rule", path)
    file = module_from_spec(spec)
    spec.loader.exec_module(file)
    return file.naive_chunk_gated_delta_rule


def _torch(load: Callable[[], Call], w: Workload, which: str) -> Program:
    form = load()

    def call(inputs: Any) -> Any:
        q, k, v, g, beta = inputs
        return form(q, k, v, g=g, beta=beta, chunk_size=CHUNK)[0]

    def unpack(grads: Any) -> Any:
        return dict(zip(GATED, grads, strict=True))

    return TorchProgram(
        call, lambda tensors: [tensors[x] for x in GATED], lambda inputs: inputs, unpack, which
    )


def _small(w: Workload) -> Workload:
    return replace(w, length=min(w.length, PROVEN), heads=2, batch=1)


def _prove(build: Callable[[Workload, str], Program], w: Workload, which: str) -> Proof:
    return _judged(build, _small(w), which)


@cache
def _judged(build: Callable[[Workload, str], Program], w: Workload, which: str) -> Proof:
    program, (baseline, truth) = build(w, which), references(w)
    return proof.against(_run(program, w.arrays()), baseline, truth, w.dtype, which)


@cache
def _prove_softmax(w: Workload, which: str) -> Proof:
    small = replace(w, layer=None).cut()
    return proof.prove(_softmax(small, which), small, which)[0]


@cache
def references(w: Workload) -> tuple[Arrays, Arrays]:
    """The step form's output and gradients, in the dtype and in float64."""
    arrays = w.arrays()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in arrays.items()}
        truth = _run(_steps(w, BOTH), wide)
    return _run(_steps(w, BOTH), arrays), truth


def _run(program: Program, arrays: Any) -> Arrays:
    placed = program.place(arrays)
    if program.compile_seconds is None:
        program.compile(placed)
    return program.take(proof.first_call(program, placed)[0])
