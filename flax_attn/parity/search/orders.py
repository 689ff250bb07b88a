"""Changes of order: parts of a projection, patches, kernels, time."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

from .operation import PARTS, Changed, Operation, around, computed, operand
from .sites import nth

ALL_ORDERS_UP_TO = 4  # up to this number of parts, every order is tried
SWAPS_UP_TO = 16  # up to this number of parts, only swaps of two are tried


def orders(count: int) -> Iterator[tuple[int, ...]]:
    """Permutations without the identity: swaps of two, then all others of a few.

    >>> list(orders(3))
    [(1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1)]
    """
    plain = tuple(range(count))
    exchanged = []
    for i, j in combinations(plain, 2):
        order = list(plain)
        order[i], order[j] = j, i
        exchanged.append(tuple(order))
    rest = permutations(plain) if count <= ALL_ORDERS_UP_TO else (plain[::-1], (*plain[1:], 0))
    yield from exchanged
    yield from (order for order in rest if order != plain and order not in exchanged)


def _order_text(order: Sequence[int]) -> str:
    numbers = ", ".join(map(str, order))
    return "exchanged" if len(order) == 2 else f"in the order {numbers}"


def _parts(op: Operation) -> Changed:
    """Parts of one array in another order, or interleaved."""
    count = len(op.outs)
    if not 2 <= count <= SWAPS_UP_TO or len({tuple(x.shape) for x in op.outs}) > 1:
        return
    what = f"the {count} parts of {op.label(0)}"
    plain = ", ".join(map(str, range(count)))
    for order in orders(count):
        yield (
            f"{what} {_order_text(order)}: another order than torch's {plain}",
            computed(lambda f, a, k, order=order: [f(*a, **k)[i] for i in order]),
        )
    if op.name == "unbind":
        return
    text = f"{what} interleaved, every {nth(count - 1)} number: another order of its axes"
    yield text, computed(lambda f, a, k: _cut(a, k, lambda x: x.unflatten(-1, (-1, count)).mT))
    width = op.out.shape[op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)]
    for heads in (n for n in range(2, width) if width % n == 0):
        text = f"{what} cut from each of {heads} heads, where torch cuts the whole: another order"

        def of_each(x: Any, heads: int = heads) -> Any:
            return x.unflatten(-1, (heads, count, -1)).transpose(-3, -2).flatten(-2)

        yield text, computed(lambda f, a, k, cut=of_each: _cut(a, k, cut))
    if op.out.ndim > 2:
        text = f"{what} cut from the whole, where torch cuts each head: another order of its axes"
        yield text, computed(lambda f, a, k: _of_whole(count, f, a, k))


def _cut(args: Sequence[Any], kwargs: dict[str, Any], way: Callable[[Any], Any]) -> list[Any]:
    """The parts of an axis, which `way` gives on an axis before the last one."""
    x, _, dim = (*args, kwargs.get("dim", 0))[:3]
    return [part.movedim(-1, dim) for part in way(x.movedim(dim, -1)).unbind(-2)]


def _of_whole(count: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Parts of the last axis of heads, as if heads and parts were one axis."""
    x = args[0]
    made = x.flatten(-2).unflatten(-1, (count, x.shape[-2], -1)).unbind(-3)
    right = func(*args, **kwargs)
    if any(y.shape != z.shape for y, z in zip(made, right, strict=True)):
        raise ValueError("parts of another axis")
    return list(made)


def _put_together(op: Operation) -> Changed:
    """Parts concatenated or stacked in another order."""
    parts = op.args[0]
    if not 2 <= len(parts) <= SWAPS_UP_TO:
        return
    names = [op.called(x.value) for x in op.node.args[0]]
    listed = f", {', '.join(names)}," if len({*names}) == len(names) else ""
    what = f"{len(parts)} parts{listed} put together"
    for order in orders(len(parts)):
        yield (
            f"{what} {_order_text(order)}: another order",
            computed(lambda f, a, k, order=order: f([a[0][i] for i in order], *a[1:], **k)),
        )
    axis = op.args[1] if len(op.args) > 1 else 0
    if len({tuple(x.shape) for x in parts}) == 1 and op.name == "cat":
        yield (
            f"{what} in turn: interleaved, where torch has one after the other",
            computed(lambda f, a, k: _interleaved_parts(a[0], axis)),
        )
    for i, j in combinations(range(len(parts)), 2):
        for to, of in ((i, j), (j, i)):
            if parts[i].shape == parts[j].shape:
                name = op.called(op.node.args[0][of].value)
                yield (
                    f"{what}, but the {to + 1}th is {name} again",
                    computed(lambda f, a, k, to=to, of=of: f(_doubled(a[0], to, of), *a[1:], **k)),
                )


def _interleaved_parts(parts: Sequence[Any], axis: int) -> Any:
    import torch

    return torch.stack([x.movedim(axis, -1) for x in parts], -1).flatten(-2).movedim(-1, axis)


def interleaved(op: Operation) -> Changed:
    """A table, such as of sines and cosines, with its halves in turn, or one after the other."""
    for place, x in op.tensors.items():
        value = op.node.args[place].value
        if op.tape.producers[value] >= 0 or not x.is_floating_point() or x.shape[-1:].numel() % 2:
            continue
        if x.ndim and x.shape[-1] > 2:
            label = op.label(place)
            text = f"the halves of {label} in turn: interleaved, another order than torch's"
            yield text, around(lambda x: x.unflatten(-1, (2, -1)).mT.flatten(-2), place)
            text = f"every other number of {label}, then the rest: another order than torch's"
            yield text, around(lambda x: x.unflatten(-1, (-1, 2)).mT.flatten(-2), place)


def _doubled(parts: Sequence[Any], to: int, of: int) -> list[Any]:
    return [parts[of] if i == to else x for i, x in enumerate(parts)]


def _transposed_kernel(op: Operation) -> Changed:
    """A square kernel, or its square blocks, not transposed."""
    x = op.args[0]
    if x.ndim != 2 or min(x.shape) < 2:
        return
    rows, columns = x.shape
    if rows == columns:
        yield f"{op.label(0)} untransposed", computed(lambda f, a, k: a[0].clone())
    elif rows % columns == 0 or columns % rows == 0:
        text = f"the square blocks of {op.label(0)} untransposed"
        yield text, computed(lambda f, a, k: _blocks(a[0]))


def _blocks(x: Any) -> Any:
    """Transpose of a kernel whose square blocks are transposed once more."""
    tall, small = len(x) > x.shape[1], min(x.shape)
    w = x if tall else x.T
    w = w.reshape(-1, small, small).transpose(1, 2).reshape(-1, small)
    return w.T if tall else w


def _reversed(op: Operation) -> Changed:
    yield "not reversed: torch's flip left out", operand(0)


def _rolled(op: Operation) -> Changed:
    yield "not shifted: torch's roll left out", operand(0)
    yield "shifted the other way", computed(lambda f, a, k: f(a[0], [-n for n in a[1]], *a[2:]))


ORDERS: dict[str, Callable[[Operation], Changed]] = {
    **dict.fromkeys(PARTS, _parts),
    **dict.fromkeys(("cat", "stack"), _put_together),
    "t": _transposed_kernel,
    "flip": _reversed,
    "roll": _rolled,
}
