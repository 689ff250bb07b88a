"""Mistakes of order: parts of a projection, patches, kernels, time."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations
from typing import Any

from ..sides.changes import Mistakes, Named, Operation
from .elements import named_or_shape

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


def _parts(op: Operation, named: Named) -> Mistakes:
    """Parts of one array in another order, or interleaved."""
    count = len(op.out)
    if not 2 <= count <= SWAPS_UP_TO or len({tuple(x.shape) for x in op.out}) > 1:
        return
    what = f"the {count} parts of {named_or_shape(op.args[0], named)}"
    plain = ", ".join(map(str, range(count)))
    for order in orders(count):
        yield (
            f"{what} {_order_text(order)}: another order than torch's {plain}",
            lambda func, args, kwargs, order=order: [func(*args, **kwargs)[i] for i in order],
        )
    if op.name != "unbind":
        description = f"{what} interleaved, every {count}th number: another order of its axes"
        yield description, lambda func, args, kwargs: _interleaved(count, args, kwargs)


def _interleaved(count: int, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    x, _, dim = (*args, kwargs.get("dim", 0))[:3]
    x = x.movedim(dim, -1)
    return [x[..., i::count].movedim(-1, dim) for i in range(count)]


def _put_together(op: Operation, named: Named) -> Mistakes:
    """Parts concatenated or stacked in another order."""
    parts = op.args[0]
    if not 2 <= len(parts) <= SWAPS_UP_TO or len({tuple(x.shape) for x in parts}) > 1:
        return
    names = ", ".join(filter(None, map(named, parts)))
    what = f"{len(parts)} parts{f', {names},' if names else ''} put together"
    for order in orders(len(parts)):
        yield (
            f"{what} {_order_text(order)}: another order",
            lambda f, a, k, order=order: f([a[0][i] for i in order], *a[1:], **k),
        )


def _transposed_kernel(op: Operation, named: Named) -> Mistakes:
    """A square kernel, or its square blocks, not transposed."""
    x = op.args[0]
    name = named(x) if x.ndim == 2 and min(x.shape) > 1 else ""
    if not name:
        return
    rows, columns = x.shape
    if rows == columns:
        yield f"{name} untransposed", lambda func, args, kwargs: args[0].clone()
    elif rows % columns == 0 or columns % rows == 0:
        yield f"the square blocks of {name} untransposed", lambda f, a, k: _blocks(a[0])


def _blocks(x: Any) -> Any:
    """Transpose of a kernel whose square blocks are transposed once more."""
    tall, small = len(x) > x.shape[1], min(x.shape)
    w = x if tall else x.T
    w = w.reshape(-1, small, small).transpose(1, 2).reshape(-1, small)
    return w.T if tall else w


def _reversed(op: Operation, named: Named) -> Mistakes:
    yield "not reversed: torch's flip left out", lambda f, a, k: a[0].clone()


def _rolled(op: Operation, named: Named) -> Mistakes:
    yield "not shifted: torch's roll left out", lambda f, a, k: a[0].clone()
    yield "shifted the other way", lambda f, a, k: f(a[0], [-n for n in a[1]], *a[2:])


PARTS = ("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unbind")
ORDERS: dict[str, Callable[[Operation, Named], Mistakes]] = {
    **dict.fromkeys(PARTS, _parts),
    **dict.fromkeys(("cat", "stack"), _put_together),
    "t": _transposed_kernel,
    "flip": _reversed,
    "roll": _rolled,
}
