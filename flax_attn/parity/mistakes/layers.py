"""Mistakes in norms, reductions, pooling, lookups and linear layers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

from ..sides.changes import Change, Mistakes, Named, Operation, with_arguments
from .elements import EPSILONS

# Names of reductions in descriptions.
WORDS = {
    "_softmax": "a softmax",
    "_log_softmax": "a log-softmax",
    "linalg_vector_norm": "a norm",
    "cumsum": "a running sum",
    "var": "a variance",
    "mean": "a mean",
    "sum": "a sum",
    "amax": "a maximum",
    "argmax": "an argmax",
    "argmin": "an argmin",
}


def _place(op: Operation, name: str) -> int:
    """Position of an operation's argument; -1 if there is none with this name."""
    names = [argument.name for argument in op.func._schema.arguments]
    return names.index(name) if name in names else -1


def _affine(op: Operation, named: Named) -> Mistakes:
    """Another epsilon, or a missing gain or bias."""
    place = _place(op, "eps")
    for eps in (0.0, *EPSILONS):
        if eps != op.args[place]:
            description = f"another epsilon: {eps:g}, not {op.args[place]:g}"
            yield description, with_arguments({place: eps})
    for role, what in (("weight", "gain"), ("bias", "bias")):
        at = _place(op, role)
        if op.args[at] is not None:
            description = f"{named(op.args[at]) or f'the {what}'}, a {what}, missing"
            yield description, with_arguments({at: None})


def _first(compute: Callable[..., Any]) -> Change:
    """Replaces the first result of a norm, keeping the statistics it also returns."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = compute(*args)  # before `func`, since a batch norm updates its statistics
        _, *rest = func(*args, **kwargs)
        return (made, *rest)

    return change


def _scaled(x: Any, gain: Any, bias: Any, channels: bool) -> Any:
    """Applies gain and bias along the channels or the last axis."""
    shape = (1, -1) + (1,) * (x.ndim - 2) if channels else (-1,)
    x = x if gain is None else x * gain.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def _normed(x: Any, over: Sequence[int], eps: float, centred: bool = True) -> Any:
    gap = x - x.mean(over, keepdim=True) if centred else x
    return gap / (gap.square().mean(over, keepdim=True) + eps).sqrt()


def _layer_norm(op: Operation, named: Named) -> Mistakes:
    yield from _affine(op, named)
    yield "no norm at all", _first(lambda x, *_: x.clone())
    gain, bias, eps = op.args[2:5]
    if len(op.args[1]) != 1:
        return
    yield (
        "another norm, the mean not taken off",
        _first(
            lambda x, *_: _scaled(_normed(x, (-1,), eps, centred=False), gain, bias, channels=False)
        ),
    )
    for axis in range(op.args[0].ndim - 1):
        yield (
            f"a norm over another axis, {axis}",
            _first(
                lambda x, *_, axis=axis: _scaled(
                    _normed(x, (axis,), eps), gain, bias, channels=False
                )
            ),
        )


def _group_norm(op: Operation, named: Named) -> Mistakes:
    yield from _affine(op, named)
    rank, channels, groups, eps = op.args[0].ndim, op.args[4], op.args[6], op.args[7]
    for other in (n for n in range(1, channels + 1) if channels % n == 0 and n != groups):
        yield f"another number of groups: {other}, torch {groups}", with_arguments({6: other})
    torch_groups = (
        f"where torch has {groups} group{'s' if groups > 1 else ''} of all channels and places"
    )
    for over, what in (((1,), "channels alone"), ((0, *range(2, rank)), "the batch and places")):
        yield (
            f"a norm over other axes, {what}, {torch_groups}",
            _first(
                lambda x, gain, bias, *_, over=over: _scaled(
                    _normed(x, over, eps), gain, bias, True
                )
            ),
        )


def _batch_norm(op: Operation, named: Named) -> Mistakes:
    yield from _affine(op, named)
    x, eps = op.args[0], op.args[_place(op, "eps")]
    over = (0, *range(2, x.ndim))
    batch, running = "the batch's own statistics", "the running statistics"

    def by_running(x: Any, gain: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Any:
        shape = (1, -1) + (1,) * (x.ndim - 2)
        made = (x - mean.reshape(shape)) / (var.reshape(shape) + eps).sqrt()
        return _scaled(made, gain, bias, True)

    if op.args[3] is not None:
        yield f"a norm by {running}, not by {batch}", _first(by_running)
    yield (
        f"a norm by {batch}, not by {running}",
        _first(lambda x, gain, bias, *_: _scaled(_normed(x, over, eps), gain, bias, True)),
    )


def _weight_norm(op: Operation, named: Named) -> Mistakes:
    """Another set of axes for the norm of a kernel."""
    rank, dim = op.args[0].ndim, op.args[2] if len(op.args) > 2 else 0
    torch_axes = {*range(rank)} - {dim % rank}
    for dims in _sets(rank):
        if {*dims} != torch_axes:
            description = (
                f"the kernel's norm over other axes: {list(dims)}, torch {sorted(torch_axes)}"
            )
            yield (
                description,
                _first(
                    lambda v, g, *_, dims=dims: g * v / v.square().sum(dims, keepdim=True).sqrt()
                ),
            )


def _sets(rank: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(rank), n) for n in range(1, rank + 1))


def _reduction(op: Operation, named: Named) -> Mistakes:
    """A reduction over other axes."""
    place, rank = _place(op, "dim"), op.args[0].ndim
    if not 0 <= place < len(op.args) or op.args[place] is None or op.args[place] == []:
        return
    torch_axis = op.args[place]
    single = isinstance(torch_axis, int)
    axes = {axis % rank for axis in ([torch_axis] if single else torch_axis)}
    for dims in _sets(rank):
        if {*dims} != axes and (len(dims) == 1 or not single):
            other: Any = dims[0] if single else list(dims)
            torch_text = sorted(axes)[0] if single else sorted(axes)
            description = f"{WORDS[op.name]} over another axis: {other}, torch {torch_text}"
            yield description, with_arguments({place: other})


def _embedding(op: Operation, named: Named) -> Mistakes:
    rows = op.args[0].shape[0]
    for by in (-1, 1, -2, 2):
        way = "higher" if by > 0 else "lower"
        yield (
            f"rows shifted: each index {abs(by)} {way} than torch's",
            lambda f, a, k, by=by: f(a[0], (a[1] + by).clamp(0, rows - 1), *a[2:], **k),
        )


def _pool(op: Operation, named: Named) -> Mistakes:
    place = _place(op, "count_include_pad")
    defaults = [argument.default_value for argument in op.func._schema.arguments]
    counts = [*op.args, *defaults[len(op.args) :]][place]
    flax_text, torch_text = ("not counted", "counted") if counts else ("counted", "not counted")

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        full = [*args, *defaults[len(args) :]]
        full[place] = not counts
        return func(*full)

    yield f"padding {flax_text} in the mean at the border, where torch has it {torch_text}", change


def _biased(op: Operation, named: Named) -> Mistakes:
    import torch

    name = named(op.args[0])
    yield f"{name or 'the bias'}, a bias, missing", lambda f, a, k: torch.mm(a[1], a[2])


LAYERS: dict[str, Callable[[Operation, Named], Mistakes]] = {
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm"), _batch_norm),
    "_weight_norm_interface": _weight_norm,
    **dict.fromkeys(WORDS, _reduction),
    "embedding": _embedding,
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _pool),
    "addmm": _biased,
}
