"""Strict JSON for untrusted files: unique keys, finite numbers, limited size, valid UTF-8."""

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from ..errors import CheckpointError, quoted

MAX_NAMES = 100_000
MAX_NAME_LENGTH = 512
MAX_VALUES = 40 * MAX_NAMES  # of a JSON: a tensor has a dtype, two lists, and at most 16 axes
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


def parse(path: Path, raw: bytes) -> dict[str, Any]:
    """Parses bytes as a JSON object.

    Raises:
      CheckpointError: unless they are one JSON object from the first byte on, with unique keys.
    """
    if not raw.startswith(b"{"):
        raise CheckpointError(path, None, f"JSON must begin with '{{'; it begins {raw[:1]!r}.")
    _check_size(path, raw)
    try:
        text = raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise CheckpointError(path, None, "Its JSON is nested too deeply.") from None
    except UnicodeDecodeError:
        raise CheckpointError(path, None, "Its JSON is not UTF-8.") from None
    except ValueError as error:
        raise CheckpointError(path, None, f"Its JSON cannot be read: {error}.") from None


def _check_size(path: Path, raw: bytes) -> None:
    """Raises CheckpointError for more values than a checkpoint has: each takes memory when parsed.

    A text of a few bytes for each value, such as `[[],[],...]`, would take twenty times its size.
    """
    if len(raw) <= MAX_VALUES:  # a value has a byte at least
        return
    marks = _STRING.sub(b"", raw)
    count = sum(marks.count(mark) for mark in (b",", b"[", b"{"))
    if count > MAX_VALUES:
        why = f"Its JSON has {count} values; at most {MAX_VALUES} are read."
        raise CheckpointError(path, None, why)


def check_name(path: Path, name: str) -> None:
    """Raises CheckpointError for an invalid tensor name."""
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(
            path, name, f"A tensor's name has 1 to {MAX_NAME_LENGTH} printable characters."
        )
    if "\\" in name or {"", ".", ".."} & {*name.split("/")}:
        raise CheckpointError(path, name, "A tensor's name must not look like a path.")


def check_count(path: Path, count: int) -> None:
    """Raises CheckpointError for more tensors than a checkpoint may have."""
    if count > MAX_NAMES:
        raise CheckpointError(path, None, f"It has {count} tensors; at most {MAX_NAMES} are read.")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        visited: set[str] = set()
        twice = next(key for key, _ in pairs if key in visited or visited.add(key))
        raise ValueError(f"the key {quoted(twice)} is there twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
