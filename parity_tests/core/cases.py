"""What tests of all layers share: a few cases of each variant, each as a function of arrays."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn.parity import Case
from flax_attn.parity.cases.collect import collect

Arrays = dict[str, Any]


@cache
def every_case() -> tuple[Case, ...]:
    """The cases of all variants; looking for them takes seconds."""
    return tuple(collect("parity_tests"))


def smallest(cases: Sequence[Case], most: int = 3) -> list[Case]:
    """Few of each variant, set up unlike each other: one that drops, then those of least input."""
    best: dict[tuple, Case] = {}
    for case in sorted(cases, key=_order):
        flags = "" if case.train else str(case).partition("|")[0]
        taken = [key for key in best if key[0] == case.variant]
        if len(taken) < most:
            best.setdefault((case.variant, case.train, flags), case)
    return list(best.values())


def pure(
    case: Case, inputs: Mapping[str, np.ndarray] | None = None
) -> tuple[Callable[[Arrays, Arrays], jax.Array], Arrays, Arrays]:
    """The case as `f(params, floats)` on plain dicts of float32 arrays, and these two dicts.

    Inputs that are not floating are constants, unless f is given them too.
    """
    module = case.flax_module()
    module.train() if case.train else module.eval()
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    held = {".".join(map(str, path)): (path, x) for path, x in nnx.to_flat_state(state)}
    arrays = case.arrays() if inputs is None else inputs
    kinds = {name: np.issubdtype(x.dtype, np.floating) for name, x in arrays.items()}
    others = {name: x for name, x in arrays.items() if not kinds[name]}
    floats = {name: np.asarray(x, np.float32) for name, x in arrays.items() if kinds[name]}

    def f(params: Arrays, floats: Arrays) -> jax.Array:
        pairs = [(held[name][0], held[name][1].replace(value)) for name, value in params.items()]
        copy = nnx.merge(graph, nnx.from_flat_state(pairs), rest, copy=True)
        return case.flax_call(copy, **{**others, **floats})

    return f, {name: x[...] for name, (_, x) in held.items()}, floats


def _order(case: Case) -> tuple[bool, bool, int]:
    size = sum(x.size for x in case.arrays().values())
    return not case.train, not callable(case.config), size
