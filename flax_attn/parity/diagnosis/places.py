"""Selects the taps at fault, excluding equivalent computations, and faults between taps."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import numpy as np
from flax import nnx

from ...weights.known_layers import LAYERS, get_path
from .. import judge
from ..repeated import together
from ..report import Row
from ..rows.values import taps
from ..search.span import Budget
from ..sides.flax.flow import feeds
from ..sides.flax.side import Force
from ..sides.match import SCALED_POINTS, array_layouts, hidden, match_value, matching_taps
from ..sides.pair import Names, Pair
from ..sides.run import Run, is_floating
from ..sides.tape import Tape
from .hints import attempt

# Maximum number of extra runs to separate taps that feed the same step.
ROUNDS = 4
# Maximum number of layouts in which a layer is called by itself.
MAX_LAYOUTS = 6


@dataclass
class Local:
    """An extra run of Flax in which every tap in `force` is replaced by torch's value.

    Attributes:
      pair, mode, truth: the pair, Flax's mode, and torch's run.
      force: torch's values by Flax's names.
      run: the run, whose taps are computed from torch's values.
      budget: the time that is left for searches.
    """

    pair: Pair
    mode: str
    truth: Run
    force: dict[str, Force]
    run: Run
    budget: Budget

    @classmethod
    def of(
        cls,
        pair: Pair,
        mode: str,
        truth: Run,
        force: Mapping[str, Force],
        budget: Budget | None = None,
    ) -> "Local":
        weights = pair.weights(pair.narrow("float64"))
        run = pair.run_flax(pair.flax("float64", mode, force), weights)
        return cls(pair, mode, truth, dict(force), run, budget or Budget())

    def without(self, names: set[str]) -> "Local":
        """The same with some taps not replaced."""
        others = {name: force for name, force in self.force.items() if name not in names}
        return Local.of(self.pair, self.mode, self.truth, others, self.budget)

    @cached_property
    def feeds(self) -> dict[str, frozenset[str]]:
        """The forced taps that each tap and output is computed from."""
        weights = self.pair.weights(self.pair.narrow("float64"))
        return feeds(self.pair.flax("float64", "eager", self.force), weights)

    @cached_property
    def tape(self) -> Tape | None:
        """Torch's recorded program, or None if torch cannot run again."""
        return attempt("a program", lambda: self.pair.original.program(self.truth), None)

    @cached_property
    def rows(self) -> list[Row]:
        """Local rows of every tap and every output, in torch's call order."""
        tap_rows = taps(self.run, self.truth, self.pair.names, "float64", self.mode, "local")
        return [*tap_rows, *self._outputs()]

    @cached_property
    def torch_names(self) -> dict[str, str]:
        """Torch's name of each tap of Flax that has a counterpart."""
        return {flax_name: name for name, flax_name in self._matching_taps[0].items()}

    @cached_property
    def shapes(self) -> frozenset[str]:
        """Torch's taps whose Flax counterparts have incompatible shapes."""
        return frozenset(self._matching_taps[1])

    @cached_property
    def _matching_taps(self) -> tuple[dict[str, str], dict[str, str]]:
        return matching_taps(self.run, self.truth, self.pair.names.tap)

    def wrong(self) -> list[Row]:
        """The rows that differ."""
        return [row for row in self.rows if row.verdict.differs]

    def _outputs(self) -> Iterator[Row]:
        for name, want in self.truth.outputs.items():
            if name in self.run.outputs and is_floating(want):
                verdict = judge.same_function(self.run.outputs[name], want)
                yield Row(name, "local", "float64", self.mode, verdict)


def harmless_taps(local: Local) -> set[str]:
    """The forced taps that differ without effect: whatever is computed from them agrees.

    If they are not replaced, later values agree with torch, or equal those computed from torch's
    value. Taps that feed the same step are first judged together, then one by one.
    """
    quick = replace(local.pair, request=replace(local.pair.request, grads=False))
    alone = replace(local, pair=quick)
    wrong = [row.name for row in local.wrong()]
    suspects = [name for name in wrong if name in local.force]
    if not suspects or len(wrong) < 2:
        return set()
    free = alone.without(set(suspects))
    harmless = {name for name in suspects if _is_harmless(name, local, free)}
    harmless |= _scaled(suspects, local, free)
    clusters = _clusters([name for name in suspects if name not in harmless], local.feeds)
    clusters = [cluster for cluster in clusters if len(cluster) > 1]
    for members in list(_one_per_cluster(clusters))[:ROUNDS]:
        free = alone.without(harmless | members)
        harmless |= {name for name in members if _is_harmless(name, local, free)}
    if harmless >= {*wrong}:
        return set()
    after = {row.name for row in alone.without(harmless).wrong()} if harmless else set()
    return harmless & after


def _scaled(suspects: list[str], local: Local, free: Local) -> set[str]:
    """Queries and keys that include part of the scale, even if later values are wrong.

    They are torch's times one number, or one per head: either the factor that torch applies to
    their product, or one without which the scores lack part of their value.
    """
    names = set()
    for name in suspects:
        after = [x for x in _following(name, local) if local.run.point(x) == "scores"]
        if local.run.point(name) not in SCALED_POINTS or not after:
            continue
        by_head = _by_head(free.run.taps[name], local.force[name].value)
        if by_head is not None and all(
            _multiplied(by_head, local, x) or _misses_term(local, free, x) for x in after
        ):
            names.add(name)
    return names


def _by_head(got: np.ndarray, want: np.ndarray) -> np.ndarray | None:
    """The ratio of two values along one axis other than the last, one number per entry, or None."""
    for axis in range(got.ndim - 1):
        others = tuple(i for i in range(got.ndim) if i != axis)
        total = (want * want).sum(axis=others, keepdims=True)
        ratio = (got * want).sum(axis=others, keepdims=True) / np.where(total, total, 1.0)
        if judge.same_function(got, ratio * want, zero=True).ok:
            return ratio.ravel()
    return None


def _multiplied(by_head: np.ndarray, local: Local, scores: str) -> bool:
    """Whether torch multiplies its product by exactly these numbers or by their squares."""
    call = local.truth.calls.get(local.torch_names.get(scores, ""))
    factor = np.ones(())
    for step in call.steps if call else ():
        other = [np.ravel(np.asarray(x)) for x in step.others if x is not None][:1]
        if step.name not in ("mul", "div") or not other or other[0].size not in (1, by_head.size):
            break
        factor = factor * other[0] if step.name == "mul" else factor / other[0]
    factor = np.broadcast_to(factor, by_head.shape)
    return any(judge.same_function(by_head**power, factor, zero=True).ok for power in (1, 2))


def _misses_term(local: Local, free: Local, scores: str) -> bool:
    """Whether scores computed from torch's value lack part of what Flax's own value gives."""
    want = local.force[scores].value if scores in local.force else None
    if want is None:
        return False
    forced, unforced = (hidden(x.run.taps[scores]) for x in (local, free))
    if judge.same_function(unforced, forced, fill=True).ok:
        return False
    finite = np.isfinite(forced) & np.isfinite(unforced) & np.isfinite(want)
    made, missing = unforced[finite] - forced[finite], want[finite] - forced[finite]
    return bool(np.vdot(made, missing).real > np.vdot(made, made).real / 2 > 0)


def _is_harmless(name: str, local: Local, free: Local) -> bool:
    """Whether everything that follows a tap agrees in a run with Flax's own value."""
    right = {row.name: not row.verdict.differs for row in free.rows}
    before, after = ({**x.run.taps, **x.run.outputs} for x in (local, free))
    return all(
        right[step] or judge.same_function(after[step], before[step], zero=True).ok
        for step in _following(name, local)
        if step in right
    )


def _following(name: str, local: Local) -> list[str]:
    """Values computed from a tap; for an unused tap, the next one with the same inputs."""
    feeds = local.feeds
    steps = [step for step, fed in feeds.items() if name in fed]
    if steps:
        return steps
    order = [row.name for row in local.rows]
    later = order[order.index(name) + 1 :]
    sources = feeds.get(name, frozenset())
    return [step for step in later if sources and sources <= feeds.get(step, frozenset())][:1]


def _clusters(names: list[str], feeds: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Groups of taps that feed the same step or each other."""
    groups = [{name} for name in names]
    for step, fed in feeds.items():
        cluster = (fed & {*names}) | ({step} & {*names})
        joined = [group for group in groups if group & cluster]
        groups = [group for group in groups if not group & cluster]
        groups += [set().union(*joined)] if joined else []
    return [[name for name in names if name in group] for group in groups]


def _one_per_cluster(clusters: list[list[str]]) -> Iterator[set[str]]:
    """Yields sets with one tap of each cluster, starting with the last."""
    for i in range(1, max(map(len, clusters), default=0) + 1):
        yield {cluster[-i] for cluster in clusters if len(cluster) >= i}


@dataclass(frozen=True)
class FaultSpan:
    """A fault between two taps.

    Attributes:
      row: the comparison of the following step's input, named after the place.
      step: the tap after the fault.
      got, want: Flax's input to that step, and torch's in its layout.
      argument: name of torch's corresponding argument.
      alone: torch's taps in between that Flax does not have.
      advice: how to narrow it down, or "".
    """

    row: Row
    step: str
    got: np.ndarray
    want: np.ndarray
    argument: str
    alone: tuple[str, ...]
    advice: str


def between(local: Local, row: Row) -> FaultSpan | None:
    """The fault before a step, if its input is already wrong; None if the input is right."""
    torch_name = local.torch_names.get(row.name)
    if row.name in local.truth.outputs:
        return _before_output(local, row)
    if torch_name is None or row.name not in local.run.inputs:
        return None
    arguments = local.truth.calls[torch_name].inputs.items()
    wants = {name: x for name, x in arguments if is_floating(x)}
    inputs = [x for x in local.run.inputs[row.name] if is_floating(x)]
    for place, (name, want) in enumerate(wants.items()):
        candidates = inputs[place : place + 1] + inputs
        matches = [
            (x, match) for x in candidates if (match := match_value("", x, want)) is not None
        ]
        if matches and not any(judge.same_function(x, m.value, zero=True).ok for x, m in matches):
            got, match = matches[0]
            alone = _torch_only_taps(local, row.name, torch_name)
            return _make_between(local, row, got, match.value, alone, name)
    return None


def local_fault(local: Local, row: Row) -> tuple[Row, np.ndarray] | None:
    """The row and output of a layer that is at fault even though its input was wrong, or None.

    The layer is called by itself with the input of torch's counterpart, in each possible layout.
    """
    pair, torch_name = local.pair, local.torch_names.get(row.name, "")
    layer = get_path(pair.flax_module, row.name.partition("#")[0])
    inputs = [x for x in local.run.inputs.get(row.name, ()) if is_floating(x)]
    call, force = local.truth.calls.get(torch_name), local.force.get(row.name)
    wants = [x for x in call.inputs.values() if is_floating(x)] if call else []
    alone = isinstance(layer, LAYERS) and not pair.request.train and len(inputs) == len(wants) == 1
    if not alone or force is None:
        return None
    faults = []
    for layout in islice(array_layouts("", inputs[0].shape, wants[0].shape), MAX_LAYOUTS):
        out = pair.layer_alone(row.name.partition("#")[0], layout.value(wants[0]))
        verdict = judge.same_function(out, force.value)
        if not verdict.differs:
            return None
        faults.append((replace(row, verdict=verdict), out))
    return min(faults, key=lambda one: one[0].verdict.error, default=None)


def _before_output(local: Local, row: Row) -> FaultSpan | None:
    """The fault before an output that torch has as a tap and Flax has not."""
    alone = _torch_only_taps(local, row.name, "")
    want = local.truth.outputs[row.name]
    if not alone or not np.array_equal(local.truth.taps[alone[-1]], want):
        return None
    return _make_between(local, row, local.run.outputs[row.name], want, alone, "")


def _make_between(
    local: Local,
    row: Row,
    got: np.ndarray,
    want: np.ndarray,
    alone: tuple[str, ...],
    argument: str,
) -> FaultSpan:
    first = _before(local, row.name) or "the input"
    verdict = judge.same_function(got, want)
    row = replace(row, name=f"between {first} and {row.name}", verdict=verdict)
    step = row.name.removeprefix(f"between {first} and ")
    return FaultSpan(row, step, got, want, argument, alone, _advice(local.pair, step, alone))


def _before(local: Local, step: str) -> str | None:
    """The last of the taps that a step is computed from."""
    fed = local.feeds.get(step, frozenset())
    return next((name for name in reversed(local.run.taps) if name in fed), None)


def _torch_only_taps(local: Local, step: str, torch_name: str) -> tuple[str, ...]:
    """Torch's taps between a step and the preceding tap that Flax does not have, in order."""
    order, before = list(local.truth.taps), _before(local, step)
    start = order.index(local.torch_names[before]) + 1 if before in local.torch_names else 0
    end = order.index(torch_name) if torch_name else len(order)
    known = {*local.torch_names.values(), *local.shapes}
    return tuple(
        name
        for name in order[start:end]
        if name not in known and is_floating(local.truth.taps[name])
    )


def _advice(pair: Pair, step: str, alone: tuple[str, ...]) -> str:
    """Lists torch's taps in between, and suggests one in the middle to bisect with."""
    if not alone:
        return ""
    middle = alone[len(alone) // 2]
    owner = step.rpartition(".")[0]
    while owner and not _called(pair.flax_module, owner):
        owner = owner.rpartition(".")[0]
    flax_name = pair.names.tap(middle)
    inside = bool(owner) and flax_name.startswith(f"{owner}.")
    where = f" in {type(get_path(pair.flax_module, owner)).__name__}" if inside else ""
    flax_name = flax_name.removeprefix(f"{owner}.") if inside else flax_name
    names = ", ".join(together(alone))
    return f"torch also has {names} there: tap('{flax_name}', ...){where} would tell"


def _called(module: nnx.Module, path: str) -> bool:
    """Whether the module at a path is itself called, unlike a list or dict of modules."""
    part = get_path(module, path)
    return isinstance(part, nnx.Module) and callable(part)


def equivalent_taps(plain: Run, truth: Run, names: Names, force: Collection[str]) -> set[str]:
    """Taps that differ although no output does: equivalent computations."""
    rows = taps(plain, truth, names, "float64", "")
    return {row.name for row in rows if row.verdict.differs and row.name in force}
