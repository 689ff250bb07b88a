"""Every single change of every operation of a span, the cheapest kinds first.

What gives Flax's value exactly is the cause; if nothing does, the outcome says how much was tried.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from ..sides.tape import Ref, Tape
from .catalogue import KINDS, Kind
from .chains import chains, gates
from .channels import channels
from .fit import constants, factors_and_terms, momenta, shares, softcaps
from .generic import functions_of
from .heads import exchanged_modules
from .inside import attempted, inside
from .masks import lost_keys, measured_masks
from .operands import exchanged_slices, other_operands, stale
from .operation import around
from .replay import in_one_thread
from .rotary import rotations
from .span import Budget, Cause, Outcome, Span
from .target import Target

# Changes inside of fused operations, which a port may write out.
INSIDE = Kind("inside", partial(inside, tuple(x.changes for x in KINDS)), functions=True)
# Changes that look at more than one operation.
OF_SPANS = (exchanged_slices, exchanged_modules, stale, other_operands, chains, gates)
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
    with in_one_thread(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        possible = target.orders and target.tells and span.nodes
        cause = next(_causes(span), None) if possible else None
    late = cause is None and span.budget.spent
    span.budget.stop()
    return Outcome(cause, span.tried, len(span.computing), span.budget.seconds, late)


def _causes(span: Span) -> Iterator[Cause]:
    """What gives Flax's value, or that of some elements; a fitted number, a share, two changes."""
    in_part = None
    for cause in _candidates(span):
        if span.budget.spent:
            break
        if cause.fitted:  # which gives Flax's value
            yield cause
            continue
        made = span.evaluate(cause.changes)
        if made is not None and span.target.equals(made):
            yield cause
        elif made is not None and in_part is None and span.target.equals_where_it_differs(made):
            in_part = replace(cause, sentence=f"{cause.sentence}, in some of the places")
    yield from [in_part] if in_part else ()
    yield from attempted(factors_and_terms, span)
    yield from shares(span, _candidates(span, fits=False))
    yield from attempted(channels, span)
    for cause in chain(_of_kind(span, INSIDE), _pairs(span)):
        if span.budget.spent:
            return
        if span.explains(cause.changes):
            yield cause


def _candidates(span: Span, fits: bool = True) -> Iterator[Cause]:
    """All single changes; `fits` is whether constants are fitted too."""
    for kind in KINDS:
        yield from _of_kind(span, kind)
        if kind.name == "another mask":
            yield from attempted(measured_masks, span)
            yield from attempted(lost_keys, span)
        if kind.name == "left out":
            for rows in (rotations, *((momenta, constants, softcaps) if fits else ()), *OF_SPANS):
                yield from attempted(rows, span)
    yield from attempted(_before_all, span)


def _of_kind(span: Span, kind: Kind) -> Iterator[Cause]:
    """All changes of one kind, those of the last operation first."""
    for what, nodes in () if kind.functions and span.target.is_spoiled else span.sites:
        op = span.operation(nodes[0])
        for sentence, change in attempted(kind.changes, op):
            yield Cause(f"{sentence}{what}", {node.number: change for node in nodes})


def _before_all(span: Span) -> Iterator[Cause]:
    """A function of a value that enters the span, wherever that is used."""
    for value in sorted(span.entering):
        uses = {
            node.number: [i for i, x in enumerate(node.args) if x == Ref(value)]
            for node in span.nodes
            if value in node.operands
        }
        x = span.tape.values[value]
        if len(uses) < 2 or not all(uses.values()) or not x.is_floating_point():
            continue
        label = span.operation(span.nodes[-1]).called(value)
        for text, function in functions_of(x, label):
            changes = {number: around(function, *places) for number, places in uses.items()}
            yield Cause(f"{text}, wherever it is used", changes)


def _pairs(span: Span) -> Iterator[Cause]:
    """Two changes at once, of the cheap kinds, in a short span."""
    if len(span.computing) > PAIRS_UP_TO:
        return
    singles = [cause for kind in KINDS if kind.pairs for cause in _of_kind(span, kind)]
    for i, one in enumerate(singles):
        for other in singles[i + 1 :]:
            both = {**one.changes, **other.changes}
            if len(both) == len(one.changes) + len(other.changes):
                yield Cause(f"{one.sentence}; and {other.sentence}", both)
