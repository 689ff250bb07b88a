"""Checkpoints of one or several files; a shard index is checked against every header."""

import os
import re
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, quoted
from .entry import MAX_HEADER_BYTES, Entry, open_regular
from .foreign import refuse_foreign
from .gguf import read_gguf
from .npz import read_npz
from .safetensors import read_header
from .strict_json import check_count, check_name, parse

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_BLOB = re.compile(r"[0-9a-f]{40,64}")


def find(path: Path) -> Path:
    """Returns the path of the file or index; a folder must contain exactly one of them.

    Raises:
      CheckpointError: for a folder with neither or both.
    """
    if not path.is_dir():
        return path
    names = [name for name in (SINGLE, INDEX) if os.path.lexists(path / name)]
    if len(names) == 1:
        return _inside(path, names[0])
    which = "both" if names else "neither"
    why = f"A folder must hold {SINGLE} or {INDEX}; this one holds {which}."
    raise CheckpointError(path, None, why, "Give the path of the one that is meant.")


def read_entries(path: Path) -> dict[str, Entry]:
    """Returns the entries of a file, or of all shards of an index, by tensor name.

    Args:
      path: a file that ends in `.gguf` or `.npz`, an index that ends in `.json`, or else a
        `.safetensors` file.

    Raises:
      CheckpointError: for an index of another structure than published ones, shards outside its
        folder, and shards whose tensors differ from those listed in the index.
    """
    if path.suffix == ".gguf":
        return read_gguf(path).entries
    if path.suffix == ".npz":
        return read_npz(path)
    if path.suffix != ".json":
        return read_header(path)
    listed = _weight_map(path)
    entries: dict[str, Entry] = {}
    for shard in sorted({*listed.values()}):
        header = read_header(_inside(path.parent, shard))
        want = {name for name, where in listed.items() if where == shard}
        for name in sorted(header.keys() ^ want):
            status = "holds" if name in header else "lacks"
            place = f"in {listed[name]}" if name in listed else "nowhere"
            why = f"{shard} {status} it, but the index says that it is {place}."
            raise CheckpointError(path, name, why)
        entries |= header
    return entries


def _weight_map(path: Path) -> dict[str, str]:
    """Returns the shard of each tensor name."""
    with open_regular(path) as file:
        refuse_foreign(path, file)
        raw = file.read(MAX_HEADER_BYTES + 1)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(path, None, f"An index has at most {MAX_HEADER_BYTES} bytes.")
    fields: dict[str, Any] = parse(path, raw.rstrip())
    listed = fields.get("weight_map")
    if not fields.keys() <= {"metadata", "weight_map"} or not isinstance(listed, dict):
        why = "An index holds an object weight_map, beside it metadata, and nothing else."
        raise CheckpointError(path, None, why)
    if not isinstance(fields.get("metadata", {}), dict):
        raise CheckpointError(path, None, "An index's metadata must be an object.")
    check_count(path, len(listed))
    for name, shard in listed.items():
        check_name(path, name)
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            why = f"Its shard is {quoted(shard)}, which is no plain name of a .safetensors file."
            raise CheckpointError(path, name, why)
    return listed


def _inside(folder: Path, name: str) -> Path:
    """Returns the path of a file in a folder, unless it links out of it.

    Links into the blobs of Hugging Face's cache are allowed.
    """
    real, home = Path(os.path.realpath(folder / name)), Path(os.path.realpath(folder))
    blobs = home.parent.parent / "blobs"
    cached = home.parent.name == "snapshots" and real.parent == blobs
    if real.parent == home or (cached and _BLOB.fullmatch(real.name)):
        return folder / name
    why = f"{quoted(name)} is a link that leads out of the folder."
    raise CheckpointError(folder, None, why, "Put the file itself there.")
