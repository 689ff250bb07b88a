"""Faults of rotary positions: torch's turning is measured from its record, then done otherwise."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ... import judge
from .attention import orders
from .evidence import Evidence, Guesses

POINTS = ("query", "key", "value", "scores", "weights", "context")
LONGEST = 1 << 16
BASES = (1e4, 5e5, 1e6, 1e3, 1e5)


def turned(evidence: Evidence) -> Guesses:
    """What queries, keys and values look like when turned, or put into heads, otherwise."""
    for name, made in _projections(evidence):
        heads, group = _heads(evidence, made)
        if not heads:
            continue
        x = _split(made, heads, group)
        want = evidence.plain.reshape(x.shape)
        yield from _turnings(evidence, x, want)
        yield from _splits(evidence, made, heads, group, name)
    yield from _other_heads(evidence)


def _projections(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """Submodules' outputs of the same attention which the point may have been made of."""
    owner = evidence.tap.rpartition(".")[0]
    for name, value in evidence.truth.taps.items():
        inside = name.startswith(f"{owner}." if owner else "") and value.ndim >= 2
        kind = evidence.truth.calls[name].kind
        if inside and value.size and evidence.plain.size % value.size == 0 and kind not in POINTS:
            yield name, value


def _heads(evidence: Evidence, made: np.ndarray) -> tuple[int, int]:
    """Into how many heads a projection splits, and how often each stands in the point."""
    width = evidence.plain.shape[-1]
    if made.shape[-1] % width or made.shape[-2] != evidence.plain.shape[-2]:
        return 0, 0
    return made.shape[-1] // width, evidence.plain.size // made.size


def _split(made: np.ndarray, heads: int, group: int) -> np.ndarray:
    """`(B T) (N h)` as B N T h, every head as often as it is used."""
    split = made.reshape(-1, made.shape[-2], heads, made.shape[-1] // heads)
    return np.repeat(np.swapaxes(split, 1, 2), group, axis=1)


def _turnings(evidence: Evidence, x: np.ndarray, want: np.ndarray) -> Guesses:
    shape = evidence.plain.shape
    for pairing in ("halves", "neighbours"):
        angles = _angles(x, want, pairing)
        if angles is None:
            continue
        other = "neighbours" if pairing == "halves" else "halves"
        yield (
            f"rotary pairs of {other}, where torch turns {pairing}",
            _turn(x, angles, other).reshape(shape),
        )
        for what, table in _otherwise(angles):
            yield f"rotary positions, {what}", _turn(x, table, pairing).reshape(shape)
        for what, made in _half_done(x, angles, pairing):
            yield f"rotary positions, {what}", made.reshape(shape)
        return
    yield from _turned_too(evidence, x)


def _otherwise(angles: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Tables of angles, T by half the width, that mistakes make."""
    yield "not turned", np.zeros_like(angles)
    yield "turned the other way", -angles
    step = np.angle(np.exp(1j * (angles[1:2] - angles[:1]))) if len(angles) > 1 else angles * 0
    rows = np.arange(len(angles))[:, None]
    yield "one too high", angles + step
    yield "one too low", angles - step
    yield "counted from zero", rows * step
    yield "counted from one", (rows + 1) * step
    yield "in reversed order", angles[::-1]
    yield "all of them the first", np.repeat(angles[:1], len(angles), 0)
    yield "turned twice", 2 * angles
    yield "turned by half the angle", angles / 2
    yield "frequencies in reversed order", angles[:, ::-1]
    half, places = angles.shape[1], rows + _start(angles)
    for base in BASES:
        table = places * base ** (-np.arange(half) / half)
        yield f"another base of the angles, {base:g}", table
        over = max(half - 1, 1)
        yield f"base {base:g} over the width less one", places * base ** (-np.arange(half) / over)
        yield f"base {base:g}, twice the exponent", places * base ** (-np.arange(half) * 2 / half)
    yield "twice the exponent", places * np.square(np.mod(step, 2 * np.pi))
    yield "half the exponent", places * np.sqrt(np.mod(step, 2 * np.pi))
    yield "angles in float32", angles.astype(np.float32).astype(np.float64)


def _start(angles: np.ndarray) -> int:
    """The first position: the fastest pair turns by one radian a position."""
    far = np.abs(np.exp(1j * np.arange(LONGEST)) - np.exp(1j * angles[0, 0]))
    return int(np.argmin(far))


def _half_done(x: np.ndarray, angles: np.ndarray, pairing: str) -> Iterator[tuple[str, np.ndarray]]:
    """Turned in part, or with the tables of one pairing and the pairs of the other."""
    half = angles.shape[1]
    few = np.where(np.arange(half) < half // 2, angles, 0.0)
    yield "half of the pairs not turned", _turn(x, few, pairing)
    width = 2 * (half // 2)
    first = _turn(x[..., :width], angles[:, : half // 2], pairing) if width else x[..., :0]
    yield "half of the width turned", np.concatenate([first, x[..., width:]], axis=-1)
    (a, b), (c, d) = _pairs(x, "halves"), _pairs(x, "neighbours")
    by_halves = np.concatenate([-b, a], axis=-1)
    by_neighbours = np.stack([-d, c], axis=-1).reshape(x.shape)
    twice, each = np.concatenate([angles] * 2, axis=-1), np.repeat(angles, 2, axis=-1)
    for table, quarter in ((twice, by_neighbours), (each, by_halves)):
        yield (
            "tables of one pairing, pairs of the other",
            (x * np.cos(table) + quarter * np.sin(table)),
        )


def _turned_too(evidence: Evidence, x: np.ndarray) -> Guesses:
    """Values turned as the keys are."""
    key = evidence.near("key")
    if evidence.point != "value" or key is None or key.shape[-1] != x.shape[-1]:
        return
    for name, made in _projections(replace(evidence, plain=key)):
        heads, group = _heads(replace(evidence, plain=key), made)
        if not heads:
            continue
        base = _split(made, heads, group)
        for pairing in ("halves", "neighbours"):
            angles = _angles(base, key.reshape(base.shape), pairing)
            if angles is not None:
                turned = _turn(x, angles, pairing).reshape(evidence.plain.shape)
                yield f"rotary positions, values turned as {name} is", turned


def _pairs(x: np.ndarray, pairing: str) -> tuple[np.ndarray, np.ndarray]:
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if pairing == "halves" else (x[..., ::2], x[..., 1::2])


def _angles(x: np.ndarray, want: np.ndarray, pairing: str) -> np.ndarray | None:
    """The angle of each position and pair, if torch turned by one; every head tells the same."""
    if x.shape[-1] % 2:
        return None
    (a, b), (c, d) = _pairs(x, pairing), _pairs(want, pairing)
    dot, cross = (a * c + b * d).sum((0, 1)), (a * d - b * c).sum((0, 1))
    angles = np.arctan2(cross, dot)  # T half
    good = judge.error(_turn(x, angles, pairing), want) <= judge.SAME_FUNCTION
    return angles if good and np.abs(angles).max() > 0 else None


def _turn(x: np.ndarray, angles: np.ndarray, pairing: str) -> np.ndarray:
    a, b = _pairs(x, pairing)
    c, d = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
    if pairing == "halves":
        return np.concatenate([c, d], axis=-1)
    return np.stack([c, d], axis=-1).reshape(x.shape)


def _splits(evidence: Evidence, made: np.ndarray, heads: int, group: int, name: str) -> Guesses:
    """Heads cut from a projection in another way, and then turned as torch does."""
    right = _split(made, heads, group)
    turn = _turner(right, evidence.plain.reshape(right.shape))
    length, width = made.shape[-2], made.shape[-1] // heads
    ways = {
        "heads interleaved: the width before the heads": np.moveaxis(
            made.reshape(-1, length, width, heads), -1, 1
        ),
        "heads cut from positions: no transpose": made.reshape(-1, heads, length, width),
    }
    for what, x in ways.items():
        x = np.repeat(x, group, axis=1)
        yield f"{what} (of {name})", turn(x).reshape(evidence.plain.shape)


def _turner(x: np.ndarray, want: np.ndarray):
    for pairing in ("halves", "neighbours"):
        angles = _angles(x, want, pairing)
        if angles is not None:
            return lambda y: _turn(y, angles, pairing)
    return lambda y: y


def _other_heads(evidence: Evidence) -> Guesses:
    """Heads in another order: keys and values shared by groups, tiled or misplaced."""
    scored = evidence.near("scores")
    heads = scored.shape[-3] if scored is not None and scored.ndim > 3 else 1
    plain = evidence.plain
    if heads > 1 and plain.shape[0] % heads == 0:
        split = plain.reshape(-1, heads, *plain.shape[1:])
        for what, order in orders(heads):
            yield f"heads in another order: {what}", split[:, order].reshape(plain.shape)
        yield "one head for all", np.repeat(split[:, :1], heads, 1).reshape(plain.shape)
    for point in ("query", "key", "value"):
        other = evidence.near(point)
        if point != evidence.point and other is not None and other.shape == plain.shape:
            yield f"the {point} in its place", other
