"""GGUF files: a strict reader of the header, and of one tensor at a time.

A header contains: magic, version, two counts; then keys, each with the type of its value; then, for
each tensor, name, sizes (innermost axis first), type and offset. The data follow, each tensor at a
multiple of `general.alignment`. Numbers are little-endian; a string is its length and its bytes.

Source: the format's description in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The
package `gguf` accepts malformed files that this reader rejects; it is used only to dequantise.
"""

import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, quoted
from .entry import MAX_HEADER_BYTES, Entry, check_shape, fill, open_regular
from .foreign import refuse_foreign
from .strict_json import check_count, check_name

VERSIONS = (2, 3)
ALIGNMENT = "general.alignment"
MAX_ALIGNMENT = 2**16
MAX_AXES = 4
MAX_KEY_BYTES = 512
MAX_LISTED = 10_000
_STRING, _ARRAY = 8, 9
_BOOL = 7
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, _BOOL, 10, 11, 12), "BbHhIifBQqd", strict=True))


class Type(NamedTuple):
    """Storage format of a tensor's elements.

    Attributes:
      name: ggml's name.
      dtype: safetensors' name of the dtype that it is read as.
      elements, size: elements and bytes per block; one element if there are no blocks.
    """

    name: str
    dtype: str
    elements: int
    size: int


def _blocks(name: str, elements: int, size: int) -> Type:
    return Type(name, "F32", elements, size)


# By ggml's type number. Types that `gguf.quants.dequantize` does not support are not read.
TYPES: dict[int, Type] = {
    0: Type("F32", "F32", 1, 4),
    1: Type("F16", "F16", 1, 2),
    2: _blocks("Q4_0", 32, 18),
    3: _blocks("Q4_1", 32, 20),
    6: _blocks("Q5_0", 32, 22),
    7: _blocks("Q5_1", 32, 24),
    8: _blocks("Q8_0", 32, 34),
    10: _blocks("Q2_K", 256, 84),
    11: _blocks("Q3_K", 256, 110),
    12: _blocks("Q4_K", 256, 144),
    13: _blocks("Q5_K", 256, 176),
    14: _blocks("Q6_K", 256, 210),
    16: _blocks("IQ2_XXS", 256, 66),
    17: _blocks("IQ2_XS", 256, 74),
    18: _blocks("IQ3_XXS", 256, 98),
    19: _blocks("IQ1_S", 256, 50),
    20: _blocks("IQ4_NL", 32, 18),
    21: _blocks("IQ3_S", 256, 110),
    22: _blocks("IQ2_S", 256, 82),
    23: _blocks("IQ4_XS", 256, 136),
    24: Type("I8", "I8", 1, 1),
    25: Type("I16", "I16", 1, 2),
    26: Type("I32", "I32", 1, 4),
    27: Type("I64", "I64", 1, 8),
    28: Type("F64", "F64", 1, 8),
    29: _blocks("IQ1_M", 256, 56),
    30: Type("BF16", "BF16", 1, 2),
    34: _blocks("TQ1_0", 256, 54),
    35: _blocks("TQ2_0", 256, 66),
    39: _blocks("MXFP4", 32, 17),
    40: _blocks("NVFP4", 64, 36),
}
BLOCK_ELEMENTS = 1 << 18  # number of elements dequantised at a time


@dataclass(frozen=True)
class Blocks(Entry):
    """A tensor quantised in blocks, read as float32.

    Attributes:
      type: type of the blocks.
    """

    type: Type

    def read(self, name: str, raw: np.ndarray | None = None) -> np.ndarray:
        """Reads and dequantises the values.

        Raises:
          CheckpointError: if the file has become shorter, or the package gguf is missing.
        """
        dequantize = _dequantizer(self.file, name, self.type)
        values = np.empty(self.shape, np.float32)
        flat = values.reshape(-1)
        blocks = np.empty(BLOCK_ELEMENTS // self.type.elements * self.type.size, np.uint8)
        with open_regular(self.file) as file:
            file.seek(self.start)
            for i in range(0, flat.size, BLOCK_ELEMENTS):
                count = min(BLOCK_ELEMENTS, flat.size - i)
                part = blocks[: count // self.type.elements * self.type.size]
                fill(part, file, self.file, name)
                with np.errstate(all="ignore"):  # the caller checks the result for NaN and Inf
                    flat[i : i + count] = dequantize(part)
        return values


def _dequantizer(path: Path, name: str, type: Type) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from the bytes of blocks to float32 values."""
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        known = GGMLQuantizationType[type.name]
    except (ImportError, KeyError):
        why = f"Its type is {type.name}, which needs the package gguf, 0.19 or newer."
        raise CheckpointError(path, name, why, "pip install 'flax-attn[gguf]' brings it.") from None
    return lambda part: dequantize(part, known)


class Gguf(NamedTuple):
    """Contents of a header.

    Attributes:
      keys: values by key; None for a long array.
      entries: tensors by name.
    """

    keys: Mapping[str, Any]
    entries: dict[str, Entry]


def read_gguf(path: Path, *, listed: int = MAX_LISTED) -> Gguf:
    """Reads the header of a file.

    Args:
      path: path of the file.
      listed: maximum length of arrays to keep; longer ones, such as vocabularies, become None.

    Raises:
      CheckpointError: for a header that violates the format.
    """
    with open_regular(path) as file:
        refuse_foreign(path, file, "GGUF")
        total = os.fstat(file.fileno()).st_size
        header = _Header(path, file, min(total, MAX_HEADER_BYTES), listed)
        tensors = header.counts()
        keys = header.keys()
        infos = [header.tensor() for _ in range(tensors)]
    alignment = _alignment(path, keys)
    begin = _padded(header.at, alignment)
    entries: dict[str, Entry] = {}
    for name, shape, number, offset in infos:
        if name in entries:
            raise CheckpointError(path, name, "Two tensors have this name.")
        entries[name] = _entry(path, name, shape, number, begin + offset)
    _check_contiguous(path, entries, begin, total, alignment)
    return Gguf(keys, entries)


class _Header:
    """A header, read sequentially and never beyond its maximum size.

    Attributes:
      at: number of bytes read.
    """

    def __init__(self, path: Path, file: BufferedReader, most: int, listed: int):
        self.path, self.file, self.most, self.listed, self.at = path, file, most, listed, 0
        self.left = 0  # number of keys, set by `counts`

    def fault(self, why: str, hint: str = "") -> CheckpointError:
        return CheckpointError(self.path, None, why, hint)

    def take(self, count: int) -> bytes:
        if count > self.most - self.at:
            raise self.fault(f"The header asks for byte {self.at + count}; it has {self.most}.")
        raw = self.file.read(count)
        if len(raw) < count:
            raise self.fault("The file ends within its header.")
        self.at += count
        return raw

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self, what: str, most: int) -> str:
        """Reads a string of at most `most` bytes."""
        length = self.number("Q")
        if length > most:
            raise self.fault(f"{what} of {length} bytes is too long; at most {most} are read.")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault(f"{what} is not UTF-8.") from None

    def counts(self) -> int:
        """Checks magic and version; returns the number of tensors."""
        if self.take(4) != b"GGUF":
            raise self.fault("A GGUF file begins with the letters GGUF.")
        version = self.number("I")
        if version not in VERSIONS:
            big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            hint = "It is big-endian: convert it." if big else ""
            versions = " and ".join(map(str, VERSIONS))
            raise self.fault(f"Its version is {version}; {versions} are read.", hint)
        tensors, self.left = self.number("Q"), self.number("Q")
        check_count(self.path, tensors)
        check_count(self.path, self.left)
        return tensors

    def keys(self) -> dict[str, Any]:
        """Reads all values by key."""
        values: dict[str, Any] = {}
        for _ in range(self.left):
            key = self.text("A key", MAX_KEY_BYTES)
            if not key or not key.isprintable():
                raise self.fault(f"A key must have printable characters; one is {quoted(key)}.")
            if key in values:
                raise self.fault(f"The key {quoted(key)} is there twice.")
            values[key] = self.value(key, self.number("I"))
        return values

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.text(f"The value of {quoted(key)}", self.most)
        if kind == _ARRAY:
            return self.array(key, self.number("I"), self.number("Q"))
        return self.numbers(key, kind, 1).item()

    def array(self, key: str, kind: int, count: int) -> tuple[Any, ...] | None:
        """Reads an array; returns None if it is longer than `listed`."""
        if kind != _STRING:
            values = self.numbers(key, kind, count)
            return tuple(values.tolist()) if count <= self.listed else None
        if count <= self.listed:
            label = f"A value of {quoted(key)}"
            return tuple(self.text(label, self.most) for _ in range(count))
        for _ in range(count):  # `take` raises at the end of the header, whatever the count
            self.take(self.number("Q"))
        return None

    def numbers(self, key: str, kind: int, count: int) -> np.ndarray:
        """Reads numbers or booleans."""
        if kind not in _NUMBERS:
            raise self.fault(f"A value of {quoted(key)} has type {kind}, which is not read.")
        code = np.dtype(f"<{_NUMBERS[kind]}")
        values = np.frombuffer(self.take(code.itemsize * count), code)
        if kind != _BOOL:
            return values
        if (values > 1).any():
            raise self.fault(f"A byte of {quoted(key)}, a BOOL, is neither 0 nor 1.")
        return values.astype(bool)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Reads name, shape (innermost axis last), type number and offset."""
        name = self.text("A tensor's name", 4 * MAX_KEY_BYTES)
        check_name(self.path, name)
        axes = self.number("I")
        if not 1 <= axes <= MAX_AXES:
            why = f"It has {axes} axes; a tensor has 1 to {MAX_AXES}."
            raise CheckpointError(self.path, name, why)
        shape = tuple(self.number("Q") for _ in range(axes))
        return name, shape[::-1], self.number("I"), self.number("Q")


def _alignment(path: Path, keys: Mapping[str, Any]) -> int:
    alignment = keys.get(ALIGNMENT, 32)
    is_count = type(alignment) is int and 8 <= alignment <= MAX_ALIGNMENT
    if not is_count or alignment & (alignment - 1):
        why = f"{ALIGNMENT} must be a power of two from 8 to {MAX_ALIGNMENT}."
        raise CheckpointError(path, None, why)
    return alignment


def _padded(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _entry(path: Path, name: str, shape: tuple[int, ...], number: int, start: int) -> Entry:
    if number not in TYPES:
        names = ", ".join(type.name for type in TYPES.values())
        raise CheckpointError(path, name, f"Its type is number {number}; {names} are read.")
    type = TYPES[number]
    check_shape(path, name, shape, max(type.size, 8))
    if shape[-1] % type.elements:
        why = f"Its rows have {shape[-1]} elements, which blocks of {type.elements} do not divide."
        raise CheckpointError(path, name, why)
    size = prod(shape) // type.elements * type.size
    if type.elements == 1:
        return Entry(path, type.dtype, shape, start, size)
    return Blocks(path, type.dtype, shape, start, size, type)


def _check_contiguous(
    path: Path, entries: Mapping[str, Entry], begin: int, total: int, alignment: int
) -> None:
    """Raises CheckpointError unless the tensors are contiguous and fill the file."""
    at = end = begin
    for name, entry in sorted(entries.items(), key=lambda x: (x[1].start, x[1].size)):
        if entry.start != at:
            gap = "overlaps the one before" if entry.start < at else "leaves a gap before it"
            raise CheckpointError(path, name, f"It {gap}.")
        end = at + entry.size
        at = _padded(end, alignment)
    if entries and total < end:
        raise CheckpointError(path, None, f"The file has {total} bytes, its tensors ask {end}.")
    if total > at:
        raise CheckpointError(path, None, f"{total - at} bytes at the end belong to no tensor.")
