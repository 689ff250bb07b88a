"""Strict reader of numpy's `.npz` files: the zip's directory, and the header of every array.

Each member `name.npy` contains a header with dtype, order and shape, and the array's bytes. Pickled
objects are never read.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html; Python's `zipfile`
reads the archive.
"""

import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import CheckpointError, quoted
from .dtypes import DTYPES
from .entry import Entry, check_shape, fill, open_regular
from .foreign import refuse_foreign
from .strict_json import check_count, check_name

_MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 10_000  # numpy's own limit
_HEADER = re.compile(
    r"\{'descr': '([^']{1,9})', 'fortran_order': (True|False), "
    r"'shape': \((|\d{1,19},|\d{1,19}(?:, \d{1,19})+)\), \} *\n"
)
_DTYPES = {dtype.str: name for name, dtype in DTYPES.items() if dtype.isbuiltin == 1}
_DEFLATED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class Member(Entry):
    """A tensor in a zip archive; `start` is relative to its member.

    Attributes:
      member: name of the member in the archive.
      fortran: whether the array is in Fortran order.
    """

    member: str
    fortran: bool

    def read(self, name: str, raw: np.ndarray | None = None) -> np.ndarray:
        """Reads the values into a new array, or into the bytes `raw`.

        Raises:
          CheckpointError: if the archive changed, or the checksum of the data is wrong.
        """
        raw = np.empty(self.size, np.uint8) if raw is None else raw
        with _archive(self.file, name) as archive, archive.open(self.member) as file:
            file.read(self.start)
            fill(raw, file, self.file, name)
        array = raw.view(DTYPES[self.dtype])
        if not self.fortran:
            return array.reshape(self.shape)
        return np.ascontiguousarray(array.reshape(self.shape, order="F"))


@contextmanager
def _archive(path: Path, name: str | None = None) -> Iterator[zipfile.ZipFile]:
    """Opens an archive; any exception of `zipfile` becomes a CheckpointError."""
    try:
        with open_regular(path) as file:
            refuse_foreign(path, file, "zip")
            with zipfile.ZipFile(file) as archive:
                yield archive
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many types for malformed archives
        why = f"Its zip archive cannot be read: {quoted(str(error))}."
        raise CheckpointError(path, name, why) from None


def read_npz(path: Path) -> dict[str, Entry]:
    """Returns the entries of all arrays by name; reads only the directory and the headers.

    Raises:
      CheckpointError: for an archive that `numpy.savez` would not write.
    """
    with _archive(path) as archive:
        members = archive.infolist()
        check_count(path, len(members))
        entries: dict[str, Entry] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            check_name(path, name)
            if name == member.filename or name in entries:
                why = "It is there twice." if name in entries else "Its name must end in .npy."
                raise CheckpointError(path, member.filename, why)
            if member.flag_bits & 1 or member.compress_type not in _DEFLATED:
                raise CheckpointError(path, name, "It is encrypted, or packed in an unknown way.")
            with archive.open(member) as file:
                entries[name] = _entry(path, name, member, file)
    return entries


def _entry(path: Path, name: str, member: zipfile.ZipInfo, file: IO[bytes]) -> Entry:
    first = file.read(8)
    width = {b"\1\0": 2, b"\2\0": 4, b"\3\0": 4}.get(first[6:])
    if first[:6] != _MAGIC or width is None:
        raise CheckpointError(path, name, "It is no array of numpy, version 1 to 3.")
    length = int.from_bytes(file.read(width), "little")
    if length > MAX_HEADER_BYTES:
        why = f"Its header has {length} bytes; at most {MAX_HEADER_BYTES} are read."
        raise CheckpointError(path, name, why)
    text = _HEADER.fullmatch(file.read(length).decode("latin-1"))
    if text is None:
        raise CheckpointError(path, name, "Its header is not as numpy writes it.")
    descr, order, sizes = text.groups()
    if descr not in _DTYPES:
        hint = "numpy has no name for bfloat16: save it as safetensors." if "V" in descr else ""
        why = f"Its dtype is {quoted(descr)}; {', '.join(_DTYPES)} are read."
        raise CheckpointError(path, name, why, hint)
    shape = tuple(int(size) for size in sizes.split(",") if size)
    dtype = DTYPES[_DTYPES[descr]]
    check_shape(path, name, shape, dtype.itemsize)
    start, size = 8 + width + length, prod(shape) * dtype.itemsize
    if member.file_size != start + size:
        why = f"The directory says that it has {member.file_size} bytes, its header {start + size}."
        raise CheckpointError(path, name, why)
    return Member(path, _DTYPES[descr], shape, start, size, member.filename, order == "True")
