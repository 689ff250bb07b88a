"""Every single change of every operation of a span, the cheapest kinds first.

What gives Flax's value exactly is the cause; if nothing does, the outcome says how much was tried.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np

from ..sides.tape import Tape
from .catalogue import KINDS, Kind
from .chains import chains
from .fit import fitted
from .inside import attempted, inside
from .operands import exchanged_slices, other_operands
from .replay import in_float64
from .span import Budget, Cause, Outcome, Span
from .target import Target

# Changes inside of fused operations, which a port may write out.
INSIDE = Kind("inside", partial(inside, tuple(kind.changes for kind in KINDS)))
PAIRS_UP_TO = 8  # number of operations in which pairs of changes are tried


def explained(
    tape: Tape,
    target: Target,
    bounds: frozenset[int],
    labels: Mapping[int, str],
    budget: Budget | None = None,
) -> Outcome:
    """Searches for the cause of a value: ends at the first change that gives Flax's array."""
    span = Span(tape, target, bounds, labels, budget or Budget())
    span.budget.start()
    with in_float64(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        possible = target.orders and target.tells and span.nodes
        cause = next(_causes(span), None) if possible else None
    late = cause is None and span.budget.spent
    span.budget.stop()
    return Outcome(cause, span.tried, len(span.computing), span.budget.seconds, late)


def _causes(span: Span) -> Iterator[Cause]:
    for cause in _candidates(span):
        if span.budget.spent:
            return
        if span.explains(cause.changes):
            yield cause
    yield from fitted(span)
    for cause in _of_kind(span, INSIDE):
        if span.budget.spent:
            return
        if span.explains(cause.changes):
            yield cause
    yield from _pairs(span)


def _candidates(span: Span) -> Iterator[Cause]:
    """All single changes."""
    for kind in KINDS:
        yield from _of_kind(span, kind)
        if kind.name == "left out":
            yield from exchanged_slices(span)
            yield from other_operands(span)
            yield from chains(span)


def _of_kind(span: Span, kind: Kind) -> Iterator[Cause]:
    """All changes of one kind, those of the last operation first."""
    for what, nodes in span.sites:
        op = span.operation(nodes[0])
        for sentence, change in attempted(kind.changes, op):
            yield Cause(f"{sentence}{what}", {node.number: change for node in nodes})


def _pairs(span: Span) -> Iterator[Cause]:
    """Two changes at once, of the cheap kinds, in a short span."""
    if len(span.computing) > PAIRS_UP_TO:
        return
    singles = [cause for kind in KINDS if kind.pairs for cause in _of_kind(span, kind)]
    for i, one in enumerate(singles):
        for other in singles[i + 1 :]:
            if span.budget.spent:
                return
            both = {**one.changes, **other.changes}
            disjoint = len(both) == len(one.changes) + len(other.changes)
            if disjoint and span.explains(both):
                yield Cause(f"{one.sentence}; and {other.sentence}", both)
