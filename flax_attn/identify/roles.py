"""Which numbers of which projections are a head's query, key, value or gate.

A logit of a head at query t and key s depends on the head's query at token t and on its key at
token s, however the module lays them out. So gradients of single logits, and of the outputs with
single weights, tell the roles.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from .program import Program, Projection

Columns = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one role takes of the projections.

    Attributes:
      projection: which one.
      heads: for each head the numbers of its components in the projection's result.
      layout: flat indices of the projection's result as `batch token column`.
    """

    projection: Projection
    heads: tuple[Columns, ...]
    layout: np.ndarray


@dataclass(frozen=True)
class Roles:
    """The roles in one softmax attention.

    Attributes:
      batch, queries, keys: sizes of the call.
      heads, kv_heads: number of query heads, and of different keys.
      head_dim, value_dim: components of a key and of a value.
      query, key, value: what they are made from; several projections for a module with one for
        each head.
      gate: what multiplies the heads' results; empty without a gate.
      output: the projections that the heads' results go through.
      grids: axes of the scores and weights of each softmax.
      logits, results: which numbers of the projections single logits and single weighted values
        depend on.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    query: tuple[Part, ...]
    key: tuple[Part, ...]
    value: tuple[Part, ...]
    gate: tuple[Part, ...]
    output: tuple[Projection, ...]
    grids: tuple["Grid", ...]
    logits: tuple["Probe", ...]
    results: tuple["Probe", ...]

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """Names of the parameters of every role."""
        made = {"output": tuple(dict.fromkeys(n for p in self.output for n in p.parameters))}
        for name in ("query", "key", "value", "gate"):
            parts = getattr(self, name)
            names = (n for part in parts for n in part.projection.parameters)
            made[name] = tuple(dict.fromkeys(names))
        return made


class Unclear(Exception):
    """Why the roles cannot be told."""


@dataclass(frozen=True)
class Grid:
    """The axes of the weights of one softmax.

    Attributes:
      shape: of the weights.
      query, key: their axes.
      first: index of the first token among the keys; 1 behind a sink.
    """

    shape: tuple[int, ...]
    query: int
    key: int
    first: int = 0

    @classmethod
    def of(cls, weights: np.ndarray, queries: int) -> "Grid":
        """Reads the axes off the weights: along the keys they are at most 1 together.

        Raises:
          Unclear: if no axis is normalised, or none has the queries.
        """
        sums = {axis: weights.sum(axis) for axis in range(weights.ndim)}
        even = [a for a, x in sums.items() if weights.shape[a] > 1 and np.ptp(x) < 1e-9]
        below = [a for a, x in sums.items() if weights.shape[a] > 1 and (x < 1 + 1e-9).all()]
        for key in [*even, *below][::-1]:
            others = [a for a in range(weights.ndim) if a != key and weights.shape[a] == queries]
            if others:
                return cls(weights.shape, others[-1] if others[-1] != key else others[0], key)
        raise Unclear("no softmax whose rows are the queries and whose columns are the keys")

    def index(self, lead: Sequence[int], query: int, key: int) -> tuple[int, ...]:
        """The index of a weight."""
        rest = iter(lead)
        places = {self.query: query, self.key: key + self.first}
        return tuple(places[a] if a in places else next(rest) for a in range(len(self.shape)))

    @property
    def leads(self) -> list[tuple[int, ...]]:
        """All indices of the axes of batch and heads."""
        sizes = [n for a, n in enumerate(self.shape) if a not in (self.query, self.key)]
        return [*product(*map(range, sizes))]


@dataclass(frozen=True)
class Probe:
    """Which numbers of the projections one logit, or one weighted value, depends on.

    Attributes:
      query, key: the tokens of the logit.
      reached: by number of the projection's result, where its gradient is not zero.
      softmax, lead: which softmax it is of, and its index of batch and heads.
    """

    query: int
    key: int
    reached: Mapping[int, np.ndarray]
    softmax: int
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: rows of the batch, queries and keys."""

    batch: int
    queries: int
    keys: int

    def layouts(self, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Possible orders of a projection's result, as flat indices of `batch token column`."""
        numbers = np.arange(int(np.prod(shape))).reshape(shape)
        for tokens in dict.fromkeys((self.queries, self.keys)):
            total = self.batch * tokens
            for axis, size in enumerate(shape):
                if size == total:
                    rows = np.moveaxis(numbers, axis, 0).reshape(total, -1)
                    yield rows.reshape(self.batch, tokens, -1)
                    yield rows.reshape(tokens, self.batch, -1).swapaxes(0, 1)
            for one, other in product(range(len(shape)), repeat=2):
                # An axis of the batch, or of the batch and heads.
                if one != other and shape[other] == tokens and shape[one] % self.batch == 0:
                    moved = np.moveaxis(numbers, (one, other), (0, 1))
                    parts = moved.reshape(self.batch, -1, tokens, moved[0, 0].size)
                    yield parts.swapaxes(1, 2).reshape(self.batch, tokens, -1)

    def layout(self, probes: Sequence[Probe], value: int) -> np.ndarray | None:
        """The order in which every probe reaches one row of the batch and only its two tokens."""
        shown = [p for p in probes if value in p.reached]
        for layout in self.layouts(shown[0].reached[value].shape) if shown else ():
            if all(_fits(p.reached[value].ravel()[layout], p) for p in shown):
                return layout
        return None


def _fits(reached: np.ndarray, probe: Probe) -> bool:
    rows, tokens = (np.flatnonzero(reached.any(axes)) for axes in ((1, 2), (0, 2)))
    return len(rows) == 1 and {*tokens.tolist()} <= {probe.query, probe.key}


def roles_of(program: Program, batch: int, queries: int, keys: int) -> Roles:
    """Tells the roles of a module's softmax attention.

    Args:
      batch, queries, keys: sizes of the call, all different but for the last two.

    Raises:
      Unclear: if there is no softmax of queries and keys between two products.
    """
    sizes = Sizes(batch, queries, keys)
    softmaxes = program.softmaxes
    if not softmaxes:
        raise Unclear("no softmax between two products")
    if min(min(pair) for pair in softmaxes) < 0:
        raise Unclear("the weights of the softmax are not what leads to the output")
    grids = tuple(_grid(program, *pair, sizes) for pair in softmaxes)
    each = range(len(grids))
    logits = tuple(p for i in each for p in _of_logits(program, i, grids[i], keys))
    results = tuple(p for i in each for p in _of_results(program, i, grids[i], keys))
    query, key = (_parts(program, sizes, logits, i) for i in ("query", "key"))
    value, gate = (_parts(program, sizes, results, i) for i in ("key", "query"))
    if not (query and key and value):
        raise Unclear("no projections lead to queries, keys and values")
    parts = {"query": query, "key": key, "value": value, "gate": gate}
    return _whole(program, sizes, parts, {"grids": grids, "logits": logits, "results": results})


def _grid(program: Program, scores: int, weights: int, sizes: Sizes) -> Grid:
    """The axes of the weights, with a sink before the keys if the first logit is none of a key."""
    grid = Grid.of(program.array(weights), sizes.queries)
    if grid.shape[grid.key] <= sizes.keys:
        return grid
    leaves = _leaves(program, {p.node.number for p in program.projections})
    made = program.values(leaves, scores).reshape(grid.shape)
    query = grid.shape[grid.query] - 1
    logit = made[grid.index(grid.leads[0], query, 0)]
    return grid if logit.requires_grad and _reached(logit, leaves) else replace(grid, first=1)


def _leaves(program: Program, numbers: Collection[int]) -> dict[int, Any]:
    """Results of some projections, with gradients: small numbers, of which no clamp stops one."""
    import torch

    random = np.random.RandomState(2)
    values = [p.value for p in program.projections if p.node.number in numbers]
    arrays = {x: 0.01 * random.standard_normal(program.tape.values[x].shape) for x in values}
    return {x: torch.from_numpy(array).requires_grad_() for x, array in arrays.items()}


def _whole(
    program: Program, sizes: Sizes, parts: Mapping[str, tuple[Part, ...]], probed: Mapping[str, Any]
) -> Roles:
    query, key, value, gate = (parts[name] for name in ("query", "key", "value", "gate"))
    heads = sum(len(grid.leads) for grid in probed["grids"]) // sizes.batch
    query = tuple(_split(p, heads // len(query)) for p in query)
    head_dim = len(query[0].heads[0])
    key = tuple(_split(p, max(len(p.heads[0]) // head_dim, 1)) for p in key)
    different = {(p.projection.value, columns) for p in key for columns in p.heads}
    after = program.behind(*(weights for _, weights in program.softmaxes))
    output = tuple(p for p in program.projections if p.node in after)
    shapes = head_dim, len(value[0].heads[0])
    numbers = sizes.batch, sizes.queries, sizes.keys, heads, len(different)
    return Roles(*numbers, *shapes, query, key, value, gate, output, **probed)


def _split(part: Part, heads: int) -> Part:
    """A part whose heads are normalised together, and so depend on all columns, in equal parts."""
    columns = {*part.heads}
    if heads < 2 or len(columns) > 1 or len(part.heads[0]) % heads:
        return part
    whole = np.array(part.heads[0]).reshape(heads, -1)
    return replace(part, heads=tuple(tuple(row.tolist()) for row in whole))


def _pairs(
    grid: Grid, visible: np.ndarray, lead: Sequence[int], last: int
) -> list[tuple[int, int]]:
    """Queries and other tokens as their keys, which they attend to; a sink is no token."""
    queries = range(grid.shape[grid.query] - 1, -1, -1)
    keys = range(min(grid.shape[grid.key], last) - 1, -1, -1)
    every = [(q, k) for q, k in product(queries, keys) if q != k]
    return [(q, k) for q, k in every if visible[grid.index(lead, q, k)]][:: max(len(every) // 5, 1)]


def _of_logits(program: Program, softmax: int, grid: Grid, keys: int) -> Iterator[Probe]:
    """What single logits of each head of each row depend on."""
    scores, weights = program.softmaxes[softmax]
    leaves = _leaves(program, range(program.tape.producers[scores]))
    made = program.values(leaves, scores).reshape(grid.shape)
    visible = program.array(weights) > 0
    for lead in grid.leads:
        for query, key in _pairs(grid, visible, lead, keys):
            reached = _reached(made[grid.index(lead, query, key)], leaves)
            yield Probe(query, key, reached, softmax, lead)


def _of_results(program: Program, softmax: int, grid: Grid, keys: int) -> Iterator[Probe]:
    """What the outputs depend on if one weight is 1 and all others are 0."""
    import torch

    weights = program.softmaxes[softmax][1]
    values = program.tape.values
    output = program.outputs[0]
    visible = program.array(weights) > 0
    behind = {node.number for node in program.behind(weights)}
    before = {p.node.number for p in program.projections} - behind
    leaves = _leaves(program, before)
    nothing = {w: torch.zeros_like(values[w]) for _, w in program.softmaxes}
    zero = program.values({**leaves, **nothing}, output)
    cotangent = torch.from_numpy(np.random.RandomState(0).standard_normal(zero.shape))
    for lead in grid.leads:
        for query, key in _pairs(grid, visible, lead, keys)[:2]:
            one = torch.zeros_like(values[weights])
            one[grid.index(lead, query, key)] = 1.0
            result = program.values({**leaves, **nothing, weights: one}, output)
            reached = _reached(((result - zero) * cotangent).sum(), leaves)
            yield Probe(query, key, reached, softmax, lead)


def _reached(number: Any, leaves: Mapping[int, Any]) -> dict[int, np.ndarray]:
    """Where the gradients of a number are not zero, for those values that have one."""
    import torch

    if not number.requires_grad:
        raise Unclear("the attention depends on no projection")
    tensors = [*leaves.values()]
    gradients = torch.autograd.grad(number, tensors, retain_graph=True, allow_unused=True)
    arrays = {k: g.numpy() != 0 for k, g in zip(leaves, gradients, strict=True) if g is not None}
    return {k: x for k, x in arrays.items() if x.any()}


def _parts(program: Program, sizes: Sizes, probes: Sequence[Probe], token: str) -> tuple[Part, ...]:
    """What a role takes of each projection at the query's or at the key's token.

    Heads are told apart by their columns; a column that a clamp stops in one place is reached in
    another.
    """
    parts = []
    for projection in program.projections:
        layout = sizes.layout(probes, projection.value)
        if layout is None:
            continue
        sets: list[set[int]] = []
        for probe in probes:
            if projection.value not in probe.reached:
                continue
            reached, at = probe.reached[projection.value].ravel()[layout], getattr(probe, token)
            if at >= layout.shape[1]:
                continue
            columns = {*np.flatnonzero(reached[:, at].any(0)).tolist()}
            _join(sets, columns)
        if sets:
            ordered = sorted(tuple(sorted(columns)) for columns in sets)
            parts.append(Part(projection, tuple(ordered), layout))
    return tuple(parts)


def _join(sets: list[set[int]], columns: set[int]) -> None:
    """Adds columns to the sets that share one, which become one set."""
    shared = [known for known in sets if known & columns]
    for known in shared:
        sets.remove(known)
    if columns:
        sets.append(columns.union(*shared))
