"""Values of a run in a file: arrays as tensors of safetensors, everything around them as JSON.

A tensor is written once, however often it is met. Float64 numbers that are exactly float32 are
written as float32, complex ones as pairs; the JSON says what they were.
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

# The dataclasses that may be written, by their names.
KINDS = {kind.__name__: kind for kind in (Run, Call, Step)}
MAX_NAME_LENGTH = 400  # of a tensor's name; the format's reader takes 512
EMPTY = ({"map": []}, [])  # what a field is unless something is written


class NotSerializable(Exception):
    """A value that is no array, number, text or container of these."""


class Spool(Mapping[str, np.ndarray]):
    """Arrays by name in a file, each read again when it is asked for: a model's are many.

    Args:
      file: open for writing.
      path: of it.
    """

    def __init__(self, file: IO[bytes], path: Path):
        self.file, self.path, self.entries = file, path, dict[str, Entry]()

    def add(self, name: str, array: np.ndarray) -> None:
        """Writes one array, contiguous and of a dtype that the format has."""
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
      tensors: by name.
      checksums: of each tensor's bytes.
    """

    def __init__(self, spool: Spool) -> None:
        self.tensors = spool
        self.checksums: dict[str, int] = {}
        self.known: dict[bytes, str] = {}

    def tensor(self, name: str, array: np.ndarray) -> dict[str, str]:
        """What the JSON says in an array's place.

        Raises:
          Unwritten: for an array that holds no numbers.
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
        """The name itself, if a tensor may have it and none has, else one that is counted."""
        odd = len(name) > MAX_NAME_LENGTH or not name.isprintable() or "\\" in name
        if odd or {"", ".", ".."} & {*name.split("/")}:
            name = "tensor"
        count, free = 1, name
        while free in self.tensors:
            count += 1
            free = f"{name}#{count}"
        return free

    def tree(self, name: str, value: Any) -> Any:
        """A value as JSON, its arrays as tensors.

        Raises:
          Unwritten: for what is neither array, number, text nor a container of these.
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
    """An array as it is written: in a dtype that the format has, and no wider than needed."""
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
    """Reads tensors when they are asked for; one that is still in use is not read again.

    Attributes:
      path: of the file.
      entries: where each tensor lies.
      checksums: of each tensor's bytes.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], checksums: Mapping[str, int]):
        self.path, self.entries, self.checksums = path, entries, checksums
        self.known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def tensor(self, fields: Mapping[str, str]) -> np.ndarray:
        """The array in whose place these fields stand.

        Raises:
          ParityError: if the file does not hold what was written.
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
        """The value that `Writer.tree` wrote."""
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
    """An array in the dtype that it had."""
    if not kind:
        return array
    if kind.startswith("complex"):
        part = np.float32 if kind == "complex64" else np.float64
        return np.ascontiguousarray(array, part).view(np.dtype(kind))[..., 0]
    return array.astype(np.dtype(kind))
