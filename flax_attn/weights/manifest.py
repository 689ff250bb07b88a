"""A manifest next to a checkpoint: dtype, shape and SHA-256 of each tensor, to find bit flips."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .._internal.replacing import replacing
from ..errors import CheckpointError
from .dtypes import NAMES
from .entry import MAX_HEADER_BYTES, Entry, open_regular
from .foreign import refuse_foreign
from .strict_json import parse

_LINE = re.compile(r"\S+ \[[\d, ]*\] [0-9a-f]{64}")


def manifest_path(path: Path) -> Path:
    """Returns the path of the manifest of a file or an index.

    >>> manifest_path(Path("model.safetensors")).name
    'model.safetensors.sha256.json'
    """
    return path.with_name(f"{path.name}.sha256.json")


def read_manifest(path: Path, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Reads the manifest line of each tensor of a checkpoint.

    Raises:
      CheckpointError: unless it has exactly one valid line per tensor.
    """
    path = manifest_path(path)
    with open_regular(path) as file:
        refuse_foreign(path, file)
        fields = parse(path, file.read(MAX_HEADER_BYTES).rstrip())
    for name in sorted(fields.keys() ^ entries.keys()):
        has = "but not the checkpoint" if name in fields else "but not the manifest"
        raise CheckpointError(path, name, f"One of the two has it, {has}.")
    for name, line in fields.items():
        if not isinstance(line, str) or not _LINE.fullmatch(line):
            raise CheckpointError(path, name, "Its line must read: dtype [shape] sha256.")
    return fields


def write_manifest(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Writes the manifest of the tensors saved at `path`."""
    lines = {name: line_of(NAMES[value.dtype], value) for name, value in values.items()}
    with replacing(manifest_path(path)) as file:
        file.write(json.dumps(lines, indent=1, ensure_ascii=False).encode())


def line_of(dtype: str, value: np.ndarray) -> str:
    """Returns the manifest line of a tensor."""
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"{dtype} {[*value.shape]} {hashlib.sha256(data.data).hexdigest()}"
