"""Sharded lengths: strategy and layout of a request, and its rewriting before communication.

Masks, scores and dropout that depend on indices are evaluated at positions, which follow from the
layout. So every shard of every strategy computes what one device would.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._internal.types import Sizes
from ..masks import Mask
from ..masks.algebra import parts_of
from ..masks.ranges import as_known_band, reach_of
from ..masks.shardable import shardable
from ..places import Positions
from ..rules import Request, Rules
from ..token_layouts import check_length, names_in, partitioning, requested_context, tokens_in
from .specs import Shards, check_spread, located, shards_in


class Sequence(NamedTuple):
    """Context-parallel strategy and token layout.

    Attributes:
      strategy, layout: as in `context_parallel`.
      axis: mesh axes of the strategy.
      devices: number of devices along `axis`.
      steps, ahead: of a ring, the shards that each device sees, and how many of them follow it.
      swapped: mesh axes over which Ulysses first exchanges the length for heads.
      groups: number of devices along `swapped`.
    """

    strategy: str
    layout: str
    axis: tuple[str, ...]
    devices: int
    steps: int
    ahead: int = 0
    swapped: tuple[str, ...] = ()
    groups: int = 1

    @property
    def shards(self) -> int:
        """Number of shards of the length."""
        return self.devices * self.groups

    def inside(self, shards: Shards) -> Shards:
        """Shardings of the weights that the devices compute, and so of the rules' arrays."""
        heads = (*names_in(shards.heads), *self.swapped)
        whole = shards._replace(heads=heads or None, q=None, k=None)
        along = {"ring": {"q": self.axis, "k": self.axis}, "all_gather": {"q": self.axis}}
        return whole._replace(**along.get(self.strategy, {}))

    def refusal(self, backend: str) -> str | None:
        """Why a backend cannot serve any request with this strategy, or None."""
        if self.strategy == "ring" and backend != "blockwise":
            return (
                f"the ring over {_named(self.axis)} takes backend 'blockwise' alone; "
                'context_parallel("all_gather") takes others'
            )
        return None

    def __str__(self) -> str:
        parts = [(self.strategy, self.axis, self.devices)] if self.axis else []
        parts += [("ulysses", self.swapped, self.groups)] if self.swapped else []
        words = [f"{name} over {_named(axes)} ({count} shards)" for name, axes, count in parts]
        return f"{' and '.join(words)}, {self.layout}"

    @property
    def sends(self) -> str:
        """Description of the communication between devices."""
        first = "q, k, v and the output, each to all devices once; backward as much again"
        if self.strategy == "ulysses":
            return first
        then = "k and v to all devices, once; backward dk and dv, added up on the way"
        if self.strategy == "ring":
            then = f"k and v to the next device, {self.steps - 1} times; backward dk and dv too"
        return f"over {_named(self.swapped)} {first}; then {then}" if self.swapped else then

    @property
    def without_window(self) -> "Sequence":
        """The ring over all shards, also those that a window masks."""
        return self._replace(steps=self.devices, ahead=0)

    def at_slots(self, rules: Rules, sizes: Sizes) -> Rules:
        """Rules evaluated at the token of each slot, unless they already have positions."""
        positions = rules.positions or Positions()
        q_at = self.slots(sizes.T) if positions.q is None else positions.q
        k_at = self.slots(sizes.S) if positions.k is None else positions.k
        return replace(rules, positions=Positions(q_at, k_at))

    def slots(self, length: int) -> jax.Array:
        """Token index of each slot of the whole length."""
        slots = jnp.arange(length, dtype=jnp.int32)
        return tokens_in(slots, length, self.shards, self.layout)


def prepared(request: Request, strategy: str | None = None) -> tuple[Sequence | None, Request]:
    """Strategy for a request with a sharded length, and that request evaluated at positions.

    `strategy` replaces the one of the context.

    Raises:
      ValueError, NotImplementedError: as `sequence_of` does.
    """
    sequence = sequence_of(request.q, request.k, request.v, strategy)
    if sequence is None:
        return None, request
    sizes, rules = request.sizes, request.rules
    # "end" offsets and the like refer to the whole length: they become numbers first.
    mask, score = (shardable(x, sizes) for x in (rules.mask, rules.score))
    rules = replace(rules, mask=mask, score=score)
    if rules.positions is None:
        sequence = sequence._replace(**_steps(sequence, mask, sizes))
        if sequence.strategy == "ulysses":  # each device has the whole length, in token order
            return sequence, replace(request, rules=rules)
    return sequence, replace(request, rules=sequence.at_slots(rules, sizes))


def _steps(sequence: Sequence, mask: Mask, sizes: Sizes) -> dict[str, int]:
    """Steps of a ring and shards ahead of a device, as few as the mask allows."""
    if sequence.layout != "contiguous" or sizes.T != sizes.S:
        return {}
    # A static window limits how far back and ahead any query sees; other shards are never sent.
    parts = [part.bind(sizes) for part in parts_of(mask) if part.is_static]
    back = [reach_of(part) for part in parts]
    back = min((n - 1 for n in back if n is not None), default=sizes.S)
    bands = [as_known_band(part) for part in parts]
    ahead = min((x.hi for x in bands if x is not None and x.hi is not None), default=sizes.S)
    shard = sizes.T // sequence.devices
    back, ahead = (-(-max(n, 0) // shard) for n in (back, ahead))
    steps = back + 1 + ahead
    return {} if steps >= sequence.devices else {"steps": steps, "ahead": ahead}


def sequence_of(q: Any, k: Any, v: Any, strategy: str | None = None) -> Sequence | None:
    """Strategy for arrays `*B T N H` with a sharded length; None if it is not sharded.

    Raises:
      ValueError: if they are sharded differently, or their sizes do not fit strategy and layout.
    """
    where = located(q, k, v)
    if where is None:
        return None
    mesh, shards = where
    if not partitioning(shards.q, mesh):
        return None
    requested, layout = requested_context.value
    sequence = _sequence_of_axes(strategy or requested, layout, names_in(shards.q), mesh)
    for name, x in (("q", q), ("k", k)):
        check_length(name, x.shape[-3], sequence.shards, layout)
    if sequence.swapped:
        parts = shards_in(sequence.inside(shards).heads, mesh)
        check_spread(q.shape[-2], k.shape[-2], parts, 'strategy "ulysses": ')
    return sequence


def _sequence_of_axes(
    strategy: str | tuple[str, ...], layout: str, names: Any, mesh: Any
) -> Sequence:
    """The Sequence for one strategy over all mesh axes of the length, or one for each axis."""
    if isinstance(strategy, str):
        strategy = (strategy,) * len(names)
    if len(strategy) != len(names):
        raise ValueError(
            f"context_parallel was given {len(strategy)} strategies, {strategy}, one for each mesh "
            f"axis of the length, and the length is sharded over {_named(names)}. Give one "
            "strategy, or shard the length over as many axes."
        )
    by = {x: tuple(n for n, s in zip(names, strategy, strict=True) if s == x) for x in strategy}
    by = {x: tuple(partitioning(axes, mesh)) for x, axes in by.items()}
    swapped = by.pop("ulysses", ())
    axis = next(filter(None, by.values()), ())
    chosen = next((x for x, axes in by.items() if axes), "ulysses")
    count, groups = shards_in(axis, mesh), shards_in(swapped, mesh)
    return Sequence(chosen, layout, axis, count, count, 0, swapped, groups)


def _named(axes: tuple[str, ...]) -> str:
    return " and ".join(map(repr, axes))
