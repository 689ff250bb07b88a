"""The heads of an attention in our order: query heads of one key head stand together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .program import Projection
from .roles import Columns, Part, Probe, Roles, Unclear

Place = tuple[int, tuple[int, ...]]  # a softmax, and its index of batch and heads


@dataclass(frozen=True)
class Head:
    """One head in one projection.

    Attributes:
      projection: which one.
      places: flat indices of its components in the projection's result, `batch token component`.
    """

    projection: Projection
    places: np.ndarray


@dataclass(frozen=True)
class Heads:
    """All heads.

    Attributes:
      query: query heads; those of the first key head come first.
      key, value: heads of keys and values.
      gate: for each query head what multiplies its result; empty without a gate.
      softmax: for each row of the batch and query head the place of its weights.
    """

    query: tuple[Head, ...]
    key: tuple[Head, ...]
    value: tuple[Head, ...]
    gate: tuple[Head, ...]
    softmax: dict[tuple[int, int], Place]


def heads_of(roles: Roles) -> Heads:
    """Orders the heads.

    Raises:
      Unclear: if query heads do not share key heads evenly, or keys and values differ in number.
    """
    parts = {name: getattr(roles, name) for name in ("query", "key", "value", "gate")}
    leads = _leads(roles)
    count = {name: sum(len(p.heads) for p in x) for name, x in parts.items()}
    if count["value"] != count["key"]:
        raise Unclear(f"{count['key']} heads of keys and {count['value']} of values")
    numbers = {
        name: _numbers(parts[name], [*_probes(roles, name)], leads, roles.heads)
        for name in parts
        if parts[name]
    }
    row = {place: b for (b, _), place in leads.items()}
    first = [leads[0, n] for n in range(roles.heads)]
    order = sorted(range(roles.heads), key=lambda n: numbers["key"][first[n]])
    groups = [numbers["key"][first[n]] for n in order]
    if groups != [n // (len(order) // count["key"]) for n in range(len(order))]:
        raise Unclear("query heads do not share the heads of keys evenly")
    where = {place: n for (_, n), place in leads.items()}
    ranks = {n: i for i, n in enumerate(order)}
    softmax = {(row[place], ranks[where[place]]): place for place in row}
    flat = {name: _flat(x) for name, x in parts.items()}
    query = tuple(flat["query"][numbers["query"][first[n]]] for n in order)
    value = {numbers["key"][first[n]]: numbers["value"][first[n]] for n in order}
    values = tuple(flat["value"][value[m]] for m in range(count["key"]))
    gate = tuple(flat["gate"][numbers["gate"][first[n]]] for n in order) if flat["gate"] else ()
    return Heads(query, tuple(flat["key"]), values, gate, softmax)


def _probes(roles: Roles, name: str) -> Sequence[Probe]:
    return roles.logits if name in ("query", "key") else roles.results


def _flat(parts: Sequence[Part]) -> list[Head]:
    return [Head(p.projection, p.layout[:, :, list(c)]) for p in parts for c in p.heads]


def _leads(roles: Roles) -> dict[tuple[int, int], Place]:
    """The places of the weights by row of the batch and rank among those of that row."""
    ranks: dict[int, list[Place]] = {}
    for probe in roles.logits:
        place = probe.softmax, probe.lead
        row = _row(roles.query, probe)
        if place not in ranks.setdefault(row, []):
            ranks[row].append(place)
    counts = {len(places) for places in ranks.values()}
    if sorted(ranks) != [*range(roles.batch)] or counts != {roles.heads}:
        raise Unclear("the softmax has other heads in other rows of the batch")
    return {(row, n): place for row, places in ranks.items() for n, place in enumerate(places)}


def _row(parts: Sequence[Part], probe: Probe) -> int:
    for part in parts:
        if part.projection.value in probe.reached:
            reached = probe.reached[part.projection.value].ravel()[part.layout]
            return int(np.flatnonzero(reached.any((1, 2)))[0])
    raise Unclear("a logit that depends on no query")


def _numbers(
    parts: Sequence[Part], probes: Sequence[Probe], leads: Any, heads: int
) -> dict[Place, int]:
    """Which head of a role the weights at each place belong to."""
    sets: dict[Place, set[int]] = {}
    for probe in probes:
        reached = sets.setdefault((probe.softmax, probe.lead), set())
        start = 0
        for part in parts:
            if part.projection.value in probe.reached:
                at = probe.reached[part.projection.value].ravel()[part.layout].any((0, 1))
                columns = {*np.flatnonzero(at).tolist()}
                reached |= {start + i for i, c in enumerate(part.heads) if _meets(c, columns)}
            start += len(part.heads)
    if all(len(x) == 1 for x in sets.values()):
        return {place: min(x) for place, x in sets.items()}
    # Heads that are normalised together are not told apart: they are in order.
    count = sum(len(p.heads) for p in parts)
    return {place: n * count // heads for (_, n), place in leads.items()}


def _meets(columns: Columns, others: set[int]) -> bool:
    return not others.isdisjoint(columns)
