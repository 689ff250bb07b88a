"""Changes of convolutions: stride, padding, dilation, kernel, bias."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

from .operation import Changed, Operation, computed, exchanged, with_arguments
from .replay import Change

# Argument positions of torch's operation.
BIAS, STRIDE, PADDING, DILATION, TRANSPOSED, OUTPUT_PADDING = range(2, 8)


def _convolution(op: Operation) -> Changed:
    weight = op.args[1]
    kernel = op.label(1)
    if op.args[BIAS] is not None:
        description = f"{op.label(BIAS)}, a bias, missing"
        yield description, with_arguments({BIAS: None})
    if max(weight.shape[2:], default=1) > 1:
        description = f"{kernel} mirrored: its places in reversed order"
        yield description, _kernel(lambda w: w.flip(*range(2, w.ndim)))
    if weight.ndim == 4 and weight.shape[2] == weight.shape[3] > 1:
        yield f"{kernel} transposed, rows for columns", _kernel(lambda w: w.transpose(2, 3))
    if weight.shape[0] == weight.shape[1] > 1:
        yield f"{kernel} untransposed, inputs for outputs", _kernel(lambda w: w.transpose(0, 1))
    yield from _other_numbers(op)
    yield from _shifted(op)


def _kernel(change: Callable[[Any], Any]) -> Change:
    return computed(lambda f, a, k: f(a[0], change(a[1]), *a[2:], **k))


def _number_text(what: str, flax: Sequence[int], torch: Sequence[int]) -> str:
    one, two = (x[0] if len({*x}) == 1 else tuple(x) for x in (flax, torch))
    return f"another {what}: {one}, torch {two}"


def _other_numbers(op: Operation) -> Changed:
    """Another dilation or stride; for a dilation also with the padding that preserves the shape."""
    args, sizes = op.args, op.args[1].shape[2:]
    for place, what in ((DILATION, "dilation"), (STRIDE, "stride")):
        for number in (1, 2, 3):
            new = [number] * len(sizes)
            if new == list(args[place]):
                continue
            description = _number_text(what, new, args[place])
            yield description, with_arguments({place: new})
            more = [(n - d) * (k - 1) for n, d, k in zip(new, args[place], sizes, strict=True)]
            pad = [p + m // 2 for p, m in zip(args[PADDING], more, strict=True)]
            if place == DILATION and min(pad) >= 0 and not args[TRANSPOSED]:
                yield description, with_arguments({DILATION: new, PADDING: pad})


def _fronts(op: Operation) -> Mapping[tuple[int, ...], str]:
    """Candidate paddings before each axis, with their names."""
    args, choices = op.args, []
    axes = zip(
        op.args[0].shape[2:], args[1].shape[2:], args[STRIDE], args[DILATION], args[PADDING],
        strict=True,
    )  # fmt: skip
    for size, places, stride, dilation, pad in axes:
        reach = dilation * (places - 1)
        rest = max((-(-size // stride) - 1) * stride + reach + 1 - size, 0)
        choices.append({"SAME": rest // 2, "CAUSAL": reach, "VALID": 0, "": pad})
    kinds: dict[tuple[int, ...], str] = {}
    for name in ("SAME", "CAUSAL", "VALID"):
        kinds.setdefault(tuple(choice[name] for choice in choices), f"{name} padding: ")
    for by in (-1, 1, -2, 2):
        kinds.setdefault(tuple(pad + by for pad in args[PADDING]), "")
    for mixed in product(*({choice["SAME"], choice[""]} for choice in choices)):
        kinds.setdefault(mixed, "SAME padding: ")
    return kinds


def _shifted(op: Operation) -> Changed:
    """More padding before and less after, or the reverse."""
    for front, name in _fronts(op).items():
        if list(front) != list(op.args[PADDING]) and min(front) >= 0:
            description = _number_text("padding in front", front, op.args[PADDING])
            yield f"{name}shifted, {description}", _moved(front)


def _moved(front: Sequence[int]) -> Change:
    """A convolution with other padding before each axis and the same output shape."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.nn.functional import pad

        sizes = func(*args, **kwargs).shape[2:]
        none = [0] * len(front)
        if args[TRANSPOSED]:
            whole = func(*exchanged(args, {PADDING: none, OUTPUT_PADDING: none}), **kwargs)
            ends = [-x for x in front], [lo + n for lo, n in zip(front, sizes, strict=True)]
            made = pad(whole, _ends(*ends, whole.shape[2:]))
        else:
            axes = zip(sizes, args[1].shape[2:], args[STRIDE], args[DILATION], strict=True)
            need = [(n - 1) * s + d * (k - 1) + 1 for n, k, s, d in axes]
            needed = [n - lo for lo, n in zip(front, need, strict=True)]
            x = pad(args[0], _ends(front, needed, args[0].shape[2:]))
            made = func(*exchanged(args, {0: x, PADDING: none}), **kwargs)
        return made[(slice(None), slice(None), *(slice(n) for n in sizes))]

    return computed(change)


def _ends(front: Sequence[int], need: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Arguments of torch's `pad`, last axis first: before each axis, and up to a size after."""
    both = [(lo, n - size) for lo, n, size in zip(front, need, sizes, strict=True)]
    return [x for ends in reversed(both) for x in ends]


CONVOLUTIONS: dict[str, Callable[[Operation], Changed]] = {"convolution": _convolution}
