"""Changes of norms, reductions, pooling, lookups and linear layers."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from .elements import EPSILONS
from .masks import softmax_masks
from .operation import Changed, Operation, around, computed, with_arguments
from .replay import Change

# Names of reductions in descriptions.
REDUCTIONS = {
    "_softmax": "a softmax",
    "_safe_softmax": "a softmax",
    "_log_softmax": "a log-softmax",
    "logsumexp": "a log of a sum of exps",
    "amin": "a minimum",
    "max": "a maximum",
    "prod": "a product",
    "std": "a deviation",
    "cumprod": "a running product",
    "linalg_vector_norm": "a norm",
    "cumsum": "a running sum",
    "var": "a variance",
    "mean": "a mean",
    "sum": "a sum",
    "amax": "a maximum",
    "argmax": "an argmax",
    "argmin": "an argmin",
}


INTERPOLATIONS = (
    "nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d",
)  # fmt: skip


def _affine(op: Operation) -> Changed:
    """Another epsilon, or a missing gain or bias."""
    place = op.place("eps")
    for eps in (0.0, *EPSILONS):
        if eps != op.args[place]:
            description = f"another epsilon: {eps:g}, not {op.args[place]:g}"
            yield description, with_arguments({place: eps})
    for role, what in (("weight", "gain"), ("bias", "bias")):
        at = op.place(role)
        if op.args[at] is not None:
            description = f"{op.label(at)}, a {what}, missing"
            yield description, with_arguments({at: None})


def _first(compute: Callable[..., Any]) -> Change:
    """Replaces the first result of a norm, keeping the statistics it also returns."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = compute(*args)  # before `func`, since a batch norm updates its statistics
        _, *rest = func(*args, **kwargs)
        return (made, *rest)

    return computed(change)


@dataclass(frozen=True)
class Norm:
    """A norm's formula: over which axes, around what, divided by what.

    Attributes:
      over: the axes.
      channels: whether gain and bias belong to axis 1, as in torch's group norm.
      centred: whether the mean is subtracted.
      less: what is subtracted from the count in the variance.
      outside: whether epsilon is added to the root, not below it.
      summed: whether squares are summed, not averaged.
      gain: what is added to the gain.
      bias_inside: whether the bias is added before the gain multiplies.
    """

    over: tuple[int, ...]
    channels: bool = False
    centred: bool = True
    less: int = 0
    outside: bool = False
    summed: bool = False
    gain: float = 0.0
    bias_inside: bool = False

    def __call__(self, x: Any, weight: Any, bias: Any, eps: float) -> Any:
        gap = x - x.mean(self.over, keepdim=True) if self.centred else x
        count = math.prod(x.shape[i] for i in self.over)
        total = gap.square().sum(self.over, keepdim=True)
        spread = total if self.summed else total / max(count - self.less, 1)
        x = gap / (spread.sqrt() + eps) if self.outside else gap / (spread + eps).sqrt()
        shape = (1, -1) + (1,) * (x.ndim - 2) if self.channels else (-1,)
        weight = None if weight is None else weight.reshape(shape) + self.gain
        bias = None if bias is None else bias.reshape(shape)
        if self.bias_inside and bias is not None and weight is not None:
            return (x + bias) * weight
        x = x if weight is None else x * weight
        return x if bias is None else x + bias


# Other formulas of a norm, in words.
FORMULAS = {
    "another norm, the mean not taken off": {"centred": False},
    "divided by a deviation over n - 1": {"less": 1},
    "epsilon outside the root": {"outside": True},
    "the sum of squares, not their mean": {"summed": True},
    "a gain of 1 + w, where torch's is w": {"gain": 1.0},
    "a gain of w - 1, where torch's is w": {"gain": -1.0},
    "the bias inside the gain": {"bias_inside": True},
}


def _other(norm: Norm, places: tuple[int, int, int]) -> Change:
    """A norm by another formula, from the places of gain, bias and epsilon."""
    return _first(lambda *args: norm(args[0], *(args[i] for i in places)))


def _formulas(plain: Norm, places: tuple[int, int, int]) -> Changed:
    for text, facts in FORMULAS.items():
        yield text, _other(replace(plain, **facts), places)


def _layer_norm(op: Operation) -> Changed:
    yield from _affine(op)
    yield "no norm at all", _first(lambda x, *_: x.clone())
    rank, count = op.args[0].ndim, len(op.args[1])
    plain = Norm(tuple(range(rank - count, rank)))
    yield from _formulas(plain, (2, 3, 4))
    for axis in range(rank - 1):
        text = f"a norm over another axis, {axis}"
        yield text, _other(replace(plain, over=(axis,)), (2, 3, 4))


def _group_norm(op: Operation) -> Changed:
    yield from _affine(op)
    yield "no norm at all", _first(lambda x, *_: x.clone())
    rank, channels, groups = op.args[0].ndim, op.args[4], op.args[6]
    for other in (n for n in range(1, channels + 1) if channels % n == 0 and n != groups):
        yield f"another number of groups: {other}, torch {groups}", with_arguments({6: other})
    whole = f"where torch has {groups} group{'s' if groups > 1 else ''} of all channels and places"
    for over, what in (((1,), "channels alone"), ((0, *range(2, rank)), "the batch and places")):
        text = f"a norm over other axes, {what}, {whole}"
        yield text, _other(Norm(over, channels=True), (1, 2, 7))
    if groups == 1:
        yield from _formulas(Norm(tuple(range(1, rank)), channels=True), (1, 2, 7))
    yield "groups of every other channel", _first(_every_other)


def _every_other(x: Any, weight: Any, bias: Any, n: int, c: int, _: int, groups: int, eps: Any):
    parts = x.reshape(n, c // groups, groups, -1)
    normed = Norm((1, 3))(parts, None, None, eps).reshape(x.shape)
    shape = (1, -1) + (1,) * (x.ndim - 2)
    normed = normed if weight is None else normed * weight.reshape(shape)
    return normed if bias is None else normed + bias.reshape(shape)


def _batch_norm(op: Operation) -> Changed:
    yield from _affine(op)
    at, rank = op.place("eps"), op.args[0].ndim
    plain = Norm((0, *range(2, rank)), channels=True)
    batch, running = "the batch's own statistics", "the running statistics"

    def by_running(*args: Any) -> Any:
        shape = (1, -1) + (1,) * (rank - 2)
        mean, var = (x.reshape(shape) for x in args[3:5])
        x = (args[0] - mean) / (var + args[at]).sqrt()
        gain, bias = (None if x is None else x.reshape(shape) for x in args[1:3])
        x = x if gain is None else x * gain
        return x if bias is None else x + bias

    if op.args[3] is not None:
        yield f"a norm by {running}, not by {batch}", _first(by_running)
    yield f"a norm by {batch}, not by {running}", _other(plain, (1, 2, at))
    yield "no norm at all", _first(lambda x, *_: x.clone())


def _weight_norm(op: Operation) -> Changed:
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


def _reduction(op: Operation) -> Changed:
    """A reduction over other axes, or another reduction."""
    yield from _other_reductions(op)
    place, rank = op.place("dim"), op.args[0].ndim
    if place < 0 or op.args[place] is None or op.args[place] == []:
        return
    torch_axis = op.args[place]
    single = isinstance(torch_axis, int)
    axes = {axis % rank for axis in ([torch_axis] if single else torch_axis)}
    word = REDUCTIONS.get(op.name, f"a {op.name.strip('_')}")
    for dims in _sets(rank):
        if {*dims} != axes and (len(dims) == 1 or not single):
            other: Any = dims[0] if single else list(dims)
            torch_text = sorted(axes)[0] if single else sorted(axes)
            text = f"{word} over another axis: {other}, torch {torch_text}"
            yield text, with_arguments({place: other})


def _other_reductions(op: Operation) -> Changed:
    """Another reduction over the same axes."""
    import torch

    functions: dict[str, Callable[..., Any]] = {
        "mean": torch.mean, "sum": torch.sum, "amax": torch.amax, "amin": torch.amin,
        "logsumexp": torch.logsumexp, "linalg_vector_norm": lambda x, d, k: (
            torch.linalg.vector_norm(x, dim=d, keepdim=k)),
        "var": lambda x, d, k: torch.var(x, d, keepdim=k, correction=0),
        "std": lambda x, d, k: torch.std(x, d, keepdim=k, correction=0),
        "unbiased variance": lambda x, d, k: torch.var(x, d, keepdim=k),
        "unbiased deviation": lambda x, d, k: torch.std(x, d, keepdim=k),
        "mean of squares": lambda x, d, k: x.square().mean(d, keepdim=k),
        "sum of squares": lambda x, d, k: x.square().sum(d, keepdim=k),
        "product": lambda x, d, k: torch.exp(torch.log(x).sum(d, keepdim=k)),
        "first": lambda x, d, k: _first_of(x, d, k),
    }  # fmt: skip
    reduces = op.name in ("mean", "sum", "amax", "amin", "max", "logsumexp", "linalg_vector_norm",
                          "var", "std", "prod")  # fmt: skip
    if not reduces or not op.out.is_floating_point():
        return
    rank, place = op.args[0].ndim, op.place("dim")
    dims = op.args[place] if place >= 0 and op.args[place] not in (None, []) else list(range(rank))
    dims = [dims] if isinstance(dims, int) else list(dims)
    keep = op.out.ndim == rank
    here = REDUCTIONS.get(op.name, f"a {op.name}")
    for name, function in functions.items():
        if name != op.name:
            word = REDUCTIONS.get(name, f"a {name}")
            text = f"{word} in the place of {here}"
            yield text, _first_if_several(op, lambda x, f=function: f(x, dims, keep))


def _first_of(x: Any, dims: Any, keep: bool) -> Any:
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.narrow(dim, 0, 1) if keep else x.select(dim, 0)
    return x


def _first_if_several(op: Operation, function: Callable[[Any], Any]) -> Change:
    return computed(
        lambda f, a, k: (function(a[0]), *f(*a, **k)[1:]) if op.node.several else function(a[0])
    )


def _softmax(op: Operation) -> Changed:
    """Another function in the place of a softmax, or a softmax over another axis."""
    import torch

    place = op.place("dim")
    others = {
        "a sigmoid": lambda x, d: torch.sigmoid(x),
        "a log-softmax": torch.log_softmax,
        "a softmax": torch.softmax,
        "exp": lambda x, d: torch.exp(x),
        "a ReLU, divided by its sum,": lambda x, d: torch.relu(x) / torch.relu(x).sum(d, True),
        "a softmax plus one": lambda x, d: torch.exp(x) / (1 + torch.exp(x).sum(d, keepdim=True)),
        "a softmax of the negative": lambda x, d: torch.softmax(-x, d),
        "a softmax without its sum": lambda x, d: torch.exp(x - x.amax(d, keepdim=True)),
        "a softmax over all axes but the first": lambda x, d: torch.softmax(
            x.flatten(1), 1
        ).reshape(x.shape),
    }
    here = REDUCTIONS[op.name]
    for text, function in others.items():
        if text != here:
            yield (
                f"{text} in the place of {here}",
                computed(lambda f, a, k, function=function: function(a[0], a[place])),
            )
    yield f"{here} left out", computed(lambda f, a, k: a[0].clone())
    yield "a softmax in base 2", around(lambda x: x * math.log(2), 0)
    torch_axis = op.args[place] % op.out.ndim
    for axis in (i for i in range(op.out.ndim) if i != torch_axis):
        text = f"{here} over another axis: {axis}, torch {torch_axis}"
        yield text, computed(lambda f, a, k, i=axis: f(a[0].clamp(min=-1e30), i, *a[2:], **k))
    yield from _reduction(op)
    yield from softmax_masks(op)


def temperatures(op: Operation) -> Changed:
    """A softmax at another temperature."""
    for factor in (1.1, 0.9, 2.0, 0.5) if op.name in ("_softmax", "_safe_softmax") else ():
        yield f"a softmax at temperature {factor:g}", around(lambda x, c=factor: x / c, 0)


def _embedding(op: Operation) -> Changed:
    rows, table = op.args[0].shape[0], op.label(0)
    for by in (-1, 1, -2, 2):
        way = "higher" if by > 0 else "lower"
        yield (
            f"rows shifted: each index {abs(by)} {way} than torch's",
            computed(lambda f, a, k, by=by: f(a[0], (a[1] + by).clamp(0, rows - 1), *a[2:], **k)),
        )
        text = f"the rows of {table} shifted by {by}"
        yield text, computed(lambda f, a, k, by=by: f(a[0].roll(by, 0), *a[1:], **k))
    text = f"row 0 of {table} set to zero, as padding"
    yield text, computed(lambda f, a, k: f(a[0], *a[1:], **k).masked_fill(a[1][..., None] == 0, 0))


def _pool(op: Operation) -> Changed:
    place = [*op.node.schema].index("count_include_pad")
    defaults = [*op.node.schema.values()]
    counts = [*op.args, *defaults[len(op.args) :]][place]
    flax_text, torch_text = ("not counted", "counted") if counts else ("counted", "not counted")

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        full = [*args, *defaults[len(args) :]]
        full[place] = not counts
        return func(*full)

    yield (
        f"padding {flax_text} in the mean at the border, where torch has it {torch_text}",
        computed(change),
    )


def _mean_over_places(op: Operation) -> Changed:
    """An adaptive pool to one place as a mean over one of the axes."""
    if [*op.args[1]] == [1] * len(op.args[1]):
        for axis in range(2, op.args[0].ndim):
            text = f"a mean over another axis: {axis} alone, where torch takes all places"
            yield text, computed(lambda f, a, k, axis=axis: a[0].mean(axis, keepdim=True))


def _resized(op: Operation) -> Changed:
    """Another interpolation, or another cubic kernel."""
    import torch

    x, size = op.args[0], tuple(op.out.shape[2:])
    ways = {"linear": 3, "bilinear": 4, "bicubic": 4, "trilinear": 5}
    modes = ["nearest", "nearest-exact", "area", *(m for m, n in ways.items() if n == x.ndim)]
    for mode in modes:
        for corners in (False, True) if mode in ways else (None,):
            text = f"interpolated by {mode}" + ", by the corners" * bool(corners)
            yield (
                f"{text}, torch by {op.name}",
                computed(
                    lambda f, a, k, mode=mode, corners=corners: torch.nn.functional.interpolate(
                        a[0], size=size, mode=mode, align_corners=corners
                    )
                ),
            )
    for sharpness in (-0.5, -0.75):
        for edge, word in ((True, "weights that sum to 1"), (False, "the border repeated")):
            text = f"a cubic kernel of {sharpness:g}, with {word}, another than torch's {op.name}"
            yield text, computed(lambda f, a, k, s=sharpness, e=edge: _cubic(a[0], size, s, e))


def _cubic(x: Any, size: tuple[int, ...], sharpness: float, normalised: bool) -> Any:
    """Cubic interpolation by Keys' kernel, axis by axis."""
    import torch

    for axis, count in enumerate(size, 2):
        length = x.shape[axis]
        at = (torch.arange(count) + 0.5) * length / count - 0.5
        start = at.floor() - 1
        weights = torch.zeros(count, length)
        for step in range(4):
            d, place = (at - start - step).abs(), (start + step).long()
            near = (sharpness + 2) * d**3 - (sharpness + 3) * d**2 + 1
            far = sharpness * (d**3 - 5 * d**2 + 8 * d - 4)
            weight = torch.where(d <= 1, near, far)
            inside = (place >= 0) & (place < length)
            weight = weight * inside if normalised else weight
            weights.scatter_add_(1, place.clamp(0, length - 1)[:, None], weight[:, None])
        weights = weights / weights.sum(1, keepdim=True)
        x = (x.movedim(axis, -1) @ weights.T).movedim(-1, axis)
    return x


def _biased(op: Operation) -> Changed:
    """A linear layer without its bias, with its other sign, or with a turned kernel."""
    import torch

    label = op.label(0)
    yield f"{label}, a bias, missing", computed(lambda f, a, k: torch.mm(a[1], a[2]))
    yield (
        f"{label}, a bias, taken away, where torch adds it",
        computed(lambda f, a, k: torch.mm(a[1], a[2]) - a[0]),
    )
    yield (
        "a bias alone: the product left out",
        computed(lambda f, a, k: a[0].expand_as(f(*a, **k)).clone()),
    )
    yield (
        f"{label}, a bias, multiplied, where torch adds it",
        computed(lambda f, a, k: torch.mm(a[1], a[2]) * a[0]),
    )


LAYERS: dict[str, Callable[[Operation], Changed]] = {
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(("_softmax", "_safe_softmax", "_log_softmax"), _softmax),
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit"), _batch_norm
    ),
    "_weight_norm_interface": _weight_norm,
    "embedding": _embedding,
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), _pool),
    "addmm": _biased,
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _mean_over_places),
    **dict.fromkeys((f"upsample_{way}" for way in INTERPOLATIONS), _resized),
}
