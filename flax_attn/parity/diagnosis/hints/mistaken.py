"""What if torch had the mistake: torch's own module again, one of its operations done wrong.

What no tap tells is found so: if torch gives with a mistake just what Flax gives, the whole array
of it, then that is what the difference looks like. It needs torch live.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ... import judge
from ...report import Row
from ...sides.match import Layout, layouts
from ...sides.original import Tried, Tries, inside
from ...sides.run import Run
from ..places import Between, Local

LAID = 6  # in how many layouts what torch gives is held against Flax's


@dataclass(frozen=True)
class Aim:
    """A place that differs, and which of torch's operations may be the cause.

    Attributes:
      got: what Flax has there.
      value: what a run of torch has there, None if it has none.
      path: the submodule that it comes of; "" of the whole module.
      end: the number of the last operation before it.
      innocent: submodules that give what they should.
    """

    got: np.ndarray
    value: Callable[[Run], np.ndarray | None]
    path: str
    end: int
    innocent: frozenset[str]

    def wants(self, number: int, path: str) -> bool:
        """Whether an operation may be the cause, by its number and its submodule."""
        if number > self.end or not inside(path, self.path):
            return False
        return not any(inside(path, name) for name in self.innocent)

    def met(self, made: np.ndarray | None, laid: list[Layout]) -> bool:
        """Whether Flax has just this."""
        if made is None or made.size != self.got.size or made.dtype.kind not in "fc":
            return False
        return any(judge.same_function(self.got, x.value(made), zero=True).ok for x in laid)


def mistaken(local: Local, row: Row, lies: Between | None = None) -> str:
    """The mistake with which torch gives at a place what Flax gives, or ""."""
    tries = local.tries
    aim = None if tries is None else _aim(local, row, lies, tries)
    if tries is None or aim is None:
        return ""
    want = aim.value(local.truth)
    if want is None:
        return ""
    laid = list(islice(layouts("", aim.got.shape, want.shape), LAID))
    with np.errstate(all="ignore"):
        for tried in _in_order(local, tries, aim):
            run = tried.run()
            if run is not None and aim.met(aim.value(run), laid):
                local.mistaken[row.name] = run
                return tried.said
    return ""


def explains_all(local: Local, row: str, plain: Run) -> bool:
    """Whether all that Flax returns is what torch returns with the mistake of one place alone, so
    that nothing behind it is at fault."""
    run = local.mistaken.get(row)
    if run is None or not run.outputs.keys() <= plain.outputs.keys():
        return False
    pairs = [(plain.outputs[name], made) for name, made in run.outputs.items()]
    return all(_alike_everywhere(got, made) for got, made in pairs if made.dtype.kind in "fc")


def stopped_otherwise(local: Local, plain: Run) -> str:
    """Where torch would have to stop gradients, or let them go on, to have Flax's; or ""."""
    tries, names = local.tries, local.pair.names
    for tried in tries.behind() if tries is not None and plain.gradients else ():
        run = tried.run()
        made = names.gradients(run.gradients) if run is not None else {}
        met = made.keys() & plain.gradients.keys()
        if met and all(_alike_everywhere(plain.gradients[name], made[name]) for name in met):
            return tried.said
    return ""


def _alike_everywhere(got: np.ndarray, made: np.ndarray) -> bool:
    return got.shape == made.shape and judge.same_function(got, made, zero=True).ok


def _in_order(local: Local, tries: Tries, aim: Aim) -> Iterator[Tried]:
    plan = local.pair.plan
    skipped = [name for name in (plan.skipped if plan else ()) if name in tries.built]
    yield from tries.without([name for name in skipped if tries.built[name].dtype.kind == "f"])
    yield from tries.among(aim.wants)


def _aim(local: Local, row: Row, lies: Between | None, tries: Tries) -> Aim | None:
    name = local.theirs.get(row.name if lies is None else lies.step)
    if lies is not None and name is not None:
        path = _submodule(local, name)
        arrives = _argument(name, lies.argument)
        return Aim(lies.got, arrives, "", tries.start(path), _innocent(local, path) | {path})
    if name is not None:
        path = _submodule(local, name)
        value: Callable[[Run], np.ndarray | None] = lambda run: run.taps.get(name)  # noqa: E731
        got = local.run.taps[row.name]
        return Aim(got, value, path, tries.end(path), _innocent(local, path))
    if row.name in local.truth.outputs:
        got, last = local.run.outputs[row.name], tries.count
        value = lambda run: run.outputs.get(row.name)  # noqa: E731
        return Aim(got, value, "", last, _innocent(local, ""))
    return None


def _argument(step: str, argument: str) -> Callable[[Run], np.ndarray | None]:
    """What a submodule is given in a run of torch."""

    def value(run: Run) -> np.ndarray | None:
        call = run.calls.get(step)
        return None if call is None else call.inputs.get(argument)

    return value


def _submodule(local: Local, tap: str) -> str:
    """The submodule of torch's whose output a tap is, or in which it lies as a point."""
    path, known = tap.partition("#")[0], {*local.pair.original.parts}
    while path and path not in known:
        cut = max(path.rfind("."), path.rfind("["))
        path = path[:cut] if cut > 0 else ""
    return path


def _innocent(local: Local, place: str) -> frozenset[str]:
    """Submodules all of whose outputs are right, and that do not hold the place itself."""
    wrong = {_submodule(local, local.theirs.get(x.name, "")) for x in local.wrong()}
    right = {_submodule(local, name) for name in local.theirs.values()} - wrong
    return frozenset(path for path in right if path and not inside(place, path))
