"""Data flow between Flax's taps: which replaced taps each tap is computed from."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .side import ANCHOR, Flax


def feeds(side: Flax, weights: Mapping[str, np.ndarray]) -> dict[str, frozenset[str]]:
    """Returns, for each tap and output, the nearest replaced taps that it is computed from."""
    traced, shapes, args = side.traced(weights)
    # A forced tap is found in the jaxpr by its probe, which only its own equation takes.
    numbered = jax.tree.unflatten(jax.tree.structure(args), range(len(traced.in_avals)))
    probes = {place: name for name, place in numbered[2].items()}
    reached = _reached(traced.jaxpr, probes)
    named, aux = jax.tree.unflatten(jax.tree.structure(shapes), reached)
    return {**aux["taps"], **{k: v for k, v in named.items() if k != ANCHOR}}


def _reached(jaxpr: Any, probes: Mapping[int, str]) -> list[frozenset[str]]:
    """Returns the forced taps that reach each output of a jaxpr."""
    nothing: frozenset[str] = frozenset()
    named = {id(var): probes[i] for i, var in enumerate(jaxpr.invars) if i in probes}
    known: dict[int, frozenset[str]] = {}
    for equation in jaxpr.eqns:
        forced = next((named[id(var)] for var in equation.invars if id(var) in named), None)
        before = [known.get(id(var), nothing) for var in equation.invars]
        # A forced tap returns torch's value, which does not depend on what came before it.
        after = nothing.union(*before) if forced is None else frozenset((forced,))
        known.update(dict.fromkeys(map(id, equation.outvars), after))
    return [known.get(id(var), nothing) for var in jaxpr.outvars]
