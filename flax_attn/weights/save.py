"""`save`: saves a layer's weights as safetensors under the names of its torch module."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from .._internal.replacing import replacing
from ..errors import CheckpointError
from .dtypes import NAMES
from .einops_layout import backwards, sizes_of
from .entry import Entry
from .fitting import fit
from .known_layers import flax_state, get_path, roles_of
from .manifest import manifest_path, write_manifest
from .move import Move
from .rule import Rule
from .safetensors import write_file
from .shards import INDEX
from .strict_json import check_name


def save(
    layer: nnx.Module,
    path: str | os.PathLike[str],
    *,
    prefix: str = "",
    rules: Sequence[Rule] = (),
    max_shard_bytes: int | None = None,
    manifest: bool = False,
) -> None:
    """Writes a layer's Params and statistics so that `load` with the same arguments reads them.

    Each file is written under a temporary name, and renamed when it is complete. A Param under
    two paths is written once.

    Shapes: a Linear's kernel `[in, out]` -> `[out, in]`, as in torch; others likewise.

    Args:
      layer: not modified; this process must be able to read all of its arrays.
      path: path of the file; with `max_shard_bytes`, of a folder, created if missing, for
        `model-00001-of-0000N.safetensors`, ... and `model.safetensors.index.json`.
      prefix: the start of every name, such as "model.layers.3.self_attn".
      rules: the rules passed to `load`, from torch's names to Flax's; skips and ties have no effect
        here, and are not needed to load the file.
      max_shard_bytes: the limit for the tensors of a shard, unless it has only one.
      manifest: whether to write a manifest with the SHA-256 of every tensor next to the file or
        index; `load` checks it.

    Raises:
      ValueError: if `load` could not read the file with these rules, for a dtype that safetensors
        does not support, a rule that shifts, a folder with other `.safetensors` files, and a
        max_shard_bytes below 1.
      TypeError: if the layer is not an `nnx.Module`.

    Source: https://github.com/huggingface/safetensors; the index is that of transformers.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layer = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    ...     save(layer, folder, max_shard_bytes=16, manifest=True)
    ...     print(*sorted(os.listdir(folder)), sep="\\n")
    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json
    model.safetensors.index.json.sha256.json
    """
    if not isinstance(layer, nnx.Module):
        raise TypeError(f"The layer must be a flax.nnx.Module; got {type(layer).__name__}.")
    shifted = [rule for rule in rules if rule.shift]
    if shifted:
        raise ValueError(f"Values are saved without a shift: leave {shifted[0]} out.")
    dot, where = f"{prefix}." if prefix else "", Path(path)
    values = {dot + name: value for name, value in _torch_values(layer, where, rules).items()}
    for name in values:
        check_name(where, name)
    if max_shard_bytes is None:
        write_file(where, values)
    else:
        where = _write_shards(where, values, max_shard_bytes)
    if manifest:
        write_manifest(where, values)
    else:
        manifest_path(where).unlink(missing_ok=True)  # a replaced file's manifest is outdated


def _torch_values(layer: nnx.Module, where: Path, rules: Sequence[Rule]) -> dict[str, np.ndarray]:
    """Returns torch's arrays by name; checks that loading them gives bitwise equal values."""
    state, names = {}, set()
    for path, variable in flax_state(layer).items():
        if id(variable) not in names and isinstance(variable, nnx.Param | nnx.BatchStat):
            state[path] = np.asarray(variable.get_value())
            names.add(id(variable))
    odd = [f"{path} is {x.dtype}" for path, x in state.items() if x.dtype not in NAMES]
    if odd:
        raise ValueError(f"Safetensors has no such dtype: {', '.join(odd)}.")
    moving = [rule for rule in rules if rule.kind == "move"]
    moves = moves_back(layer, state, moving)
    arrays = {name: value for move in moves for name, value in move.back(state).items()}
    entries = {
        name: Entry(where, NAMES[value.dtype], value.shape, 0, value.nbytes)
        for name, value in arrays.items()
    }
    try:
        back = fit(where, entries, layer, moving, arrays.__getitem__, "exact")
    except CheckpointError as error:
        raise ValueError(f"The layer could not be loaded back with these rules. {error}") from None
    reloaded = {k: v for move in back for k, v in move.forward(arrays).items()}
    if reloaded.keys() != state.keys() or any(
        reloaded[path].tobytes() != value.tobytes() for path, value in state.items()
    ):
        raise ValueError("With these rules two Params would trade places, or have one name.")
    return arrays


def moves_back(layer: nnx.Module, state: Mapping[str, Any], rules: Sequence[Rule]) -> list[Move]:
    """Returns the move of every Param: by the rules' layouts, then their names, then its type."""
    moves, left = [], list(state)
    for rule in rules:
        if rule.layout is None:
            continue
        source, target = rule.sides
        layout = backwards(rule.layout)
        back = Rule(f"{target} -> {source}", layout, **dict(rule.sizes))
        for paths, names in back.groups(left):
            if not {*paths} <= {*left}:
                continue  # `fit` reports it
            shapes = [state[path].shape for path in paths]
            sizes = sizes_of(layout, shapes, len(names), dict(rule.sizes))
            moves.append(Move(names, paths, rule.layout, sizes))
            left = [path for path in left if path not in paths]
    renames = [rule for rule in rules if rule.layout is None]
    return moves + [_by_type(layer, path, renames) for path in left]


def _by_type(layer: nnx.Module, path: str, renames: Sequence[Rule]) -> Move:
    """Returns the move of a Param by its layer's type, under the torch name that rules give."""
    owner, _, leaf = path.rpartition(".")
    kind_roles = roles_of(get_path(layer, owner))[1]
    dot = f"{owner}." if owner else ""
    for rule in renames:
        (source, target) = rule.sides
        if target.count(".") == path.count("."):
            for _, (name,) in Rule(f"{target} -> {source}").groups([path]):
                return Move((name,), (path,))
    for role, known in kind_roles.items():
        if known.targets == (leaf,):
            return Move((_renamed(dot + role, renames),), (path,), known.layout, {**known.sizes})
    return Move((_renamed(path, renames),), (path,))


def _renamed(name: str, renames: Sequence[Rule]) -> str:
    """Returns the torch name that a rule maps to this name; the name itself if there is none."""
    for rule in renames:
        source, target = rule.sides
        for _, (other,) in Rule(f"{target} -> {source}").groups([name]):
            return other
    return name


def _write_shards(folder: Path, values: dict[str, np.ndarray], most: int) -> Path:
    """Writes shards and finally their index; returns the path of the index."""
    if most < 1:
        raise ValueError(f"max_shard_bytes must be 1 or more; got {most}.")
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(x.name for x in folder.iterdir() if ".safetensors" in x.name)
    if others:
        raise ValueError(f"{folder} holds a checkpoint, {others[0]}: give an empty folder.")
    shards: list[dict[str, np.ndarray]] = []
    size = 0
    for name, value in values.items():
        size += value.nbytes
        if not shards or size > most:
            shards.append({})
            size = value.nbytes
        shards[-1][name] = value
    listed = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard)
        listed |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    with replacing(folder / INDEX) as file:
        file.write(json.dumps(index, indent=1, ensure_ascii=False).encode())
    return folder / INDEX
