"""What is compiled: functions forward and backward, and what their machine code says of arrays."""

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from flax_attn.parity import Case
from parity_tests.core.cases import pure

COMPUTATION = re.compile(r"^(?=%|ENTRY )", re.MULTILINE)
FUSED = re.compile(r" fusion\(.*calls=(%[\w.-]+)")  # its arrays are never whole
ARRAY = re.compile(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]")


def both_ways(f: Callable[..., Any]) -> Callable[..., Any]:
    """`args -> (f(*args), the gradients of all args)`, by a cotangent that is not constant."""

    def run(*args: Any) -> Any:
        out, back = jax.vjp(f, *args)
        return out, back(jax.tree.map(jnp.sin, out))

    return run


@cache
def of_cases(cases: tuple[Case, ...], dtype: Any) -> tuple[Callable[..., Any], list[Any]]:
    """All cases as one program, forward and backward, and what it takes.

    One program compiles several times as fast as many, and is traced once for several targets.
    """
    functions, avals = [], []
    for case in cases:
        f, params, floats = pure(case)
        functions.append(both_ways(f))
        avals.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), (params, floats)))

    def run(given: Any) -> Any:
        return [f(*args) for f, args in zip(functions, given, strict=True)]

    return run, avals


def largest(compiled: jax.stages.Compiled) -> int:
    """The elements of the largest array of the optimised program, less what is fused away."""
    text = compiled.as_text()
    assert text
    fused = set(FUSED.findall(text))
    parts = [part for part in COMPUTATION.split(text) if part.split(" ", 1)[0] not in fused]
    return max(math.prod(map(int, shape.split(","))) for shape in ARRAY.findall("".join(parts)))


def temporary(compiled: jax.stages.Compiled) -> int:
    """The bytes that the program takes besides its arguments and results."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return stats.temp_size_in_bytes
