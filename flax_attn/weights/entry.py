"""Location of one tensor in a checkpoint, and reading it without the rest of its file."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import IO

import numpy as np

from ..errors import CheckpointError, quoted
from .dtypes import DTYPES, NAMES, all_finite
from .strict_json import check_count, check_name

MAX_HEADER_BYTES = 100_000_000
MAX_AXES = 16
MAX_TENSOR_SIZE = 2**40


@dataclass(frozen=True)
class Entry:
    """Location of a tensor that is stored as its bytes in memory.

    Attributes:
      file: path of the file.
      dtype: safetensors' name of the dtype that it is read as.
      shape: shape of the tensor.
      start, size: offset of its first byte in the file, and number of bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def nbytes(self) -> int:
        """Number of bytes in memory."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    def read(self, name: str, raw: np.ndarray | None = None) -> np.ndarray:
        """Reads the values into a new array, or into the bytes `raw` if they are stored so.

        Raises:
          CheckpointError: naming the tensor `name`, if the file has become shorter.
        """
        raw = np.empty(self.size, np.uint8) if raw is None else raw
        with open_regular(self.file) as file:
            file.seek(self.start)
            fill(raw, file, self.file, name)
        return raw.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, eq=False)
class InMemory(Entry):
    """A tensor in memory.

    Attributes:
      value: the array.
    """

    value: np.ndarray

    def read(self, name: str, raw: np.ndarray | None = None) -> np.ndarray:
        """Returns the array, uncopied if it is contiguous."""
        return np.ascontiguousarray(self.value).reshape(self.shape)


def entries_of(path: Path, values: Mapping[str, np.ndarray]) -> dict[str, Entry]:
    """Returns entries of arrays by name; CheckpointError for invalid names and values."""
    check_count(path, len(values))
    for name, value in values.items():
        check_name(path, name if isinstance(name, str) else "")
        if not isinstance(value, np.ndarray) or value.dtype not in NAMES:
            what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else quoted(value)
            expected = f"It must be an array of numpy, of {', '.join(x.name for x in NAMES)}"
            call = "{name: x.cpu().numpy() for name, x in module.state_dict().items()}"
            hint = f"Pass {call}." if hasattr(value, "numpy") else ""
            raise CheckpointError(path, name, f"{expected}; it is {what}.", hint)
    return {
        name: InMemory(path, NAMES[value.dtype], value.shape, 0, value.nbytes, value)
        for name, value in values.items()
    }


def open_regular(path: Path) -> BufferedReader:
    """Opens a regular file for reading; CheckpointError for a folder, pipe or device."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return open(path, "rb")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(path, None, f"It cannot be opened: {why}.") from None
    if stat.S_ISDIR(mode):
        hint = "Give the path of a file in it."
        raise CheckpointError(path, None, "It is a folder, and a file is read here.", hint)
    raise CheckpointError(path, None, "It is no regular file.")


def fill(raw: np.ndarray, file: IO[bytes], path: Path, name: str) -> None:
    """Fills an array from a file; CheckpointError if the file has fewer bytes."""
    if file.readinto(raw.data) != raw.nbytes:  # pyright: ignore[reportAttributeAccessIssue]
        raise CheckpointError(path, name, "The file ends within it.")


def check_shape(path: Path, name: str, shape: tuple[int, ...], itemsize: int) -> None:
    """Raises CheckpointError for a shape that numpy does not support."""
    if len(shape) > MAX_AXES or not all(0 <= n <= MAX_TENSOR_SIZE for n in shape):
        why = f"Its shape must be at most {MAX_AXES} whole numbers from 0 to 2**40."
        raise CheckpointError(path, name, why)
    if prod(max(n, 1) for n in shape) * itemsize >= 2**63:  # numpy's limit, also for empty arrays
        raise CheckpointError(path, name, "Its shape has more bytes than 64 bits can count.")


def read_tensor(
    name: str, entry: Entry, allow_nonfinite: bool = False, raw: np.ndarray | None = None
) -> np.ndarray:
    """Reads one tensor without the rest of its file.

    Args:
      name: name of the tensor, for errors.
      entry: location of the tensor.
      allow_nonfinite: whether it may contain NaN and Inf.
      raw: bytes to read into, as many as the tensor has; None for new ones.

    Raises:
      CheckpointError: if the file has become shorter, for NaN and Inf unless they are allowed, and
        for BOOL bytes other than 0 and 1.
    """
    array = entry.read(name, raw)
    if entry.dtype == "BOOL" and array.size and array.view(np.uint8).max() > 1:
        raise CheckpointError(entry.file, name, "A byte of a BOOL is neither 0 nor 1.")
    if not allow_nonfinite and not all_finite(array):
        hint = "Say allow_nonfinite=True if it is meant."
        raise CheckpointError(entry.file, name, "It holds NaN or Inf.", hint)
    return array
