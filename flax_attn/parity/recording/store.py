"""The files of recordings and goldens: arrays as safetensors, their structure as JSON.

Each tensor is written once, even if it occurs repeatedly. Float64 values that are exactly
representable in float32 are written as float32, complex values as pairs; the JSON has the
original dtype. Every tensor has a checksum in the JSON, and the JSON has one beside it.
"""

import json
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from hashlib import sha256
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any
from weakref import WeakValueDictionary

import numpy as np

from ...errors import CheckpointError, ParityError
from ...weights.dtypes import NAMES
from ...weights.entry import Entry
from ...weights.safetensors import read_described, write_file
from ..sides.run import Call, Run, Step

# Exceptions that a description which is not as it was written may raise.
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
KEY = "flax_attn.recording"  # metadata key of the JSON
CHECKSUM = "flax_attn.checksum"  # and of its checksum, which files of version 0.2 do not have
FORMAT = 1
MAX_DESCRIPTION_BYTES = 2**28  # of a packed JSON
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
      remedy: how the file is written anew; the end of errors' sentences.
    """

    def __init__(
        self,
        path: Path,
        entries: Mapping[str, Entry],
        checksums: Mapping[str, int],
        remedy: str = "record it again",
    ):
        self.path, self.entries, self.checksums, self.remedy = path, entries, checksums, remedy
        self.known: WeakValueDictionary[str, np.ndarray] = WeakValueDictionary()

    def damaged(self, why: object) -> ParityError:
        """The error to raise for a file that is not as it was written."""
        return ParityError(f"{self.path} is damaged ({why}): {self.remedy}.")

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
                raise self.damaged(f"{name} is not what was recorded")
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


def write(path: Path, facts: Callable[[Writer], dict[str, Any]], packed: bool = False) -> Path:
    """Writes a file and returns its path; tensors are first spooled to disk to save memory.

    Args:
      path: the file; a folder of a packed file is made.
      facts: stores tensors by the writer, and returns the JSON.
      packed: compresses the JSON, which is longer than the sketches that it describes.

    Raises:
      ParityError: if it cannot be written.
    """
    try:
        if packed and not path.parent.exists():
            path.parent.mkdir()
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
            writer = Writer(Spool(file, Path(file.name)))
            text = json.dumps({**facts(writer), "checksums": writer.checksums})
            text = b85encode(zlib.compress(text.encode(), 9)).decode() if packed else text
            metadata = {KEY: text, CHECKSUM: _digest(text, writer.tensors.entries)}
            write_file(path, writer.tensors, metadata)
    except (OSError, CheckpointError) as error:
        why = getattr(error, "strerror", None) or error
        raise ParityError(f"{path} cannot be written: {why}.") from error
    return path


def opened(path: Path, remedy: str) -> tuple[dict[str, Any], Reader]:
    """Opens a file that `write` wrote: its JSON, and a reader for its tensors.

    Args:
      path: the file.
      remedy: how it is written anew; the end of errors' sentences.

    Raises:
      ParityError: if it is another file, is damaged, or has a newer format.
    """
    try:
        entries, metadata = read_described(path)
        text = metadata[KEY]
    except (CheckpointError, KeyError) as error:
        why = "" if isinstance(error, KeyError) else f" ({' '.join(str(error).split())})"
        raise ParityError(f"{path} is no recording{why}: {remedy}.") from error
    reader = Reader(path, entries, {}, remedy)
    if metadata.get(CHECKSUM) not in (None, _digest(text, entries)):
        raise reader.damaged("its description is not what was recorded")
    try:
        facts = json.loads(text if text.startswith("{") else _unpacked(text))
        file_format, reader.checksums = facts["format"], facts.get("checksums", {})
        is_newer = file_format > FORMAT
    except (*DAMAGE, RecursionError, zlib.error) as error:
        raise reader.damaged(error) from error
    if is_newer:
        raise ParityError(
            f"{path} is of format {file_format}, and this flax_attn reads {FORMAT}: install a "
            f"newer one, or {remedy}."
        )
    return facts, reader


def _unpacked(text: str) -> bytes:
    unpack = zlib.decompressobj()
    plain = unpack.decompress(b85decode(text), MAX_DESCRIPTION_BYTES)
    if not unpack.eof:
        raise ValueError(
            f"its description ends early or has more than {MAX_DESCRIPTION_BYTES} bytes"
        )
    return plain


def _digest(text: str, entries: Mapping[str, Entry]) -> str:
    """Hash of the JSON as it is stored, and of the tensors' names, dtypes and shapes.

    The bytes of each tensor have a checksum of their own, which is in the JSON.
    """
    digest = sha256(text.encode())
    for name in sorted(entries):
        digest.update(f"{name} {entries[name].dtype} {entries[name].shape}".encode())
    return digest.hexdigest()
