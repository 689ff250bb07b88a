"""Finds the keys and values of a full forward pass among the arrays of a cache."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ... import judge
from ...sides.match import point_of


class Contents(NamedTuple):
    """The keys, or the values, of one attention layer that a cache contains.

    Attributes:
      entries: (cache row, batch row, token) of every entry that was found.
      strangers: cache rows that also contain unknown entries.
    """

    entries: frozenset[tuple[int, int, int]]
    strangers: frozenset[int]

    def missing(self, row: int, tokens: Sequence[int]) -> list[int]:
        """The tokens of a row that are not in the cache."""
        return [t for t in tokens if not any(entry[1:] == (row, t) for entry in self.entries)]

    @property
    def in_other_rows(self) -> bool:
        """Whether a token is stored in a cache row other than its own."""
        return any(row != of for row, of, _ in self.entries)


def contents(
    caches: Sequence[np.ndarray], taps: Mapping[str, np.ndarray], kind: str, rows: int, tokens: int
) -> Iterator[Contents]:
    """Contents of a cache, for each tap of a kind: "key" or "value".

    Args:
      caches: arrays with one batch axis and the head dimension last.
      taps: of a full forward pass, B N T H, B T N H or (B N) T H; others are skipped.
      kind: the kind of taps to look for.
      rows, tokens: B and T.
    """
    for name, tap in taps.items():
        wants = _by_token(tap, rows, tokens) if point_of(name) == kind else None
        if wants is None:
            continue
        arrays = [
            c for c in caches if c.ndim > 2 and (len(c), c.shape[-1]) == (rows, tap.shape[-1])
        ]
        if arrays:
            yield _contents(arrays, wants)


def _by_token(tap: np.ndarray, rows: int, tokens: int) -> np.ndarray | None:
    """Keys or values as B T N H; None for any other layout."""
    if tap.ndim not in (3, 4) or tap.shape[0] % rows:
        return None
    x = tap.reshape(rows, -1, *tap.shape[1:]) if tap.ndim == 3 else tap
    if len(x) != rows or tokens not in x.shape[1:3]:
        return None
    return np.swapaxes(x, 1, 2) if x.shape[2] == tokens else x


def _contents(caches: Sequence[np.ndarray], wants: np.ndarray) -> Contents:
    known = wants.reshape(-1, wants.shape[-1])
    tokens, heads = wants.shape[1:3]
    tolerance = judge.LIKENESS * np.abs(known).max()
    entries, strangers = set(), set()
    for cache in caches:
        for row, numbers in enumerate(cache.reshape(len(cache), -1, cache.shape[-1])):
            numbers = numbers[numbers.any(-1)]
            is_match = np.abs(numbers[:, None] - known[None]).max(-1) <= tolerance
            matches = np.flatnonzero(is_match.any(0)).tolist()
            entries |= {(row, *divmod(i // heads, tokens)) for i in matches}
            strangers |= {row} if matches and not is_match.any(1).all() else set()
    return Contents(frozenset(entries), frozenset(strangers))
