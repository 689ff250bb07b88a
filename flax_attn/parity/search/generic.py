"""Changes that any operation can suffer: numbers, axes, orders of axes, something put around it."""

import math
from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from typing import Any

from ..sides.tape import KERNELS, Ref, flat, mapped
from .elements import functions
from .operation import (
    VIEWS,
    Changed,
    Operation,
    around,
    computed,
    described,
    exchanged,
    first,
    operand,
    with_arguments,
)
from .replay import Change

# Names of integer arguments that are axes or sizes; other rows change those.
AXES = ("dim", "dims", "dim0", "dim1", "size", "sizes", "self", "normalized_shape", "shape")
AXES += ("split_size", "split_sizes", "stride", "padding", "dilation", "groups", "repeats")
AXES += ("N", "C", "HxW", "group", "output_padding", "kernel_size", "dtype", "layout")
MAX_AXES = 4  # up to this rank every order of axes is tried
MAX_STARTS = 8  # number of other starts of a slice


def numbers(op: Operation) -> Changed:
    """Another whole number, or a flag turned."""
    names = [*op.node.schema]
    arguments = {i: x for i, x in enumerate(op.node.args) if i < len(names)}
    for i, x in arguments.items():
        if isinstance(x, bool):
            yield f"{names[i]} {not x}, torch {x}", with_arguments({i: not x})
        elif isinstance(x, int) and names[i] not in AXES and abs(x) < 2**62:
            for other in dict.fromkeys((x - 1, x + 1, 2 * x, x // 2)):
                if other != x:
                    text = f"numbers or positions shifted: {other} in the place of {x}"
                    yield text, with_arguments({i: other})
        elif isinstance(x, float) and math.isfinite(x):
            for word, rounded in _narrower(x):
                text = f"the constant {x:.9g} of {op} rounded to {word}: {rounded:.9g}"
                yield text, with_arguments({i: rounded})
    for name, x in op.kwargs.items():
        if isinstance(x, bool) and name not in ("pin_memory", "non_blocking"):
            yield f"{name} {not x}, torch {x}", _with_keyword(name, not x)
        elif name == "correction" and isinstance(x, int | float):
            counts = {0: "n", 1: "n - 1"}
            other = 1 - int(bool(x))
            text = f"a variance over {counts[other]}, where torch has {counts.get(int(x), x)}"
            yield text, _with_keyword(name, other)
        elif isinstance(x, int | float) and not isinstance(x, bool):
            for other in (x - 1, x + 1):
                yield f"{name} {other:g}, torch {x:g}", _with_keyword(name, other)


def _narrower(x: float) -> Iterator[tuple[str, float]]:
    """A number in narrower dtypes that do not have it."""
    import torch

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        other = float(torch.tensor(x, dtype=dtype))
        if other != x:
            yield str(dtype).removeprefix("torch."), other


def _with_keyword(name: str, value: Any) -> Change:
    return computed(lambda f, a, k: f(*a, **{**k, name: value}))


def slices(op: Operation) -> Changed:
    """A slice that starts elsewhere, or another element of an axis."""
    if op.name == "slice" and len(op.args) > 2:
        axis, length = op.args[1], op.args[0].shape[op.args[1]]
        start = op.args[2] or 0
        size, step = op.out.shape[axis], (op.args[4] if len(op.args) > 4 else 1)
        starts = range(length - (size - 1) * step)
        near = sorted(starts, key=lambda i: (i not in (0, length - size), abs(i - start)))
        for other in near[:MAX_STARTS]:
            if other != start:
                end = other + (size - 1) * step + 1
                text = f"another part of {op.label(0)}: from {other}, torch from {start}"
                yield text, with_arguments({2: other, 3: end})
        if step == 1 and length == 2 * size:
            for i, word in enumerate(("even", "odd")):
                text = f"the {word} places of {op.label(0)}, where torch has one half"
                yield (
                    text,
                    computed(
                        lambda f, a, k, i=i: a[0].movedim(axis, -1)[..., i::2].movedim(-1, axis)
                    ),
                )
    elif op.name == "select":
        _, axis, place = op.node.args
        length = op.tensors[0].shape[axis]
        for other in dict.fromkeys((0, length - 1, place - 1, place + 1, *range(min(length, 6)))):
            if 0 <= other < length and other != place % length:
                text = f"element {other} of {op.label(0)}, torch {place}"
                yield text, with_arguments({2: other})


def permuted_axes(op: Operation) -> Changed:
    """Another order of axes, where torch permutes them or reshapes."""
    x, rank = op.args[0], op.args[0].ndim
    plain = tuple(range(rank))
    if op.name in ("permute", "transpose", "movedim") and rank <= MAX_AXES + 1:
        for order in permutations(plain):
            text = f"axes in the order {list(order)} of {op.label(0)}"
            if sum(i != j for i, j in enumerate(order)) <= 3 or rank <= 3:
                yield text, computed(lambda f, a, k, order=order: a[0].permute(order))
    elif op.name in ("view", "_unsafe_view") and "dtype" not in op.node.schema:
        size = tuple(op.out.shape)
        for i, j in combinations(plain, 2):
            if x.shape[i] > 1 and x.shape[j] > 1:
                text = f"axes {i} and {j} of {op.label(0)} exchanged, another order of them, "
                text += "before it is reshaped"
                yield text, computed(lambda f, a, k, i=i, j=j: a[0].transpose(i, j).reshape(size))
        for order in _orders_of_split(tuple(x.shape), size):
            text = (
                f"{op.label(0)} reshaped as {[size[i] for i in order]}, another order of its axes "
            )
            text += f"than torch's {list(size)}"
            yield text, computed(lambda f, a, k, o=order: _split_other(a[0], size, o))
        other = (*size[:-3], size[-2], size[-3], size[-1])
        if len(size) > 2 and other != size:
            text = f"{op.label(0)} reshaped as {list(other)}, torch {list(size)}: sizes exchanged"
            yield text, computed(lambda f, a, k: a[0].reshape(other))
    elif op.name == "repeat":
        yield "each element repeated, where torch repeats the whole", computed(_interleave)


def _orders_of_split(before: tuple[int, ...], after: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Other orders of the axes that a reshape makes, and the one before them."""
    kept = next((i for i, (m, n) in enumerate(zip(before, after, strict=False)) if m != n), 0)
    axes = range(max(kept - 1, 0), len(after))
    for order in permutations(axes) if len(axes) <= MAX_AXES else ():
        if order != tuple(axes):
            yield (*range(axes[0]), *order)


def _split_other(x: Any, size: tuple[int, ...], order: tuple[int, ...]) -> Any:
    back = sorted(range(len(order)), key=lambda i: order[i])
    return x.reshape([size[i] for i in order]).permute(back)


def _interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, times = args[0], args[1]
    x = x.reshape((1,) * (len(times) - x.ndim) + tuple(x.shape))
    for axis, count in enumerate(times):
        x = x.repeat_interleave(count, axis)
    return x


def axes(op: Operation) -> Changed:
    """Another axis, for operations without a row of their own."""
    place = op.place("dim")
    place = place if place >= 0 else op.place("dims")
    if place < 0 or op.name in (*VIEWS, *KERNELS) or not op.tensors:
        return
    x = op.args[place]
    rank = next(iter(op.tensors.values())).ndim
    single = isinstance(x, int)
    if not single and not (isinstance(x, list | tuple) and x):
        return
    for axis in range(rank):
        if axis not in [i % rank for i in ([x] if single else x)]:
            text = f"the {op.name.strip('_')} over another axis: {axis}, torch {x}"
            yield text, with_arguments({place: axis if single else [axis]})


def nothing(op: Operation) -> Changed:
    """The operation left out, if its result has the shape of an operand."""
    for place, x in op.tensors.items():
        if x.shape == op.out.shape and x.dtype == op.out.dtype:
            yield f"{op} left out", operand(place)


def turned(op: Operation) -> Changed:
    """Operands of a matrix product transposed, or exchanged."""
    if op.name not in ("mm", "bmm", "addmm", "mv", "dot"):
        return
    if op.name in ("mm", "bmm") and op.out.shape[-1] == op.out.shape[-2] > 1:
        text = f"{op.label(0)} and {op.label(1)} exchanged in {op}: a transposed result"
        yield text, around(lambda x: x.mT)
    for place, x in op.tensors.items():
        if x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1:
            yield f"{op.label(place)} transposed", around(lambda x: x.mT, place)


def arounds(op: Operation) -> dict[int, str]:
    """Operands and the result (-1) that something may be put around, with their names.

    What one operation alone uses is changed where it is computed.
    """
    open_here = op.entering | (frozenset() if op.name in VIEWS else op.shared)
    refs = {i: x.value for i, x in enumerate(op.node.args) if isinstance(x, Ref)}
    places = [i for i, x in refs.items() if x in open_here or not op.entering]
    return {**({} if op.name in VIEWS else {-1: str(op)}), **{i: op.label(i) for i in places}}


def moved(op: Operation) -> Changed:
    """An operand or the result rolled, shifted, flipped, or with two axes exchanged."""
    for place, label in arounds(op).items():
        x = op.out if place < 0 else op.args[place]
        for axis in range(x.ndim):
            if x.shape[axis] < 2:
                continue
            for by in (1, -1):
                text = f"{label} rolled by {by} along axis {axis}"
                yield text, around(lambda x, a=axis, by=by: x.roll(by, a), place)
                text = f"{label} shifted by {by} along axis {axis}, zeros in front or behind"
                yield text, around(lambda x, a=axis, by=by: _zeros_in(x, by, a), place)
            yield f"{label} reversed along axis {axis}", around(lambda x, a=axis: x.flip(a), place)
        for i, j in combinations(range(x.ndim), 2):
            if x.shape[i] == x.shape[j] > 1:
                text = f"axes {i} and {j} of {label} exchanged"
                yield text, around(lambda x, i=i, j=j: x.transpose(i, j), place)


def _zeros_in(x: Any, by: int, axis: int) -> Any:
    moved = x.roll(by, axis)
    edge = 0 if by > 0 else x.shape[axis] - 1
    moved.select(axis, edge).zero_()
    return moved


def _extra() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What a port may have too much, or torch not have."""
    import torch

    words = functions()
    yield from ((f"{name} of", function) for name, function in words.items())
    yield "the negative of", lambda x: -x
    yield "1 -", lambda x: 1 - x
    yield "1 +", lambda x: 1 + x
    yield "another scale: twice", lambda x: 2 * x
    yield "another scale: half of", lambda x: x / 2
    yield "another scale: the root of the width times", lambda x: x * math.sqrt(x.shape[-1])
    yield "another scale: 1 over the root of the width times", lambda x: x / math.sqrt(x.shape[-1])
    yield "the softmax over the last axis of", lambda x: torch.softmax(x, -1)
    yield "a copy in float32 of", lambda x: x.float().to(x.dtype)
    yield "a copy in bfloat16 of", lambda x: x.bfloat16().to(x.dtype)
    yield "a copy in float16 of", lambda x: x.half().to(x.dtype)
    yield "the fractional part rounded off", torch.round
    for eps in (0.0, 1e-12):
        yield f"a norm without gain (epsilon {eps:g}) of", lambda x, e=eps: _standard(x, -1, e)
    yield "a vector of length 1 along", lambda x: x / x.norm(dim=-1, keepdim=True)
    yield "renormalised, divided by the sum:", lambda x: x / _not_zero(x.sum(-1, keepdim=True))
    yield "divided by 1 + the largest size:", lambda x: x / (1 + x.abs().max())
    yield "the cube of", lambda x: x**3
    for steps in (8, 16, 127, 256):
        yield f"rounded to {steps} steps:", lambda x, n=steps: torch.round(n * x) / n


def _not_zero(x: Any) -> Any:
    return x.masked_fill(x == 0, 1.0)


def _complex() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What a port may have too much around a complex number."""
    yield "the conjugate of", lambda x: x.conj().resolve_conj()
    yield "the negative of", lambda x: -x
    yield "twice", lambda x: 2 * x
    yield "half of", lambda x: x / 2
    yield "the real part of", lambda x: x.real.to(x.dtype)
    yield "the absolute value of", lambda x: x.abs().to(x.dtype)


def _along() -> Iterator[tuple[str, Callable[[Any, int], Any]]]:
    """What a port may do too much along one axis."""
    import torch

    yield "the mean, which is taken off", lambda x, i: x - x.mean(i, keepdim=True)
    yield "the mean", lambda x, i: x.mean(i, keepdim=True).expand_as(x)
    yield "the running sum", lambda x, i: x.cumsum(i)
    yield "the reversed running sum", lambda x, i: x.flip(i).cumsum(i).flip(i)
    yield "the running sum without itself", lambda x, i: x.cumsum(i) - x
    yield "the running mean", lambda x, i: x.cumsum(i) / _positions(x, i)
    yield "the running sum over the length", lambda x, i: x.cumsum(i) / x.shape[i]
    yield "differences of neighbours", lambda x, i: x - x.roll(1, i)
    yield "the sorted numbers", lambda x, i: x.sort(i).values
    yield "the first set to zero", lambda x, i: x.index_fill(i, torch.tensor([0]), 0)
    yield "the last set to zero", lambda x, i: x.index_fill(i, torch.tensor([x.shape[i] - 1]), 0)
    for eps in (1e-5, 1e-6):
        yield f"a norm (epsilon {eps:g})", lambda x, i, e=eps: _standard(x, i, e)
        yield (
            f"an RMS norm (epsilon {eps:g})",
            lambda x, i, e=eps: x / (x.square().mean(i, keepdim=True) + e).sqrt(),
        )
    yield "a softmax", torch.softmax
    yield "the first element", lambda x, i: x.narrow(i, 0, 1).expand_as(x)
    yield "the last element", lambda x, i: x.narrow(i, x.shape[i] - 1, 1).expand_as(x)


def _positions(x: Any, axis: int) -> Any:
    import torch

    return torch.ones_like(x).cumsum(axis)


def _standard(x: Any, axis: int, eps: float) -> Any:
    return (x - x.mean(axis, keepdim=True)) / (x.var(axis, keepdim=True, correction=0) + eps).sqrt()


def functions_of(x: Any, label: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What a port may put around a value, in words."""
    for text, function in _complex() if x.is_complex() else _extra():
        yield f"{text} {label}, where torch has it as it is", function
    for axis in range(x.ndim) if x.is_floating_point() else ():
        for text, along in _along() if x.shape[axis] > 1 else ():
            words = f"{text} along axis {axis} of {label}, where torch has it as it is"
            yield words, lambda x, f=along, i=axis: f(x, i)


def extra(op: Operation) -> Changed:
    """A function around an operand or the result."""
    for place, label in arounds(op).items():
        x = op.out if place < 0 else op.args[place]
        if x.is_floating_point() or x.is_complex():
            for text, function in functions_of(x, label):
                yield text, around(function, place)


def twice(op: Operation) -> Changed:
    """The operation applied to its own result."""
    if 0 in op.tensors and op.args[0].shape == op.out.shape and op.name not in VIEWS:

        def repeated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            out = func(*args, **kwargs)
            once = out[0] if isinstance(out, tuple | list) else out
            return func(once, *args[1:], **kwargs)

        yield f"{op} applied twice", computed(repeated)
    for place, x in enumerate(op.node.args):
        before = _producer(op, x.value) if isinstance(x, Ref) and x.value in op.entering else None
        if before is not None and before.name not in VIEWS:
            yield from _reapplied(op, place, before)


def _reapplied(op: Operation, place: int, before: Any) -> Changed:
    """What gave an operand that enters the span, applied to it once more."""
    start = before.args[0] if before.args else None
    value = op.node.args[place].value
    tensors = op.tape.values
    if not isinstance(start, Ref) or tensors[start.value].shape != tensors[value].shape:
        return
    rest = [x.value for x in flat(before.args[1:]) if isinstance(x, Ref)]

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more: Any) -> Any:
        others = mapped(before.args[1:], lambda x: more[x.value] if isinstance(x, Ref) else x)
        result = first(before.func(args[place], *others, **before.kwargs))
        return func(*exchanged(args, {place: result}), **kwargs)

    yield f"{described(before)} applied twice", Change(change, more=tuple(rest))


def neighbours(op: Operation) -> Changed:
    """This operation before the one that it follows."""
    if 0 not in op.tensors or op.name in VIEWS:
        return
    before = _producer(op, op.node.args[0].value)
    if before is None or not isinstance(before.args[0], Ref) or before.site is None:
        return
    operands = [x.value for x in flat(before.args) if isinstance(x, Ref)]

    def swapped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more: Any) -> Any:
        inner = func(more[operands[0]], *args[1:], **kwargs)
        inner = inner[0] if isinstance(inner, tuple | list) else inner
        rest = [more[x.value] if isinstance(x, Ref) else x for x in before.args[1:]]
        out = before.func(inner, *rest, **before.kwargs)
        out = out[0] if isinstance(out, tuple | list) else out
        return (out, *func(*args, **kwargs)[1:]) if op.node.several else out

    yield (
        f"{op} before {described(before)}, torch after it: the two in the other order",
        Change(swapped, more=tuple(operands)),
    )


def _producer(op: Operation, value: int) -> Any:
    producer = op.tape.producers[value]
    return op.tape.nodes[producer] if producer >= 0 else None
