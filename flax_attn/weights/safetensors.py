"""Safetensors files: a strict reader of the header, of one tensor at a time, and a writer.

Source: the format's description at https://github.com/huggingface/safetensors. This reader rejects
malformed files that the reference implementation accepts.
"""

import json
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .._internal.replacing import replacing
from ..errors import CheckpointError, quoted
from .dtypes import DTYPES, NAMES
from .entry import MAX_HEADER_BYTES, MAX_TENSOR_SIZE, Entry, check_shape, open_regular
from .foreign import FIRST, foreign
from .strict_json import check_count, check_name, parse

_KEYS = {"dtype", "shape", "data_offsets"}


def read_header(path: Path) -> dict[str, Entry]:
    """Returns the entries of a file by tensor name; reads only its header.

    Raises:
      CheckpointError: for a header that violates the format.
    """
    return read_described(path)[0]


def read_described(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Returns the entries of a file by tensor name, and its metadata; reads only its header.

    Raises:
      CheckpointError: for a header that violates the format.
    """
    with open_regular(path) as file:
        total = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length, most = int.from_bytes(first, "little"), min(MAX_HEADER_BYTES, total - 8)
        fits = 2 <= length <= most
        raw = file.read(length if fits else FIRST)
    if not fits or not raw.startswith(b"{"):  # another format's first bytes may look like a length
        error = foreign(path, first + raw) or _no_header(path, total, length, most)
        if error is not None:
            raise error
    if len(raw) < length:
        raise CheckpointError(path, None, "The file ends within its header.")
    fields = parse(path, _unpadded(path, raw))
    metadata = fields.pop("__metadata__", {})
    _check_metadata(path, metadata)
    check_count(path, len(fields))
    begin = 8 + length
    entries = {name: _entry(path, name, fields[name], begin, total) for name in fields}
    _check_contiguous(path, entries, begin, total)
    return entries, metadata


def _no_header(path: Path, total: int, length: int, most: int) -> CheckpointError | None:
    """Returns the error to raise if the first bytes are not a valid header length, else None."""
    if 2 <= length <= most:
        return None
    if most < 2:
        why = f"It has {total} bytes, fewer than the header's length and a header have."
        return CheckpointError(path, None, why, "Fetch or save it again.")
    why = f"The header's length must be 2 to {most}; it is {length}."
    return CheckpointError(path, None, why, "Is it a safetensors file, and whole?")


def _unpadded(path: Path, raw: bytes) -> bytes:
    """Removes the padding of a header, which may be spaces only."""
    raw = raw.rstrip(b" ")
    if not raw.endswith(b"}"):
        raise CheckpointError(path, None, "The header must end in '}' and spaces.")
    return raw


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise CheckpointError(path, None, "__metadata__ must map strings to strings.")


def _entry(path: Path, name: str, fields: Any, begin: int, total: int) -> Entry:
    check_name(path, name)
    if not isinstance(fields, dict) or fields.keys() != _KEYS:
        keys = ", ".join(map(quoted, list(fields)[:6])) if isinstance(fields, dict) else "no object"
        why = f"Its entry must have dtype, shape and data_offsets and nothing else; it has {keys}."
        raise CheckpointError(path, name, why)
    dtype, shape, offsets = (fields[key] for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        why = f"Its dtype is {quoted(dtype)}; {', '.join(DTYPES)} are read."
        raise CheckpointError(path, name, why)
    width = DTYPES[dtype].itemsize
    check_shape(path, name, tuple(shape) if _are_counts(shape, MAX_TENSOR_SIZE) else (-1,), width)
    if _are_counts(offsets, MAX_TENSOR_SIZE) and max(offsets, default=0) > total - begin:
        why = f"Its data_offsets lie beyond the file, which has {total - begin} bytes of data."
        raise CheckpointError(path, name, why, "Fetch or save it again.")
    if not _are_counts(offsets, total - begin) or len(offsets) != 2 or offsets[0] > offsets[1]:
        why = f"Its data_offsets must be two whole numbers in order, 0 to {total - begin}."
        raise CheckpointError(path, name, why)
    size = prod(shape) * width
    if offsets[1] - offsets[0] != size:
        why = f"Its offsets hold {offsets[1] - offsets[0]} bytes, its shape and dtype ask {size}."
        raise CheckpointError(path, name, why)
    return Entry(path, dtype, tuple(shape), begin + offsets[0], size)


def _are_counts(values: Any, most: int) -> bool:
    """Whether `values` is a list of integers from 0 to `most`, without booleans and floats."""
    return isinstance(values, list) and all(type(x) is int and 0 <= x <= most for x in values)


def _check_contiguous(path: Path, entries: Mapping[str, Entry], begin: int, total: int) -> None:
    """Raises CheckpointError unless the tensors are contiguous and fill the file."""
    at = begin
    for name, entry in sorted(entries.items(), key=lambda x: (x[1].start, x[1].size)):
        if entry.start != at:
            gap = "overlaps the one before" if entry.start < at else "leaves a gap before it"
            raise CheckpointError(path, name, f"It {gap}.")
        at += entry.size
    if at != total:
        raise CheckpointError(path, None, f"{total - at} bytes at the end belong to no tensor.")


def write_file(
    path: Path, values: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors to one file atomically."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    order = sorted(values, key=lambda name: -values[name].dtype.itemsize)  # keeps data aligned
    for name in order:
        value = values[name]
        offsets = [end, end := end + value.nbytes]
        fields = {"dtype": NAMES[value.dtype], "shape": [*value.shape], "data_offsets": offsets}
        header[name] = fields
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(np.ascontiguousarray(values[name]).reshape(-1).view(np.uint8).data)
