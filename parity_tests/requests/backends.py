"""A program as a compiled function of its arrays, by one backend.

What the fuzz knows of the library's inside stands here alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

import flax_attn as fa
from flax_attn import attend
from flax_attn.backends import blockwise
from flax_attn.backends.local import attend_locally
from flax_attn.rules import Rules, sizes_of

from .programs import Program

# Compiles in a third of the time, and long static masks, which are constants, in a tenth.
QUICKLY = {"xla_cpu_use_fusion_emitters": False, "xla_disable_hlo_passes": "constant_folding"}


def compiled(program: Program, backend: str, fixed: Any) -> Callable[..., Any]:
    """`(floats, data, do, dlse) -> (o, lse, gradients of floats)`, by `backend`.

    `fixed` are the mask's arrays if they are constants of the program.
    """

    def call(floats, data):
        rules = rules_of(program, floats, data, fixed)
        arrays = [floats[name] for name in "qkv"]
        if backend == "blockwise" and program.plan[1]:
            return planned(*arrays, rules, program.plan[1], program.empty)
        parts = {name: getattr(rules, name) for name in ("mask", "score", "sinks", "dropout")}
        parts |= {"scale": rules.scale, "empty": program.empty}
        return attend(*arrays, **parts, backend=backend, return_lse=True)

    def run(floats, data, do, dlse):
        (o, lse), back = jax.vjp(lambda floats: call(floats, data), floats)
        return o, lse, back((do, dlse))[0]

    thorough = program.thorough and not program.is_long
    return jax.jit(run, compiler_options=None if thorough else quickly())


@cache
def quickly() -> dict[str, Any]:
    """Those of `QUICKLY` that this XLA knows."""
    known = {}
    for name, value in QUICKLY.items():
        try:
            jax.jit(lambda: 0, compiler_options={name: value})()
        except jax.errors.JaxRuntimeError:
            continue
        known[name] = value
    return known


def rules_of(program: Program, floats: dict, data: dict, fixed: Any) -> Rules:
    """The program's rules on these arrays."""
    dropout = None
    if program.dropout == "Dropout":
        dropout = fa.Dropout(program.rate, jax.random.wrap_key_data(data["key"]))
    if program.dropout == "DropoutMask":
        dropout = fa.DropoutMask(data["keep"], program.rate)
    return Rules(
        mask=program.mask.build(data["mask"] if fixed is None else fixed),
        score=program.score.build(floats["score"], data["ints"]),
        scale=floats["scale"] if program.scale == "traced" else program.scale,
        sinks=floats.get("sinks"),
        dropout=dropout,
    )


def planned(q: Any, k: Any, v: Any, rules: Rules, plan: dict[str, Any], empty: str = "zero") -> Any:
    """`attend` by blockwise attention, walked as planned: the one private call in the fuzz."""
    rules = rules.bind(sizes_of(q, k), q.shape[-1])
    o, stats = attend_locally(partial(blockwise.attention, **plan), q, k, v, rules, empty)
    return o, jnp.swapaxes(stats.lse, -2, -1)


@contextmanager
def settings(program: Program) -> Iterator[None]:
    """The program's precision and platform, and little effort in compiling most programs."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    gpu = fa.assume_platform("gpu") if program.plan[0] == "gpu" else nullcontext()
    jax.config.update(name, not program.thorough)
    try:
        with jax.enable_x64(program.dtype == "float64"), gpu:
            yield
    finally:
        jax.config.update(name, before)


def strict() -> None:
    """Promotion as the tests have it: of ranks it raises, of dtypes too."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
