"""Changes of masks: other keys hidden, another fill, and rows that see nothing."""

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from .operation import Changed, Operation, around, computed
from .replay import Change
from .span import Cause, Span

LOW = -9e3  # numbers below this hide a key, whatever fill was chosen
Masks = Iterator[tuple[str, np.ndarray]]


def masked(op: Operation) -> Changed:
    """A mask that hides other keys than torch's."""
    hides = _hidden(op)
    if hides is None:
        return
    for what, visible in others(~hides.numpy()):
        yield what, _hiding(op, ~visible)


def _hidden(op: Operation) -> Any:
    """Where an operation hides scores; None if it is no mask."""
    import torch

    if not op.tensors or not torch.is_tensor(op.out) or not op.out.is_floating_point():
        return None
    if op.name == "masked_fill":
        hides = op.args[1] if float(op.args[2]) < LOW else None
    elif op.name == "where" and len(op.args) == 3:
        low = _are_fills(op.args[1:])
        hides = (op.args[0], ~op.args[0])[low.index(True)] if sum(low) == 1 else None
    else:
        adds = op.name == "add" and torch.is_tensor(op.args[1])
        hides = op.args[1] < LOW if adds and op.args[1].is_floating_point() else None
    if hides is None or op.out.ndim < 2 or not hides.any():
        return None
    return hides.expand(op.out.shape)


def _are_fills(sides: Sequence[Any]) -> list[bool]:
    """Of each side of a condition, whether it only hides."""
    import torch

    return [not torch.is_tensor(x) or bool((x < LOW).all()) for x in sides]


def _hiding(op: Operation, places: np.ndarray) -> Change:
    """A masking operation that hides these places."""
    import torch

    hides = torch.from_numpy(np.ascontiguousarray(places))

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.name == "masked_fill":
            return func(args[0], hides, args[2])
        if op.name == "add":
            bias = torch.where(args[1] < LOW, 0.0, args[1])
            return torch.where(hides, args[0] + args[1].min(), args[0] + bias)
        score, fill = args[1:] if _are_fills(args[1:])[1] else args[:0:-1]
        return torch.where(hides, fill, score)

    return computed(change)


def others(visible: np.ndarray) -> Masks:
    """Masks that are often taken for this one, from where keys are visible, `... T S`."""
    for what, other in (*_aligned(visible), *_windows(visible), *_usual(visible)):
        if (other != visible).any():
            yield what, other


def _usual(visible: np.ndarray) -> Masks:
    length, keys = visible.shape[-2:]
    row, column = np.arange(length)[:, None], np.arange(keys)
    yield "the mask missing", np.ones_like(visible)
    yield "the mask inverted: True and False are exchanged", ~visible
    yield "the mask shifted by one key", visible | np.roll(visible, 1, -1) & (column > 0)
    yield "the mask shifted back by one key", visible & np.roll(visible, -1, -1)
    if length == keys:
        yield "the mask transposed: queries and keys exchanged", np.swapaxes(visible, -1, -2)
    somewhere = visible.any(-2, keepdims=True)
    yield "a mask without causality", visible | np.broadcast_to(somewhere, visible.shape)
    causal = row + (keys - length) >= column
    yield "a mask without padding", visible | np.broadcast_to(causal, visible.shape)


def _aligned(visible: np.ndarray) -> Masks:
    """A causal mask aligned to the wrong corner, for different numbers of queries and keys.

    The conventions align either the first query with the first key, or the last with the last.
    """
    length, keys = visible.shape[-2:]
    shift = keys - length
    first = np.arange(length)[:, None] >= np.arange(keys)
    last = np.arange(length)[:, None] + shift >= np.arange(keys)
    ends = {"the first key (top left)": first, "the last key (bottom right)": last}
    for (expected, causal), (other, wrong) in permutations(ends.items(), 2):
        unpadded = visible.any(-2, keepdims=True) | ~causal.any(0)
        if shift and visible.any() and not (visible ^ (causal & unpadded)).any():
            text = f"the causal mask aligned to {other}, torch's to {expected}: shifted by "
            yield f"{text}{abs(shift)}", np.broadcast_to(wrong, visible.shape) & unpadded


def _windows(visible: np.ndarray) -> Masks:
    """Window masks with one or two keys more or fewer, back, ahead or both ways."""
    length, keys = visible.shape[-2:]
    back = np.arange(keys - length, keys)[:, None] - np.arange(keys)  # T S
    shown = back[visible.reshape(-1, length, keys).any(0)]
    if not shown.size:
        return
    furthest, nearest = int(shown.max()), int(shown.min())
    unpadded = visible.any(-1, keepdims=True) & visible.any(-2, keepdims=True)
    for by in (1, -1, 2, -2):
        ways = {
            "back": (furthest + by, nearest),
            "ahead": (furthest, nearest - by),
            "both ways": (furthest + by, nearest - by),
        }
        for way, (most, least) in ways.items():
            if way != "back" and nearest >= 0:
                continue
            inside = (back <= most) & (back >= least)
            beyond = (back > furthest) | (back < nearest)
            wider = f"{abs(by)} {'wider' if by > 0 else 'narrower'} {way}"
            counts = f"{most - least + 1} keys, torch {furthest - nearest + 1}"
            other = inside & (visible | unpadded & beyond)
            yield f"a window {wider}: {counts}, itself included", other


def softmax_masks(op: Operation) -> Changed:
    """A softmax that hides more keys, without a sink, or with another end of empty rows."""
    x, place = op.args[0], op.args[1]
    if x.ndim < 2 or place % x.ndim != x.ndim - 1 or not x.is_floating_point():
        return
    visible = (x >= LOW).numpy()
    for what, other in others(visible):
        less = visible & other
        if less.any() and (less != visible).any():
            yield what, around(_filled(~less, -np.inf), 0)
    for end, what in ((-1, "last"), (0, "first")):
        text = f"the sink left out: torch's softmax has it, the {what} key, in its denominator"
        yield text, around(lambda x, end=end: x.index_fill(-1, _index(x, end), -np.inf), 0)
    text = "uniform weights: the scores do not arrive"
    yield text, around(lambda x: x.masked_fill(x >= LOW, 0.0), 0)
    nothing = ~visible.any(-1, keepdims=True)
    if nothing.any():
        yield from _empty_rows(op, np.broadcast_to(nothing, visible.shape))


def _empty_rows(op: Operation, nothing: np.ndarray) -> Changed:
    """Rows that see nothing: zeros, an average, or NaN."""
    even = 1 / nothing.shape[-1]
    ends = {"gives zeros": 0.0, "averages": even, "gives NaN": np.nan}
    here = float(op.out[tuple(np.argwhere(nothing)[0])])
    now = "gives NaN" if np.isnan(here) else "averages" if here else "gives zeros"
    for end, number in ends.items():
        if end != now:
            text = f"rows that see nothing: torch {now}, Flax {end}"
            yield text, around(_filled(nothing, number))


def _filled(places: np.ndarray, number: float) -> Any:
    import torch

    hides = torch.from_numpy(np.ascontiguousarray(places))
    return lambda x: x.masked_fill(hides, number)


def _index(x: Any, place: int) -> Any:
    import torch

    return torch.tensor([place % x.shape[-1]])


def lost_keys(span: Span) -> Iterator[Cause]:
    """One of several parts that torch puts together, such as a memory, left out of the keys."""
    softmaxes = [node for node in span.nodes if "softmax" in node.name]
    for node in span.tape.nodes if softmaxes else ():
        if node.name != "cat":
            continue
        parts: Any = node.args[0]
        axis = dict(enumerate(node.args)).get(1, 0)
        sizes = [span.shape(x.value)[axis] for x in parts]
        over_keys = [x for x in softmaxes if span.shape(x.outs[0])[-1] == sum(sizes)]
        ends = np.cumsum(sizes)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            name = span.operation(node).called(parts[i].value)
            text = f"{name} left out of the {len(sizes)} parts that are put together as keys"
            lost = range(end - size, end)
            if len(parts) > 1:
                yield Cause(text, {x.number: around(_without_keys(lost), 0) for x in over_keys})


def _without_keys(lost: range) -> Any:
    import torch

    return lambda x: x.index_fill(-1, torch.tensor([*lost]), -np.inf)


def measured_masks(span: Span) -> Iterator[Cause]:
    """The mask that Flax's scores or weights show, in the place of torch's."""
    for node in span.nodes:
        op = span.operation(node)
        hides = _hidden(op) if node.name in ("masked_fill", "where", "add") else None
        got = None if hides is None else span.target.like_torch(tuple(hides.shape))
        if got is None or hides is None:
            continue
        hidden = hides.numpy()
        for places in (~np.isfinite(got) | (got < LOW), got == 0):
            more, less = int((hidden & ~places).sum()), int((places & ~hidden).sum())
            if (more or less) and not places.all():
                text = f"another mask: {more} places shown and {less} hidden that torch does not"
                yield Cause(text, {node.number: _hiding(op, places)})
        shown = hidden & np.isfinite(got)
        fills = got[shown]
        if fills.size and (fills == fills[0]).all():
            change = around(_filled(shown, float(fills[0])))
            yield Cause(f"a mask that fills with {fills[0]:.6g}", {node.number: change})
