"""Changes of heads: equal parts of an axis in another order, merged otherwise, lost or shared."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..sides.tape import INPUT, Ref
from .operation import Changed, Operation, around, computed
from .replay import Change, Changes
from .span import Cause, Span

MOST = 64  # number of heads of which each is left out once
Order = list[int]


def divisors(n: int) -> list[int]:
    """Numbers of equal parts, 1 left out.

    >>> divisors(6)
    [2, 3, 6]
    """
    return [d for d in range(2, n + 1) if n % d == 0]


def _of_parts(count: int, width: int) -> Iterator[tuple[str, Order]]:
    """Orders of an axis of `count` equal parts that typical mistakes produce."""
    parts = np.arange(width).reshape(count, -1)
    orders = {
        f"interleaved, {count} {{}} by their width": parts.T,
        f"of {count} {{}} in reversed order": parts[::-1],
        f"of {count} {{}} moved to the next": np.roll(parts, 1, 0),
        f"of {count} {{}} moved to the previous": np.roll(parts, -1, 0),
        f"of {count} {{}} reversed inside each": parts[:, ::-1],
    }
    yield from ((text, order.ravel().tolist()) for text, order in orders.items())


def linear(op: Operation) -> Changed:
    """Outputs, inputs or the bias of a linear layer in another order, or one head of them lost."""
    if op.name not in ("mm", "addmm") or op.out.ndim != 2:
        return
    places = {-1: "its outputs", len(op.args) - 2: "its inputs"}
    places |= {0: "the bias alone"} if op.name == "addmm" else {}
    for place, what in places.items():
        width = (op.out if place < 0 else op.args[place]).shape[-1]
        for count in divisors(width):
            for text, order in _of_parts(count, width):
                words = f"{what} {text.format('parts, such as heads,')}: another order of {op}"
                yield words, around(lambda x, o=order: x[..., o], place)
    inputs = len(op.args) - 2
    for count in divisors(op.args[inputs].shape[-1]):
        for head in range(count) if count <= MOST else ():
            text = f"part {head} of {count}, such as a head, lost among the inputs of {op}"
            yield text, around(lambda x, n=count, i=head: _without(x, n, i), inputs)


def _without(x: Any, count: int, head: int) -> Any:
    parts = x.clone().unflatten(-1, (count, -1))
    parts[..., head, :] = 0
    return parts.flatten(-2)


def axis(op: Operation) -> Changed:
    """Heads in another order where an axis is cut into them, or shared in another way."""
    if op.name not in ("view", "_unsafe_view", "expand", "index_select") or 0 not in op.tensors:
        return
    before, after = tuple(op.args[0].shape), tuple(op.out.shape)
    for place in range(1, len(after) - 1):
        count = after[place]
        cut = op.name == "index_select" or before[: place + 1] != after[: place + 1]
        if not cut or not 1 < count <= MOST:
            continue
        for what, order in orders(count):
            text = f"the {count} parts of {op.label(0)}, such as heads, in another order: {what}"
            yield text, around(lambda x, o=order, i=place: x.index_select(i, _tensor(o)))
        for head in range(count):
            text = f"part {head} of {count}, such as a head, of {op.label(0)} lost"
            yield text, around(lambda x, i=place, h=head: x.index_fill(i, _tensor([h]), 0))
    yield from _merged(op)


def _merged(op: Operation) -> Changed:
    """Two axes exchanged before they are merged: tiled heads for repeated ones."""
    x, size = op.args[0], tuple(op.out.shape)
    for i in range(1, x.ndim - 1):
        if op.name == "expand" or x.shape[i] < 2 or x.shape[i + 1] < 2:
            continue
        if x.shape[i] * x.shape[i + 1] not in size:
            continue
        for other in (i, i + 1):
            if bool((x == x.narrow(other, 0, 1)).all()):
                times = x.shape[other]
                text = f"heads of {op.label(0)} in another order: " + (
                    f"tiled, not repeated {times} times: head n of K shares with n % K"
                    if other > i
                    else f"repeated {times} times, not tiled: head n shares with n // {times}"
                )
                yield text, computed(lambda f, a, k, i=i: a[0].transpose(i, i + 1).reshape(size))


def orders(heads: int) -> Iterator[tuple[str, Order]]:
    """Wrong orders of heads that typical mistakes produce."""
    plain = np.arange(heads)
    ways = {
        "one, such as a head, for all": np.zeros_like(plain),
        "reversed": plain[::-1],
        "the next one's": np.roll(plain, -1),
        "the one before's": np.roll(plain, 1),
    }
    for group in divisors(heads)[:-1]:
        tiled = np.tile(plain[::group], group)
        few = np.repeat(plain[: heads // group], group)
        ways |= {
            f"tiled, not repeated {group} times: head n of K shares with n % K": tiled,
            f"repeated {group} times, not tiled: head n shares with n // {group}": few,
            f"in groups of {group}, transposed": plain.reshape(-1, group).T.ravel(),
        }
    yield from ((what, order.tolist()) for what, order in ways.items() if (order != plain).any())


def _tensor(order: Order) -> Any:
    import torch

    return torch.tensor(order)


def exchanged_modules(span: Span) -> Iterator[Cause]:
    """The parameters of another module, those of the same parent first."""
    owners = _owners(span)
    used = {x for node in span.nodes for x in node.operands}
    for owner, mine in owners.items():
        numbers = {leaf: number for leaf, number in mine.items() if number in used}
        parent = owner.rpartition(".")[0]
        for other in sorted(owners, key=lambda x: x.rpartition(".")[0] != parent):
            theirs = owners[other]
            fits = other != owner and all(
                leaf in theirs and span.shape(theirs[leaf]) == span.shape(number)
                for leaf, number in numbers.items()
            )
            if fits and numbers:
                exchanged = {number: theirs[leaf] for leaf, number in numbers.items()}
                text = f"the weights of {other}: two modules exchanged"
                yield Cause(text, _with_values(span, exchanged))


def _owners(span: Span) -> dict[str, dict[str, int]]:
    """Numbers of parameters and buffers, by their module and then by their own name."""
    owners: dict[str, dict[str, int]] = {}
    for number, name in span.tape.names.items():
        owner, _, leaf = name.rpartition(".")
        if span.tape.producers[number] < 0 and not name.startswith(INPUT) and owner:
            owners.setdefault(owner, {}).setdefault(leaf, number)
    return owners


def _with_values(span: Span, exchanged: Mapping[int, int]) -> Changes:
    """The changes of all operations that use a value, to use another one."""
    changes = {}
    for node in span.nodes:
        refs = {i: x.value for i, x in enumerate(node.args) if isinstance(x, Ref)}
        operands = {i: exchanged[x] for i, x in refs.items() if x in exchanged}
        if operands:
            changes[node.number] = Change(operands=operands)
    return changes
