"""Serialises the values of a run: arrays as safetensors, their structure as JSON.

Each tensor is written once, even if it occurs repeatedly. Float64 values that are exactly
representable in float32 are written as float32, complex values as pairs; the JSON has the
original dtype.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

import numpy as np

from ...errors import ParityError
from ...weights.dtypes import NAMES
from ...weights.entry import Entry
from ..sides.run import Call, Run, Step

# Dataclasses that can be serialised, by name.
KINDS = {kind.__name__: kind for kind in (Run, Call, Step)}
MAX_NAME_LENGTH = 400  # of a tensor's name; the reader accepts 512
EMPTY = ({"map": []}, [])  # serialised defaults, which are left out


class NotSerializable(Exception):
    """A value that is not an array, number, string or container of these."""


class Spool(Mapping[str, np.ndarray]):
    """Arrays by name in a file, read on each access, since a whole model may not fit in memory.

    Args:
      file: a file open for writing.
      path: its path.
    """

    def __init__(self, file: IO[bytes], path: Path):
        self.file, self.path, self.entries = file, path, dict[str, Entry]()

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes one contiguous array of a dtype that the format supports."""
        facts = NAMES[array.dtype], array.shape, self.file.tell(), array.nbytes
        self.entries[name] = Entry(self.path, *facts)
        self.file.write(array.reshape(-1).view(np.uint8).data)

    def __getitem__(self, name: str) -> np.ndarray:
        self.file.flush()
        return self.entries[name].read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Writer:
    """Collects tensors.

    Attributes:
      tensors: tensors by name.
      checksums: checksum of each tensor's bytes.
    """

    def __init__(self, spool: Spool) -> None:
        self.tensors = spool
        self.checksums: dict[str, int] = {}
        self.known: dict[bytes, str] = {}

    def tensor(self, name: str, array: np.ndarray) -> dict[str, str]:
        """Stores an array and returns the JSON that refers to it.

        Raises:
          NotSerializable: for an array that is not numeric.
        """
        plain = _plain(array)
        facts = f"{plain.dtype} {plain.shape} "
        key = sha256(facts.encode() + plain.tobytes()).digest()
        if key not in self.known:
            free = self._free(name)
            self.known[key], self.checksums[free] = free, _checksum(plain)
            self.tensors.add(free, plain)
        entry = {"tensor": self.known[key]}
        return entry if plain.dtype == array.dtype else {**entry, "dtype": array.dtype.name}

    def _free(self, name: str) -> str:
        """The name if it is valid and unused, else a unique one."""
        odd = len(name) > MAX_NAME_LENGTH or not name.isprintable() or "\\" in name
        if odd or {"", ".", ".."} & {*name.split("/")}:
            name = "tensor"
        count, free = 1, name
        while free in self.tensors:
            count += 1
            free = f"{name}#{count}"
        return free

    def tree(self, name: str, value: Any) -> Any:
        """Converts a value to JSON, storing its arrays as tensors.

        Raises:
          NotSerializable: for anything but arrays, numbers, strings and containers of these.
        """
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if isfinite(value) else {"float": repr(value)}
        if isinstance(value, np.ndarray):
            return self.tensor(name, value)
        if isinstance(value, list):
            return [self.tree(f"{name}/{i}", x) for i, x in enumerate(value)]
        if type(value) is tuple:
            return {"tuple": self.tree(name, list(value))}
        if type(value) is dict:
            return {"map": [[key, self.tree(f"{name}/{key}", x)] for key, x in value.items()]}
        if type(value) in KINDS.values():
            parts = {field.name: getattr(value, field.name) for field in fields(value)}
            full = {key: self.tree(f"{name}/{key}", x) for key, x in parts.items()}
            return {type(value).__name__: {k: x for k, x in full.items() if x not in EMPTY}}
        raise NotSerializable(f"{type(value).__name__} at {name}")


def _plain(array: np.ndarray) -> np.ndarray:
    """Converts an array to the narrowest dtype of the format that holds its values."""
    if array.dtype.kind == "c":
        array = np.stack([np.real(array), np.imag(array)], -1)
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
        array = narrow if np.array_equal(narrow, array, equal_nan=True) else array
    if array.dtype not in NAMES:
        raise NotSerializable(f"an array of {array.dtype}")
    return np.asarray(array, order="C")


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


class Reader:
    """Reads tensors lazily; those still in use are not read again.

    Attributes:
      path: path of the file.
      entries: location of each tensor.
      checksums: checksum of each tensor's bytes.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], checksums: Mapping[str, int]):
        self.path, self.entries, self.checksums = path, entries, checksums
        self.known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def tensor(self, fields: Mapping[str, str]) -> np.ndarray:
        """Reads the array that this JSON refers to.

        Raises:
          ParityError: if its checksum does not match.
        """
        name, kind = fields["tensor"], fields.get("dtype", "")
        made = self.known.get(f"{name} {kind}")
        if made is None:
            array = self.entries[name].read(name)
            if _checksum(array) != self.checksums.get(name):
                raise ParityError(f"{self.path} is damaged: {name} is not what was recorded.")
            made = _as(array, kind)
            made.flags.writeable = False
            self.known[f"{name} {kind}"] = made
        return made

    def value(self, tree: Any) -> Any:
        """Restores a value written by `Writer.tree`."""
        if isinstance(tree, list):
            return [self.value(x) for x in tree]
        if not isinstance(tree, dict):
            return tree
        if "tensor" in tree:
            return self.tensor(tree)
        (kind, inside), *_ = tree.items()
        if kind in KINDS:
            return KINDS[kind](**{key: self.value(x) for key, x in inside.items()})
        if kind == "map":
            return {key: self.value(x) for key, x in inside}
        made = {"tuple": lambda: tuple(self.value(inside)), "float": lambda: float(inside)}
        return made[kind]() if kind in made else inside


def _as(array: np.ndarray, kind: str) -> np.ndarray:
    """Converts an array back to its original dtype."""
    if not kind:
        return array
    if kind.startswith("complex"):
        part = np.float32 if kind == "complex64" else np.float64
        return np.ascontiguousarray(array, part).view(np.dtype(kind))[..., 0]
    return array.astype(np.dtype(kind))
