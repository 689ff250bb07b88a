"""`load` and `load_stacked`: load a layer's weights from a checkpoint, by its tensor names.

Source: https://github.com/huggingface/safetensors; the index is the one that transformers'
`save_pretrained` writes next to shards.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from ..errors import CheckpointError
from .buffers import without_buffers
from .checkpoint import Checkpoint, CheckpointLike
from .dtypes import overflows
from .fitting import CASTS, Cast, fit, under
from .float8 import block_shape, dequantized, without_scales
from .known_layers import flax_state
from .mapping import nearest
from .move import Move, Stack
from .rule import Rule

Shardings = Sharding | Mapping[str, Sharding] | None


def load(
    layer: nnx.Module,
    path: CheckpointLike,
    *,
    prefix: str = "",
    rules: Sequence[Rule] = (),
    sharding: Shardings = None,
    cast: Cast = "exact",
    allow_nonfinite: bool = False,
    max_bytes: int | None = None,
    manifest: bool | None = None,
    partial: bool = False,
) -> list[str] | None:
    """Fills a layer with the tensors of a checkpoint: `layer.kernel = weight.T`, ...

    This needs neither torch nor pickle. Every tensor below the prefix is used once, and every Param
    is filled once. The layer changes only after headers, mapping and data were checked. Only the
    layer's own tensors are read, so loading one layer of a large file is cheap. Buffers that
    transformers' models write into files, such as `rotary_emb.inv_freq` and GPT-2's `attn.bias`,
    are not weights and are ignored.

    A checkpoint has names, shapes and dtypes, but no module types: the `weight` of an `nnx.Linear`
    is read as torch's `[out, in]`. If it is `[in, out]`, as in GPT-2's files, add a rule:
    `Rule("c_proj.weight -> o_proj.kernel", "i o -> i o")`.

    A float8 e4m3 `weight` with a `weight_scale_inv` or `weight_scale` is read as their product,
    rounded once to the dtype of its Param, whatever `cast` is. The scale's shape decides: one for
    the tensor, one for each row, or one for each block of 128 x 128, as in DeepSeek-V3's files.
    Scales of activations, `activation_scale` and `input_scale`, are not used, which warns once.

    For a GGUF file, `gguf_config` reads the config and `families.rules(..., source="gguf")` returns
    the names. The package gguf converts its blocks to float32. Types with blocks of equal size,
    such as Q4_0 and IQ4_NL, are distinguished only by the header.

    Shapes: a Linear's `[out, in]` -> kernel `[in, out]`; others as `flax_attn.parity.port`.

    Args:
      layer: its Params and statistics are replaced. It may be abstract, from `nnx.eval_shape`,
        so that no initial values are drawn.
      path: path of a `.safetensors`, `.gguf` or `.npz` file, an index `.json`, or a folder with
        `model.safetensors` or `model.safetensors.index.json`; or numpy arrays by name, as
        `read_torch` returns them.
      prefix: the start of the names of the layer's tensors: "model.layers.3.self_attn", in a
        GGUF file "blk.3".
      rules: the part of the mapping that does not follow from names and types, from names
        without the prefix to Flax's.
      sharding: sharding of the arrays, one for all or by Flax's dotted path; each device gets its
        own slice. None keeps the sharding of the layer's arrays.
      cast: "exact" rejects other dtypes, "widen" accepts those whose values the layer's dtype
        represents, "narrow" also rounds, and rejects overflow.
      allow_nonfinite: whether the tensors may contain NaN and Inf.
      max_bytes: the limit for all of the layer's tensors in memory; None for no limit.
      manifest: True requires the manifest that `save` writes, False ignores it, None checks it
        if it exists.
      partial: whether Params that are not in the file keep their values, such as those of an
        adapter; every tensor of the file must still have a target. Load before wrapping a
        projection in an adapter, or name the new path: `Rule("q_proj -> q_proj.base_module")`.

    Returns:
      With `partial`, the paths of the Params that were kept; else None.

    Raises:
      CheckpointError: if the checkpoint is invalid or does not fit the layer.
      ValueError: for an unknown `cast`, and shardings of unknown paths or that do not divide axes.
      TypeError: if the layer is not an `nnx.Module`.

    Source: https://github.com/huggingface/safetensors and https://github.com/ggml-org/ggml; the
    index is that of transformers.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from flax_attn import weights
    >>> one, other = (nnx.Linear(3, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "one.safetensors"
    ...     weights.save(one, path, prefix="proj")
    ...     weights.load(other, path, prefix="proj")
    >>> bool((one.kernel[...] == other.kernel[...]).all())
    True
    """
    options = LoadOptions(tuple(rules), sharding, cast, max_bytes, partial)
    _check_arguments(layer, options)
    checkpoint = Checkpoint(path, manifest, allow_nonfinite)
    moves, scales = _moves(checkpoint, prefix, layer, options)
    _fill(layer, checkpoint, moves, scales, [prefix], False, options)
    return _unfilled_paths(layer, moves) if partial else None


def load_stacked(
    layers: nnx.Module,
    path: CheckpointLike,
    prefix: str = "model.layers.{}.self_attn",
    *,
    indices: Iterable[int] | None = None,
    rules: Sequence[Rule] = (),
    sharding: Shardings = None,
    cast: Cast = "exact",
    allow_nonfinite: bool = False,
    max_bytes: int | None = None,
    manifest: bool | None = None,
) -> None:
    """Fills layers that were stacked for a scan: `layers.kernel[l] = weight_l.T`, ...

    Shapes: L tensors `[out, in]` -> kernel `[L, in, out]`; every Param has the axis L first, as
    created by `nnx.vmap` over a constructor.

    Args:
      layers: their Params are replaced.
      path, rules, sharding, cast, allow_nonfinite, max_bytes, manifest: as in `load`; `sharding`
        applies to the stacked arrays.
      prefix: the start of the names of a layer's tensors; {} is replaced by its number.
      indices: layer numbers in the checkpoint, one for each of the L layers; None is 0 ... L - 1,
        and then the checkpoint must not contain a layer L.

    Raises:
      CheckpointError: as `load`, and if the tensors of a layer differ from those of the first.
      ValueError: as `load`, for a prefix without {}, Params without a common first axis, and a
        number of indices other than L.
      TypeError: as `load`.

    Source: as `load`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from flax_attn import weights
    >>> make = nnx.vmap(lambda key: nnx.Linear(3, 2, rngs=nnx.Rngs(key)))
    >>> layers = make(jax.random.split(jax.random.key(0), 1))
    >>> one = nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "one.safetensors"
    ...     weights.save(one, path, prefix="layers.0.proj")
    ...     weights.load_stacked(layers, path, "layers.{}.proj")
    >>> bool((layers.kernel[0] == one.kernel[...]).all())
    True
    """
    options = LoadOptions(tuple(rules), sharding, cast, max_bytes)
    _check_arguments(layers, options)
    count = _count(layers)
    numbers = list(range(count) if indices is None else indices)
    if prefix.count("{}") != 1 or len(numbers) != count:
        raise ValueError(
            f"load_stacked fills {count} layers, so it takes {count} indices and a prefix with one "
            f"{{}}; got {len(numbers)} indices and {prefix!r}."
        )
    checkpoint = Checkpoint(path, manifest, allow_nonfinite)
    more = prefix.replace("{}", str(count)) + "."
    if indices is None and any(name.startswith(more) for name in checkpoint.entries):
        why = f"It has a layer {count}, and the stacked layers are {count}, numbered from 0."
        raise CheckpointError(checkpoint.path, None, why, "Say which by indices=range(...).")
    prefixes = [prefix.replace("{}", str(number)) for number in numbers]
    _check_same_layers(checkpoint, prefixes)
    moves, scales = _moves(checkpoint, prefixes[0], _first_layer(layers), options, count)
    _fill(layers, checkpoint, moves, scales, prefixes, True, options)


@dataclass(frozen=True)
class LoadOptions:
    """Options of `load`."""

    rules: tuple[Rule, ...]
    sharding: Shardings
    cast: Cast
    max_bytes: int | None
    partial: bool = False


def _check_arguments(layer: Any, options: LoadOptions) -> None:
    if not isinstance(layer, nnx.Module):
        raise TypeError(f"The layer must be a flax.nnx.Module; got {type(layer).__name__}.")
    odd = [rule for rule in options.rules if not isinstance(rule, Rule)]
    if odd:
        raise TypeError(f"rules holds Rule objects; got {odd[0]!r}.")
    if options.cast not in CASTS:
        raise ValueError(f"cast must be one of {', '.join(CASTS)}; got {options.cast!r}.")
    state = flax_state(layer)
    if isinstance(options.sharding, Mapping):
        for path in options.sharding.keys() - state.keys():
            problem = f"sharding names {path!r}, which the layer does not have"
            raise ValueError(f"{problem}; nearest: {nearest(path, state)}.")
    for path, variable in state.items():
        where = _sharding_of(path, options)
        if where is not None:
            _check_divides(path, tuple(variable.get_value().shape), where)


def _check_divides(path: str, shape: tuple[int, ...], sharding: Sharding) -> None:
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} {list(shape)} cannot be sharded so: {error}.") from None


def _sharding_of(path: str, options: LoadOptions) -> Sharding | None:
    return options.sharding.get(path) if isinstance(options.sharding, Mapping) else options.sharding


def _moves(
    checkpoint: Checkpoint, prefix: str, module: nnx.Module, options: LoadOptions, times: int = 1
) -> tuple[list[Move | Stack], dict[str, str]]:
    """Returns the moves, and the scales of float8 weights; both checked against the headers."""
    path, rules = checkpoint.path, options.rules
    entries = without_buffers(under(path, checkpoint.entries, prefix), prefix, module, rules)
    entries, scales = without_scales(entries, module, rules, times)
    read = _reader(checkpoint, prefix, scales)
    moves = fit(path, entries, module, rules, read, options.cast, options.partial, prefix, scales)
    state, dot, total = flax_state(module), f"{prefix}." if prefix else "", 0
    for move in moves:
        width = _dtype(state, move).itemsize  # of each float8 value when it is read
        for name in move.sources:
            total += times * entries[name].nbytes * (width if name in scales else 1)
            if name in scales:
                block_shape(checkpoint, dot + name, dot + scales[name])
    if options.max_bytes is not None and total > options.max_bytes:
        why = f"The layer's tensors have {total} bytes, more than max_bytes={options.max_bytes}."
        raise CheckpointError(checkpoint.path, None, why)
    return moves, scales


def _dtype(state: Mapping[str, nnx.Variable[Any]], move: Move | Stack) -> np.dtype:
    """Returns the dtype of a move's targets; float32 if they have several."""
    dtypes = {np.dtype(state[target].get_value().dtype) for target in move.targets}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def _unfilled_paths(layer: nnx.Module, moves: Sequence[Move | Stack]) -> list[str]:
    """Returns the paths of Params and statistics that no tensor filled."""
    state = flax_state(layer)
    filled = {id(state[target]) for move in moves for target in move.targets}
    return [
        path
        for path, x in state.items()
        if id(x) not in filled and isinstance(x, nnx.Param | nnx.BatchStat)
    ]


def _reader(
    checkpoint: Checkpoint, prefix: str, scales: Mapping[str, str], dtype: Any = np.float32
) -> Callable[[str], np.ndarray]:
    """Returns a function that reads a tensor by name; a float8 weight with a scale as `dtype`."""
    dot = f"{prefix}." if prefix else ""

    def read(name: str) -> np.ndarray:
        if name not in scales:
            return checkpoint.read(dot + name)
        return dequantized(checkpoint, dot + name, dot + scales[name], np.dtype(dtype))

    return read


def _fill(
    layer: nnx.Module,
    checkpoint: Checkpoint,
    moves: Sequence[Move | Stack],
    scales: Mapping[str, str],
    prefixes: Sequence[str],
    stacked: bool,
    options: LoadOptions,
) -> None:
    """Reads and checks everything, one tensor at a time, and only then changes the layer."""
    state, ready = flax_state(layer), {}
    for move in moves:
        whole: dict[str, np.ndarray] = {}
        for number, prefix in enumerate(prefixes):
            read = _reader(checkpoint, prefix, scales, _dtype(state, move))
            for target, value in move.forward({name: read(name) for name in move.sources}).items():
                want = np.dtype(state[target].get_value().dtype)
                value = cast_to(value, want, checkpoint.path, ", ".join(move.sources))
                if stacked:
                    shape = (len(prefixes), *value.shape)
                    whole.setdefault(target, np.empty(shape, want))[number] = value
                else:
                    whole[target] = value
        for target, value in whole.items():
            where = _sharding_of(target, options)
            ready[target] = array_like(value, state[target].get_value(), where)
    for target, array in ready.items():
        state[target].set_value(array)


def cast_to(value: np.ndarray, want: np.dtype, path: object, names: str) -> np.ndarray:
    """Rounds an array to a dtype; CheckpointError if a finite value overflows."""
    if value.dtype == want:
        return value
    with np.errstate(all="ignore"):
        result = value.astype(want)
    if overflows(value, result):
        why = f"A value of {value.dtype.name} overflows {want.name}."
        raise CheckpointError(path, names, why, "Build the layer with a wider dtype.")
    return result


def array_like(value: np.ndarray, current: Any, sharding: Sharding | None) -> jax.Array:
    """Creates a jax array with the given sharding, else with that of the layer's array."""
    if sharding is None and (
        getattr(current, "committed", False) or not isinstance(current, jax.Array)
    ):
        sharding = getattr(current, "sharding", None)
    with jax.enable_x64(True):  # otherwise float64 values would silently become float32
        if sharding is None:
            return jnp.asarray(value)
        shape = value.shape
        return jax.make_array_from_callback(shape, sharding, lambda index: value[index])


def _count(layers: nnx.Module) -> int:
    """Returns the number of stacked layers, the size of the first axis of every Param."""
    shapes = {path: tuple(x.get_value().shape) for path, x in flax_state(layers).items()}
    counts = {shape[:1] for shape in shapes.values()}
    if len(counts) != 1 or counts == {()} or counts == {(0,)}:
        listing = ", ".join(f"{path} {list(shape)}" for path, shape in list(shapes.items())[:6])
        raise ValueError(f"Stacked layers have one first axis in all their Params; got {listing}.")
    return counts.pop()[0]


def _first_layer(layers: nnx.Module) -> nnx.Module:
    """Returns one of the stacked layers as an abstract module: names, shapes and dtypes."""
    graph, state = nnx.split(layers)

    def one(value: Any) -> Any:
        return jax.ShapeDtypeStruct(value.shape[1:], value.dtype) if value.ndim else value

    return nnx.merge(graph, jax.tree.map(one, state))


def _check_same_layers(checkpoint: Checkpoint, prefixes: Sequence[str]) -> None:
    """Raises CheckpointError unless every layer has the first one's names, shapes and dtypes."""
    path, entries = checkpoint.path, checkpoint.entries
    first = {n: (x.dtype, x.shape) for n, x in under(path, entries, prefixes[0]).items()}
    for prefix in prefixes[1:]:
        here = {n: (x.dtype, x.shape) for n, x in under(path, entries, prefix).items()}
        for name in sorted(first.keys() | here.keys()):
            if first.get(name) != here.get(name):
                kind, want = (one.get(name, "nothing") for one in (here, first))
                why = f"Stacked layers must be alike; it is {kind}, in {prefixes[0]} {want}."
                raise CheckpointError(path, f"{prefix}.{name}", why)
