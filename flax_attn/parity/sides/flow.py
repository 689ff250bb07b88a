"""What each tap of Flax is computed from: the taps, replaced by torch's values, that reach it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .flax import ANCHOR, Flax


class _Traced(Exception):
    """Ends a run once its program is traced."""


class _Tracer(Flax):
    """A run of Flax that is traced, never executed."""

    feeds: dict[str, frozenset[str]]

    def _program(self, inputs: Mapping[str, jax.Array], *args: Any) -> Any:
        traced, shapes = jax.make_jaxpr(self._forward(inputs), return_shape=True)(*args)
        numbered = jax.tree.unflatten(jax.tree.structure(args), range(len(traced.in_avals)))
        probes = {place: name for name, place in numbered[2].items()}
        reached = _reached(traced.jaxpr, probes)
        named, (_, heard, *_) = jax.tree.unflatten(jax.tree.structure(shapes), reached)
        self.feeds = {**heard, **{k: v for k, v in named.items() if k != ANCHOR}}
        raise _Traced


def feeds(side: Flax, weights: Mapping[str, np.ndarray]) -> dict[str, frozenset[str]]:
    """The taps that each tap and each output is computed from, with none of the forced between."""
    tracer = _Tracer(side.module, side.call, side.request, side.dtype, False, side.force)
    try:
        tracer.run(weights)
    except _Traced:
        return tracer.feeds
    raise AssertionError("a traced run came to its end")


def _reached(jaxpr: Any, probes: Mapping[int, str]) -> list[frozenset[str]]:
    """Which forced taps reach each output of a program; where one is forced a new way begins."""
    nothing: frozenset[str] = frozenset()
    named = {id(var): probes[i] for i, var in enumerate(jaxpr.invars) if i in probes}
    known: dict[int, frozenset[str]] = {}
    for equation in jaxpr.eqns:
        forced = next((named[id(var)] for var in equation.invars if id(var) in named), None)
        before = [known.get(id(var), nothing) for var in equation.invars]
        after = nothing.union(*before) if forced is None else frozenset((forced,))
        known.update(dict.fromkeys(map(id, equation.outvars), after))
    return [known.get(id(var), nothing) for var in jaxpr.outvars]
