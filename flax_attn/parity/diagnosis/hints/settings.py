"""Compares the settings that layers of both sides share: epsilon, stride, padding, rate.

A difference becomes the hint if Flax's own layer, called with torch's settings, gives torch's
value; otherwise only if no other hint applies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from ....weights.known_layers import get_path
from ... import judge
from ...report import Row
from ...sides.original import Part
from ..places import Local

EPSILONS = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "norm_eps")
NORMS = (nnx.LayerNorm, nnx.RMSNorm, nnx.GroupNorm, nnx.InstanceNorm, nnx.BatchNorm)
# Flax layers for torch norms over other axes.
OVER = {"GroupNorm": nnx.GroupNorm, "InstanceNorm": nnx.InstanceNorm, "BatchNorm": nnx.BatchNorm}


class Setting(NamedTuple):
    """A setting that differs: its description, and a function that applies torch's value."""

    description: str
    mend: Callable[[Any], None]


def explained_settings(local: Local, row: Row) -> str:
    """The differing settings, if torch's settings make Flax's layer give torch's value; or ""."""
    layer, part, sizes = _both(local, row.name)
    differ = list(_settings(layer, part, sizes)) if part else []
    torch_name, want = local.torch_names.get(row.name, ""), local.force.get(row.name)
    call = local.truth.calls.get(torch_name)
    inputs = local.run.inputs.get(row.name, ())
    if not differ or call is None or want is None or len(inputs) != 1:
        return ""
    combinations = [*([one] for one in differ), differ] if len(differ) > 1 else [differ]
    for settings in combinations:
        made = _with_settings(local, row.name, settings, inputs[0])
        if made.shape == want.value.shape and judge.same_function(made, want.value).ok:
            return _listed(settings)
    return ""


def other_settings(local: Local, row: Row) -> str:
    """The differing settings, without a check that they explain the difference; or ""."""
    layer, part, sizes = _both(local, row.name)
    return _listed(_settings(layer, part, sizes)) if part else ""


def state_settings(local: Local, path: str) -> str:
    """The differing settings that affect a running statistic; or ""."""
    owner = path.rpartition(".")[0]
    layer, part = _layer(local, owner), _part(local, owner)
    return _listed(_momentum(layer, part)) if part and isinstance(layer, nnx.BatchNorm) else ""


def padding_row(local: Local, path: str, got: np.ndarray, want: np.ndarray) -> str:
    """Hint that only one side trains a row of a table, such as torch's padding row; or ""."""
    part = _part(local, path.rpartition(".")[0])
    if got.shape != want.shape or got.ndim != 2:
        return ""
    rows = np.flatnonzero((np.abs(got - want) > judge.SAME_FUNCTION * np.abs(want).max()).any(1))
    if len(rows) != 1 or bool(got[rows].any()) == bool(want[rows].any()):
        return ""
    idx = part.settings.get("padding_idx") if part else None
    why = ", torch's padding_idx," if idx == rows[0] else ""
    flax_value, torch_value = ("is", "is not") if got[rows].any() else ("is not", "is")
    return f"row {rows[0]}{why} {flax_value} trained in Flax, and {torch_value} in torch: padding"


def _listed(settings: Any) -> str:
    return "; ".join(setting.description for setting in settings)


def _both(local: Local, tap: str) -> tuple[Any, Part | None, Sequence[int]]:
    """Flax's layer at a tap, torch's counterpart, and the spatial sizes of its input."""
    path = tap.partition("#")[0]
    inputs = local.run.inputs.get(tap, ())
    torch_name = local.torch_names.get(tap, "").partition("#")[0]
    sizes = inputs[0].shape[1:-1] if inputs else ()
    return _layer(local, path), local.pair.original.modules.get(torch_name), sizes


def _layer(local: Local, path: str) -> Any:
    try:
        return get_path(local.pair.flax_module, path)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        return None


def _part(local: Local, path: str) -> Part | None:
    """Torch's module that corresponds to a Flax path."""
    names = local.pair.names
    modules = local.pair.original.modules.items()
    return next((part for name, part in modules if name and names.tap(name) == path), None)


def _with_settings(
    local: Local, tap: str, settings: Sequence[Setting], x: np.ndarray
) -> np.ndarray:
    """The output of Flax's layer with torch's weights and settings."""

    def mend(layer: Any) -> None:
        for setting in settings:
            setting.mend(layer)

    return local.pair.layer_alone(tap.partition("#")[0], x, mend)


def _settings(layer: Any, part: Part, sizes: Sequence[int]) -> Iterator[Setting]:
    """Yields every setting that differs."""
    if isinstance(layer, nnx.Conv):
        yield from _numbers(layer, part, ("strides", "stride"), ("kernel_dilation", "dilation"))
        yield from _numbers(layer, part, ("feature_group_count", "groups"))
        yield from _padding(layer, part, sizes)
    elif isinstance(layer, nnx.ConvTranspose):
        yield from _numbers(layer, part, ("strides", "stride"), ("kernel_dilation", "dilation"))
        yield from _transposed(layer, part)
    elif isinstance(layer, nnx.BatchNorm):
        yield from _epsilon(layer, part)
        yield from _momentum(layer, part)
    elif isinstance(layer, NORMS):
        yield from _epsilon(layer, part)
        yield from _groups(layer, part)
    elif isinstance(layer, nnx.Dropout):
        yield from _number("dropout rate", layer, "rate", part.settings.get("p"))
    elif isinstance(layer, nnx.MultiHeadAttention):
        yield from _number("number of heads", layer, "num_heads", part.settings.get("num_heads"))


def _number(what: str, layer: Any, name: str, torch_value: Any) -> Iterator[Setting]:
    flax_value = getattr(layer, name, None)
    if (
        isinstance(torch_value, int | float)
        and isinstance(flax_value, int | float)
        and flax_value != torch_value
    ):
        yield Setting(
            f"another {what}: {flax_value:g}, torch {torch_value:g}", _put(name, torch_value)
        )


def _put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


def _epsilon(layer: Any, part: Part) -> Iterator[Setting]:
    torch_value = next((part.settings[k] for k in EPSILONS if k in part.settings), None)
    flax_value = layer.epsilon
    if isinstance(torch_value, float) and flax_value != torch_value:
        description = f"another epsilon: {flax_value:g}, not {torch_value:g}"
        yield Setting(description, _put("epsilon", torch_value))


def _momentum(layer: nnx.BatchNorm, part: Part) -> Iterator[Setting]:
    momentum = part.settings.get("momentum")
    if isinstance(momentum, float) and abs(layer.momentum - (1 - momentum)) > judge.SAME_FUNCTION:
        description = (
            f"another momentum: nnx keeps {layer.momentum:g} of the old statistics, and torch's "
        )
        description += f"{momentum:g} is the share of the new, which nnx calls {1 - momentum:g}"
        yield Setting(description, _put("momentum", 1 - momentum))


def _groups(layer: Any, part: Part) -> Iterator[Setting]:
    kind = part.kind.rpartition(".")[2]
    bases = [kind, *(base.rpartition(".")[2] for base in part.bases)]
    torch_type = next((name for name in bases if name.rstrip("123d") in OVER), "").rstrip("123d")
    groups = part.settings.get("num_groups")
    if torch_type and not isinstance(layer, OVER[torch_type]):
        description = f"{type(layer).__name__}, where torch has {torch_type}"
        description += f" with {groups} group{'s' if groups != 1 else ''}" if groups else ""
        yield Setting(f"{description}: a norm over other axes", lambda layer: None)
    elif isinstance(layer, nnx.GroupNorm):
        if isinstance(groups, int) and groups != layer.num_groups:
            description = f"another number of groups: {layer.num_groups}, torch {groups}"
            yield Setting(description, lambda layer: _regrouped(layer, groups))


def _regrouped(layer: nnx.GroupNorm, groups: int) -> None:
    layer.num_groups, layer.group_size = groups, layer.num_groups * layer.group_size // groups


def _for_each_axis(value: Any, rank: int) -> tuple[int, ...]:
    """Expands one value for all axes (or None, meaning 1) to one per axis."""
    value = 1 if value is None else value
    return (value,) * rank if isinstance(value, int) else tuple(value)


def _shown(numbers: Sequence[Any]) -> str:
    return str(numbers[0]) if len({*numbers}) == 1 else str(tuple(numbers))


def _numbers(layer: Any, part: Part, *names: tuple[str, str]) -> Iterator[Setting]:
    rank = len(layer.kernel_size)
    for name, torch_key in names:
        flax_value, torch_value = getattr(layer, name), part.settings.get(torch_key)
        if torch_value is None:
            continue
        if _for_each_axis(flax_value, rank) != _for_each_axis(torch_value, rank):
            one, two = (
                _shown(_for_each_axis(flax_value, rank)),
                _shown(_for_each_axis(torch_value, rank)),
            )
            yield Setting(f"another {torch_key}: {one}, torch {two}", _put(name, torch_value))


def _padding(layer: nnx.Conv, part: Part, sizes: Sequence[int]) -> Iterator[Setting]:
    """Compares explicit padding, since SAME depends on strides and even kernels."""
    rank, torch_padding = len(layer.kernel_size), part.settings.get("padding")
    if torch_padding is None or len(sizes) != rank:
        return
    flax_value = _pads(layer.padding, layer, sizes)
    torch_value = _pads(
        torch_padding.upper() if isinstance(torch_padding, str) else torch_padding, layer, sizes
    )
    mode = part.settings.get("padding_mode", "zeros")
    if mode != "zeros" and layer.padding not in ("CIRCULAR", "REFLECT"):
        yield Setting(f"padding by zeros, torch's mode is {mode!r}", lambda layer: None)
    if flax_value and torch_value and flax_value != torch_value:
        name = f"{layer.padding}, here " if isinstance(layer.padding, str) else ""
        description = f"another padding: {name}{_shown(flax_value)}, torch {_shown(torch_value)}"
        yield Setting(description, _put("padding", torch_value))


def _pads(padding: Any, layer: nnx.Conv, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Padding before and after each axis; empty if unknown."""
    rank = len(sizes)
    if not isinstance(padding, str):
        each = [padding] * rank if isinstance(padding, int) else list(padding)
        return [(x, x) if isinstance(x, int) else tuple(x) for x in each]
    if padding not in ("SAME", "VALID", "CAUSAL"):
        return []
    strides, dilation = (_for_each_axis(x, rank) for x in (layer.strides, layer.kernel_dilation))
    reach = [d * (k - 1) for d, k in zip(dilation, layer.kernel_size, strict=True)]
    if padding != "SAME":
        return [(0, 0) if padding == "VALID" else (r, 0) for r in reach]
    axes = zip(sizes, strides, reach, strict=True)
    rest = [max((-(-n // s) - 1) * s + r + 1 - n, 0) for n, s, r in axes]
    return [(r // 2, r - r // 2) for r in rest]


def _transposed(layer: nnx.ConvTranspose, part: Part) -> Iterator[Setting]:
    """Compares padding: torch crops the output of a transposed convolution, nnx pads its input."""
    rank = len(layer.kernel_size)
    if not layer.transpose_kernel:
        description = "the kernel mirrored: transpose_kernel=False, where torch needs True"
        yield Setting(description, _mirrored)
    cut, more = part.settings.get("padding"), part.settings.get("output_padding")
    if cut is None or more is None or isinstance(cut, str):
        return
    dilation, flax_value = _for_each_axis(layer.kernel_dilation, rank), layer.padding
    axes = zip(
        layer.kernel_size,
        dilation,
        _for_each_axis(cut, rank),
        _for_each_axis(more, rank),
        strict=True,
    )
    torch_value = [(d * (k - 1) - p, d * (k - 1) - p + o) for k, d, p, o in axes]
    if not isinstance(flax_value, str):
        flax_value = [
            _for_each_axis(x, 2)
            for x in ([flax_value] * rank if isinstance(flax_value, int) else flax_value)
        ]
    if flax_value != torch_value:
        shown = flax_value if isinstance(flax_value, str) else _shown(flax_value)
        torch_padding = _shown(_for_each_axis(cut, rank))
        description = f"another padding: {shown}, torch's {torch_padding} is {_shown(torch_value)}"
        yield Setting(description, _put("padding", torch_value))


def _mirrored(layer: nnx.ConvTranspose) -> None:
    """Flips the layer's kernel along its spatial axes."""
    kernel = layer.kernel[...]
    layer.kernel.set_value(jnp.flip(kernel, range(kernel.ndim - 2)))
