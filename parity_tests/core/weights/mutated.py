"""Files changed at random, as damage or an attacker would: bytes, and values of a JSON.

The generators know no format. A seed draws one file, so that a failure can be made again.
"""

import copy
import json
from typing import Any

import numpy as np

Draw = np.random.Generator
EXTREMES = (0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -2.5, 1e308, "", "x", "1"),
    *([], [1], [[]], {}, {"a": 1}, {"__float__": "Infinity"}, {"__float__": "x"}, [None] * 3),
)


def changed_bytes(content: bytes, seed: int) -> bytes:
    """A file's bytes with one to three changes, which differ from what they were."""
    draw = np.random.default_rng(seed)
    raw = content
    while raw == content:
        for _ in range(int(draw.integers(1, 4))):
            kind = BYTE_CHANGES[int(draw.integers(len(BYTE_CHANGES)))]
            raw = kind(raw, draw) if raw else content
    return raw


def _span(raw: bytes, draw: Draw, most: int = 40) -> tuple[int, int]:
    # Every second one in the first bytes, where all formats but one have their header.
    end = len(raw) if draw.integers(2) else min(len(raw), 600)
    first = int(draw.integers(end))
    return first, min(len(raw), first + int(draw.integers(1, most)))


def _flipped(raw: bytes, draw: Draw) -> bytes:
    at, _ = _span(raw, draw)
    return raw[:at] + bytes([raw[at] ^ 1 << int(draw.integers(8))]) + raw[at + 1 :]


def _left_out(raw: bytes, draw: Draw) -> bytes:
    first, end = _span(raw, draw)
    return raw[:first] + raw[end:]


def _twice(raw: bytes, draw: Draw) -> bytes:
    first, end = _span(raw, draw)
    return raw[:end] + raw[first:]


def _noise(raw: bytes, draw: Draw) -> bytes:
    first, end = _span(raw, draw)
    return raw[:first] + draw.bytes(end - first) + raw[end:]


def _elsewhere(raw: bytes, draw: Draw) -> bytes:
    """One span is written over another."""
    (first, end), (at, _) = _span(raw, draw), _span(raw, draw)
    return raw[:at] + raw[first:end] + raw[at + end - first :]


def _cut(raw: bytes, draw: Draw) -> bytes:
    return raw[: int(draw.integers(len(raw)))]


def _number(raw: bytes, draw: Draw) -> bytes:
    """A little-endian number, such as a length or an offset, becomes another."""
    (at, _), width = _span(raw, draw), int(draw.choice([1, 2, 4, 8]))
    value = EXTREMES[int(draw.integers(len(EXTREMES)))] % 2 ** (8 * width)
    return raw[:at] + value.to_bytes(width, "little") + raw[at + width :]


def _digits(raw: bytes, draw: Draw) -> bytes:
    """A number that is written in digits becomes another."""
    at, _ = _span(raw, draw)
    first = next((i for i in range(at, len(raw)) if raw[i : i + 1].isdigit()), None)
    if first is None:
        return raw
    end = next((i for i in range(first, len(raw)) if not raw[i : i + 1].isdigit()), len(raw))
    value = EXTREMES[int(draw.integers(len(EXTREMES)))] + int(draw.integers(-1, 2))
    return raw[:first] + str(value).encode() + raw[end:]


BYTE_CHANGES = (_flipped, _left_out, _twice, _noise, _elsewhere, _cut, _number, _digits)


def changed_json(tree: Any, seed: int) -> Any:
    """A JSON value with one to three of its parts replaced, left out, or exchanged."""
    draw, new = np.random.default_rng(seed), copy.deepcopy(tree)
    while json.dumps(new) == json.dumps(tree):
        for _ in range(int(draw.integers(1, 4))):
            spots = list(_spots(new))
            if spots:
                _change(draw, *spots[int(draw.integers(len(spots)))], spots)
    return new


def _spots(tree: Any) -> Any:
    """Every container with each of its keys or indices."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _spots(tree[key])


def _change(draw: Draw, at: Any, key: Any, spots: list) -> None:
    kind = int(draw.integers(6))
    if kind == 0:
        del at[key]
    elif kind == 1:
        other, name = spots[int(draw.integers(len(spots)))]
        at[key] = copy.deepcopy(other[name])
    elif kind == 2 and isinstance(at[key], int | float) and not isinstance(at[key], bool):
        at[key] = at[key] * (2, -1, 3, 0)[int(draw.integers(4))] + int(draw.integers(-1, 2))
    else:
        at[key] = copy.deepcopy(VALUES[int(draw.integers(len(VALUES)))])
