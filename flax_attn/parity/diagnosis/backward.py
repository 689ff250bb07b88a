"""Taps whose backward pass cannot be at fault, regardless of the local gradient check."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..report import Row
from .places import Local


def unused(local: Local) -> set[str]:
    """Forced taps whose output is unused, where another call of the module has the same value.

    Torch has only one such call. Its gradient, injected at the wrong one of Flax's calls, would
    propagate in addition to the right one.
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
    """Names whose gradient differs only in the local check.

    Parameters and inputs are compared in the full run as well. A tap counts as unaffected if no
    failed gradient can be reached from it in the backward pass.
    """
    whole = [row for row in rows if row.kind == "gradient" and row.dtype == "float64"]
    failed = {row.name for row in whole if row.verdict.differs}
    passed = {row.name for row in whole} - failed
    wrong = [row.name for row in late if row.verdict.differs]
    taps = [name for name in wrong if name not in passed | failed]
    replay_only = {name for name in wrong if name in passed}
    return replay_only | {name for name in taps if not _explains(name, failed, local)}


def _explains(tap: str, failed: Iterable[str], local: Local) -> bool:
    """Whether a failed gradient may depend on the gradient at a tap.

    True for inputs, and for parameters of modules that the backward pass reaches from the tap.
    """
    behind, reached = {tap}, [tap]
    while reached:
        fed = local.feeds.get(reached.pop(), frozenset()) - behind
        behind |= fed
        reached += fed
    others = {_module(x) for x in local.run.taps} - {_module(x) for x in behind}
    return any(not any(name.startswith(f"{x}.") for x in others if x) for name in failed)


def _module(tap: str) -> str:
    """The path of the module that a tap belongs to."""
    return tap.partition("#")[0]
