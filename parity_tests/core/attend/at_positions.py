"""Positions as caches have them, arrays, and what numpy says of attention at positions."""

from typing import Any, NamedTuple

import numpy as np

from parity_tests.requests import oracle
from parity_tests.requests.masks import Random, Sizes

SIZES, K, H, h = Sizes((2,), 4, 9, 13), 2, 3, 5
B, N, T, S = 2, *SIZES[1:]
FURTHEST = 20  # of the positions that are drawn


class Where(NamedTuple):
    """Positions of queries, `B T`, and of keys, `B S`, or without B where all entries share them.

    As a cache holds them: in any order, with gaps, some absent, in some rows all of a block.
    """

    q: np.ndarray
    k: np.ndarray

    @property
    def at(self) -> tuple[np.ndarray, ...]:
        """Index arrays b, n, q, k that broadcast to B N T S, of positions."""
        b, n, _, _ = SIZES.grid()
        q, k = (np.broadcast_to(x, (B, x.shape[-1])) for x in self)
        return b, n, q[:, None, :, None], k[:, None, None, :]

    def seen(self, mask: np.ndarray) -> np.ndarray:
        """What a mask shows of what is present."""
        _, _, q, k = self.at
        return np.broadcast_to(mask & (q >= 0) & (k >= 0), (B, N, T, S))


def where(seed: int, lead: tuple[int, ...] = (B,)) -> Where:
    drawn = Random(seed)
    rows = []
    for length, start in ((T, 4), (S, 0)):
        x = np.stack([start + drawn.permutation(FURTHEST)[:length] for _ in range(B)])
        way = seed % 4
        x = np.sort(x, axis=1) if way in (0, 1) else x
        if way == 1:  # a ring
            x = np.roll(x, drawn.randint(length), axis=1)
        x[drawn.rand(*x.shape) < 0.2] = -1 - drawn.randint(3)
        if drawn.rand() < 0.3:
            x[drawn.randint(B), length // 2 :] = -1
        rows.append(x if lead else x[0])
    return Where(*rows)


class Drawn(NamedTuple):
    """What is differentiated, and the cotangents of output and lse."""

    floats: dict[str, np.ndarray]
    do: np.ndarray
    dlse: np.ndarray


def drawn(seed: int) -> Drawn:
    r = Random([seed, 1])
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, h)}
    shapes |= {"sinks": (N,)} if seed % 2 else {}
    floats = {name: r.standard_normal(shape) for name, shape in shapes.items()}
    return Drawn(floats, r.standard_normal((B, T, N, h)), r.standard_normal((B, T, N)))


def expected(x: Drawn, seen: np.ndarray, keep: Any = None) -> dict[str, Any]:
    """Output, lse and gradients by numpy, with `keep` after a dropout of one half."""
    more: dict[str, Any] = {name: [] for name in ("steps", "floats", "ints")}
    more |= {"at": None, "scale": H**-0.5, "keep": keep, "rate": 0.5, "empty": "zero"}
    more |= {"sinks": None, **x.floats, "do": x.do, "dlse": x.dlse}
    return oracle.attention(oracle.Inputs(seen=seen, **more))


def poisoned(x: Drawn, at: Where) -> Drawn:
    """NaN in queries and keys that are absent."""
    floats = {name: value.copy() for name, value in x.floats.items()}
    floats["q"][np.broadcast_to(at.q, (B, T)) < 0] = np.nan
    floats["k"][np.broadcast_to(at.k, (B, S)) < 0] = np.nan
    floats["v"][np.broadcast_to(at.k, (B, S)) < 0] = np.inf
    return x._replace(floats=floats)
