"""Which places of a backward pass cannot be at fault, whatever a replay of it shows there."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..report import Row
from .places import Local


def unused(local: Local) -> set[str]:
    """The forced taps of calls that nothing is made of, beside another call that gives the same.

    Torch has one such call, and its gradient put behind the wrong one of Flax's would go on from
    both.
    """
    names = set()
    forced = local.force.keys()
    for name, force in local.force.items():
        arrives = local.run.tap_gradients.get(name)
        if force.gradient is None or arrives is None or arrives.any() or not force.gradient.any():
            continue
        base, value = name.partition("#")[0], local.run.taps[name]
        twins = (x for x in local.run.taps if x.partition("#")[0] == base and x not in forced)
        if any(np.array_equal(local.run.taps[x], value) for x in twins):
            names.add(name)
    return names


def unaffected(late: Sequence[Row], local: Local, rows: Sequence[Row]) -> set[str]:
    """Those of the places where a gradient is off in the replay alone.

    A parameter or an input has a comparison of its own. A tap is cleared if no gradient that failed
    lies behind it.
    """
    whole = [row for row in rows if row.kind == "gradient" and row.dtype == "float64"]
    failed = {row.name for row in whole if row.verdict.differs}
    passed = {row.name for row in whole} - failed
    wrong = [row.name for row in late if row.verdict.differs]
    taps = [name for name in wrong if name not in passed | failed]
    replay_only = {name for name in wrong if name in passed}
    return replay_only | {name for name in taps if not _explains(name, failed, local)}


def _explains(tap: str, failed: Iterable[str], local: Local) -> bool:
    """Whether a gradient that failed may come through a tap: that of an input, or of a parameter
    that belongs to no tap that the backward pass does not come to from there."""
    behind, reached = {tap}, [tap]
    while reached:
        fed = local.feeds.get(reached.pop(), frozenset()) - behind
        behind |= fed
        reached += fed
    others = {_module(x) for x in local.run.taps} - {_module(x) for x in behind}
    return any(not any(name.startswith(f"{x}.") for x in others if x) for name in failed)


def _module(tap: str) -> str:
    """The path of the module whose call, or whose point, a tap is."""
    return tap.partition("#")[0]
