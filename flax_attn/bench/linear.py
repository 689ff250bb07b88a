"""Competitors for the gated delta rule: chunks, steps, two chunked torch forms, and softmax.

All take q and k of unit length, v, and per token and head a log decay g and a strength beta; each
scales q by `H**-0.5`. Softmax attention is a different function, of q, k and v alone: it shows
above which length a linear recurrence is faster.

The reference is the step form in float64, one token after another, differentiated by JAX.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..attend import attend
from ..masks import CAUSAL
from ..recurrence import linear_recurrence
from .attention import Attention, of_jax
from .competitor import OWN_FAMILY, Build, Competitor
from .program import Call, JaxProgram, Program, TorchProgram
from .proof import Proof, first_call, prove_at
from .task import COTANGENT, Arrays, Task

PROVEN = 1000  # tokens, with two heads: sixteen chunks, the last one partial
CHUNK = 64  # tokens per chunk, in every chunked form
FLA = "ops/gated_delta_rule/naive.py"  # plain torch; fla's kernels need a GPU


@dataclass(frozen=True)
class Recurrence(Task):
    """The gated delta rule over q, k and v of `B T N H`, and g and beta of `B T N`."""

    proven_whole = False  # its reference takes one step after another

    @property
    def table(self) -> str:
        return f"gated delta rule, {self.heads} heads of width {self.width}, {self.dtype}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        heads = (self.batch, self.length, self.heads, self.width)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q", "k", "v", COTANGENT), heads)
        return {**shapes, "g": heads[:-1], "beta": heads[:-1]}

    def drawn(self, shapes: Mapping[str, tuple[int, ...]], draw: int) -> Arrays:
        arrays = super().drawn(shapes, draw)
        wide = {name: x.astype(np.float32) for name, x in arrays.items()}
        arrays |= {name: _unit(wide[name]).astype(arrays[name].dtype) for name in ("q", "k")}
        decay = -np.float32(0.1) * np.logaddexp(wide["g"], np.float32(0))
        strength = np.reciprocal(1 + np.exp(-wide["beta"]))
        kind = arrays["g"].dtype
        return {**arrays, "g": decay.astype(kind), "beta": strength.astype(kind)}

    def small(self) -> "Recurrence":
        return replace(self, length=min(self.length, PROVEN), heads=2, batch=1)

    def references(self) -> tuple[Arrays, Arrays]:
        return _single_steps(self)


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@cache
def _single_steps(task: Recurrence) -> tuple[Arrays, Arrays]:
    """The step form's output and gradients, in the dtype and in float64."""
    inputs = task.inputs()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) for name, x in inputs.items()}
        truth = _run(_steps(task), wide)
    return _run(_steps(task), inputs), truth


def _run(program: Program, inputs: Arrays) -> Arrays:
    placed = program.place(inputs)
    program.compile(placed)
    return program.take(first_call(program, placed)[0])


def competitors() -> list[Competitor]:
    """Returns the competitors, this library's chunked form first."""
    transformers, fla = _chunked(_transformers), _chunked(_fla)
    return [
        Competitor(OWN_FAMILY, OWN_FAMILY, of_jax(lambda task: recurrence(CHUNK))),
        Competitor("transformers, chunked", "torch", transformers, _without("transformers")),
        Competitor("fla, chunked", "torch", fla, _without("fla")),
        Competitor(f"{OWN_FAMILY}, scan", OWN_FAMILY, _steps),
        Competitor(f"{OWN_FAMILY}, softmax", OWN_FAMILY, _Softmax, prove=_prove_softmax),
    ]


def _without(package: str) -> Callable[[Any], str | None]:
    reason = f"{package} is not installed"
    return lambda task: None if find_spec(package) else reason


def recurrence(chunk: int | None) -> Call:
    """Returns the rule in chunks of tokens, or in single steps."""

    def call(x: Any) -> Any:
        q = x["q"] * x["q"].shape[-1] ** -0.5
        options = {"log_decay": x["g"], "beta": x["beta"], "delta": True, "chunk": chunk}
        return linear_recurrence(q, x["k"], x["v"], **options)[0]

    return call


_steps = of_jax(lambda task: recurrence(None))


class _Softmax(JaxProgram):
    """Causal attention, which takes no g and no beta."""

    def __init__(self, task: Task):
        super().__init__(lambda x: attend(x["q"], x["k"], x["v"], mask=CAUSAL), task.which)

    def place(self, inputs: Arrays) -> Any:
        return super().place({name: inputs[name] for name in ("q", "k", "v", COTANGENT)})


@cache
def _prove_softmax(task: Recurrence) -> Proof:
    sizes = task.length, task.width, task.heads, task.batch, task.dtype, task.which
    small = Attention(*sizes, seed=task.seed).small()
    return prove_at(_Softmax, small)


def _transformers() -> Callable:
    file: Any = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    return file.torch_chunk_gated_delta_rule


def _fla() -> Callable:
    """Loads fla's plain reference by file path, since importing fla also imports its kernels."""
    package: Any = find_spec("fla")
    path = Path(package.submodule_search_locations[0], FLA)
    spec: Any = spec_from_file_location("fla_gated_delta_rule", path)
    file = module_from_spec(spec)
    spec.loader.exec_module(file)
    return file.naive_chunk_gated_delta_rule


def _chunked(load: Callable[[], Callable]) -> Build:
    def build(task: Recurrence) -> TorchProgram:
        form = load()

        def call(x: Any) -> Any:
            return form(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], chunk_size=CHUNK)[0]

        return TorchProgram(call, task.which)

    return build
