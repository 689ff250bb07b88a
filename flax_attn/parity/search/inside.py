"""Changes inside an operation that torch fuses, by its formula in simpler operations.

A port writes out what torch has as one operation: a norm, a GELU, a loss. Torch's formula of it is
recorded as a program of its own, in which one operation is changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..sides.tape import Ref, Tape, flat
from .operation import Changed, Operation
from .replay import Change, Changes, Replay

Found = TypeVar("Found")
MAX_OPERATIONS = 40  # of a formula


def formula(name: str, overload: str) -> Callable[..., Any] | None:
    """The formula of an operation, or None: of a norm as people write it, else torch's."""
    import torch
    from torch._decomp import decomposition_table

    if name in NORMS:
        return NORMS[name]
    packet = getattr(torch.ops.aten, name, None)
    return decomposition_table.get(getattr(packet, overload, None))


def _normed(x: Any, axes: Sequence[int], eps: float) -> Any:
    centred = x - x.mean(axes, keepdim=True)
    return centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt()


def _with_gain_and_bias(x: Any, weight: Any, bias: Any, shape: Sequence[int]) -> tuple[Any, ...]:
    x = x if weight is None else x * weight.reshape(shape)
    return (x if bias is None else x + bias.reshape(shape),)


def _layer_formula(x: Any, size: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    return _with_gain_and_bias(_normed(x, (*range(-len(size), 0),), eps), weight, bias, size)


def _group_formula(
    x: Any, weight: Any, bias: Any, n: int, channels: int, _: int, groups: int, eps: float
) -> Any:
    parts = x.reshape(n, groups, channels // groups, *x.shape[2:])
    normed = _normed(parts, (*range(2, parts.ndim),), eps).reshape(x.shape)
    return _with_gain_and_bias(normed, weight, bias, (channels, *[1] * (x.ndim - 2)))


def _batch_formula(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, train: bool, *rest: Any
) -> Any:
    eps, shape = rest[1], (-1, *[1] * (x.ndim - 2))
    if train:
        return _with_gain_and_bias(_normed(x, (0, *range(2, x.ndim)), eps), weight, bias, shape)
    scale = (var.reshape(shape) + eps).sqrt()
    return _with_gain_and_bias((x - mean.reshape(shape)) / scale, weight, bias, shape)


NORMS: Mapping[str, Callable[..., Any]] = {
    "native_layer_norm": _layer_formula,
    "native_group_norm": _group_formula,
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), _batch_formula),
}


class Inside:
    """The formula of an operation, recorded for its arguments."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]):
        import torch

        self.function, self.tape, self.args = function, Tape(of_package=True), args
        tensors = {str(i): x for i, x in enumerate(flat(args)) if torch.is_tensor(x)}
        with torch.enable_grad(), self.tape.mode(tensors):
            out = function(*args, **kwargs)
        self.entering = [self.tape.number(x) for x in tensors.values()]
        self.several = isinstance(out, tuple | list)
        results = out if self.several else [out]
        self.outs = [Ref(self.tape.number(x)) if torch.is_tensor(x) else x for x in results]

    def fits(self, args: Any) -> bool:
        """Whether the recorded program is that of other arguments too."""
        return _plain(args) == _plain(self.args)

    def evaluate(self, args: Any, changes: Changes) -> Any:
        """The results for some arguments with some changes."""
        import torch

        tensors = [x for x in flat(args) if torch.is_tensor(x)]
        same = all(x is y for x, y in zip(flat(args), flat(self.args), strict=True))
        leaves = {} if same else dict(zip(self.entering, tensors, strict=True))
        replay = Replay(self.tape, changes, leaves, whole=not same)
        made = [replay.value(x.value) if isinstance(x, Ref) else x for x in self.outs]
        return tuple(made) if self.several else made[0]


def _plain(args: Any) -> list[Any]:
    """Shapes of tensors, and all other arguments."""
    import torch

    return [tuple(x.shape) if torch.is_tensor(x) else x for x in flat(args)]


def inside(rows: tuple[Callable[[Operation], Changed], ...], op: Operation) -> Changed:
    """Every change of one operation of torch's formula."""
    function = formula(op.node.name, op.node.overload)
    if function is None:
        return
    whole = Inside(function, op.args, op.kwargs)
    if not 2 <= len(whole.tape.nodes) <= MAX_OPERATIONS:
        return
    for node in whole.tape.nodes:
        inner = Operation(node, whole.tape, {})
        for row in rows:
            for sentence, change in attempted(row, inner):
                yield f"{sentence}, inside {op}", _within(whole, node.number, change)


def _within(whole: Inside, number: int, change: Change) -> Change:
    """The operation by its formula with one change; recorded anew for other sizes."""

    def evaluate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        formula = whole if whole.fits(args) else Inside(whole.function, args, kwargs)
        return formula.evaluate(args, {number: change})

    return Change(evaluate)


def attempted(row: Callable[[Any], Iterator[Found]], of: Any) -> Iterator[Found]:
    """Yields changes until a row fails, since arguments of operations vary in their kinds."""
    try:
        yield from row(of)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError):
        return
