"""Measures rotary rotations: the angle and the scale of every pair."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .. import judge

PAIRINGS = ("halves", "neighbours")
LONGEST = 1 << 16
BASES = (1e4, 5e5, 1e6, 1e3, 1e5)
SINGLE = float(np.finfo(np.float32).eps)
# Tolerance for recognising values that were rounded to float32.
EXACT = 1e-3 * SINGLE


@dataclass(frozen=True)
class Rotation:
    """A rotation of the first `width` components at every position.

    Attributes:
      pairing: "halves" or "neighbours".
      table: complex, T by half the width: pair (a, b) becomes (c, d), c + id = table * (a + ib).
      width: number of rotated components; the others are unchanged.
      head: number of all components.
    """

    pairing: str
    table: np.ndarray
    width: int
    head: int = 0

    @property
    def angles(self) -> np.ndarray:
        """Angles in radians, between -pi and pi."""
        return np.angle(self.table)

    def by(self, angles: np.ndarray) -> "Rotation":
        """The same rotation with other angles."""
        size = np.abs(self.table)
        even = float(f"{size.mean():.6g}")
        if np.ptp(size) > judge.SAME_FUNCTION and np.abs(size - even).max() <= 4 * SINGLE:
            size = np.full_like(size, even)  # remove float32 noise of a uniform scale
        return replace(self, table=size * np.exp(1j * angles))

    def __call__(self, x: np.ndarray) -> np.ndarray:
        part, rest = x[..., : self.width], x[..., self.width :]
        a, b = pairs(part, self.pairing)
        made = self.table * (a + 1j * b)
        return np.concatenate([joined(made.real, made.imag, self.pairing), rest], axis=-1)


def pairs(x: np.ndarray, pairing: str) -> tuple[np.ndarray, np.ndarray]:
    """Splits components into the two members of each pair."""
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if pairing == "halves" else (x[..., ::2], x[..., 1::2])


def joined(a: np.ndarray, b: np.ndarray, pairing: str) -> np.ndarray:
    """Inverse of `pairs`."""
    if pairing == "halves":
        return np.concatenate([a, b], axis=-1)
    return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)


def measured(x: np.ndarray, got: np.ndarray) -> Rotation | None:
    """The rotation from `x` (... T h) to `got`, if any; NaN in `got` means unknown."""
    known = ~np.isnan(got)
    moved = (known & (got != x)).reshape(-1, x.shape[-1]).any(0)
    if not moved.any():
        return None
    least = 1 + int(np.flatnonzero(moved)[-1])
    for width in dict.fromkeys((least + least % 2, x.shape[-1])):
        for pairing in PAIRINGS:
            if width % 2 == 0 and width <= x.shape[-1]:
                rotation = _fitted(x, got, known, pairing, width)
                made = np.where(known, rotation(x), 0.0)
                is_rotated = np.abs(rotation.angles).max() > judge.SAME_FUNCTION
                if is_rotated and judge.same_function(made, np.where(known, got, 0.0)).ok:
                    return rotation
    return None


def _fitted(
    x: np.ndarray, got: np.ndarray, known: np.ndarray, pairing: str, width: int
) -> Rotation:
    (a, b), (c, d) = (pairs(np.where(known, y, 0.0)[..., :width], pairing) for y in (x, got))
    before, after = a + 1j * b, c + 1j * d
    axes = tuple(range(x.ndim - 2))
    size = (np.abs(before) ** 2).sum(axes)
    table = (np.conj(before) * after).sum(axes) / np.where(size, size, 1.0)
    return Rotation(pairing, np.where(size, table, 1.0), width, x.shape[-1])


def start(angles: np.ndarray) -> int:
    """The first position, inferred from the fastest pair (one radian per position)."""
    distances = np.abs(np.exp(1j * np.arange(LONGEST)) - np.exp(1j * angles[0, 0]))
    return int(np.argmin(distances))


def frequencies(rotation: Rotation) -> np.ndarray:
    """Radians per position of every pair, refined by unwrapping the farthest angles."""
    angles = rotation.angles
    if len(angles) < 2:
        return np.zeros(angles.shape[1])
    speed = np.mod(angles[1] - angles[0] + np.pi, 2 * np.pi) - np.pi
    for step in range(2, len(angles)):
        gap = angles[step] - angles[0]
        windings = np.round((step * speed - gap) / (2 * np.pi))
        speed = (gap + 2 * np.pi * windings) / step
    return speed


def steady(rotation: Rotation) -> bool:
    """Whether every position adds the same rotation to the previous one."""
    unit = rotation.table / np.abs(rotation.table)
    rows = np.arange(len(unit))[:, None]
    made = unit[0] * np.exp(1j * rows * frequencies(rotation))
    return judge.same_function(made.view(float), unit.view(float)).ok


def base_of(rotation: Rotation) -> float | None:
    """The base of the frequencies `base ** (-i / half)`, also from float32 tables, or None."""
    angles, speed = rotation.angles, frequencies(rotation)
    half = angles.shape[1]
    if half < 2 or not 0 < abs(speed[1]) < 1:
        return None
    base = float(np.abs(speed[1])) ** -half
    places = np.arange(len(angles))[:, None] + start(angles * np.sign(speed[0]))
    unit = rotation.table / np.abs(rotation.table)
    for limit in (judge.SAME_FUNCTION, 4 * SINGLE):
        for guess in (float(f"{base:.6g}"), base):
            made = np.exp(1j * np.sign(speed[0]) * places * powers(guess, half))
            if (np.abs(made - unit) <= limit * np.maximum(places, 1)).all():
                return guess
    return None


def powers(base: float, half: int) -> np.ndarray:
    """Frequencies `base ** (-i / half)` of all pairs."""
    return base ** (-np.arange(half) / half)


def single(values: np.ndarray) -> bool:
    """Whether all values are float32, to `EXACT`, and not all trivially so."""
    rounded = values.astype(np.float32).astype(np.float64)
    trivial = np.abs(values * 1024 - np.round(values * 1024)) < EXACT
    is_float32 = np.abs(values - rounded) <= EXACT * np.abs(values) + np.finfo(float).eps
    return bool(is_float32.all() and not trivial.all())


def wrong_tables(rotation: Rotation) -> Iterator[tuple[str, np.ndarray]]:
    """Tables of angles that typical mistakes produce."""
    angles = rotation.angles
    yield "not rotated", np.zeros_like(angles)
    yield "rotated the other way", -angles
    step = np.angle(np.exp(1j * (angles[1:2] - angles[:1]))) if len(angles) > 1 else angles * 0
    rows = np.arange(len(angles))[:, None]
    yield "one too high", angles + step
    yield "one too low", angles - step
    yield "counted from zero", rows * step
    yield "counted from one", (rows + 1) * step
    yield "in reversed order", angles[::-1]
    yield "all of them the first", np.repeat(angles[:1], len(angles), 0)
    yield "rotated twice", 2 * angles
    yield "rotated by half the angle", angles / 2
    yield "frequencies in reversed order", angles[:, ::-1]
    yield from _rounded(rotation)
    half, places, torch_base = angles.shape[1], rows + start(angles), base_of(rotation)
    torch_text = "" if torch_base is None else f", where torch's is {torch_base:.8g}"
    for base in BASES:
        yield f"another base of the angles, {base:g}{torch_text}", places * powers(base, half)
        over = max(half - 1, 1)
        yield f"base {base:g} over the width less one", places * base ** (-np.arange(half) / over)
        yield f"base {base:g}, twice the exponent", places * base ** (-np.arange(half) * 2 / half)
    yield "twice the exponent", places * np.square(np.mod(step, 2 * np.pi))
    yield "half the exponent", places * np.sqrt(np.mod(step, 2 * np.pi))
    yield "angles in float32", angles.astype(np.float32).astype(np.float64)


def _rounded(rotation: Rotation) -> Iterator[tuple[str, np.ndarray]]:
    """Float32 frequencies where torch has float64, or the reverse."""
    angles, speed, base = rotation.angles, frequencies(rotation), base_of(rotation)
    if base is None:
        return
    exact = np.sign(speed[0]) * powers(base, len(speed))
    places = np.arange(len(angles))[:, None] + start(angles * np.sign(speed[0]))
    narrow = narrowed(rotation)
    if narrow:
        yield narrow_in_torch(narrow), places * exact
    else:
        yield narrow_in_flax("frequencies"), places * exact.astype(np.float32).astype(np.float64)


def narrowed(rotation: Rotation, speed: np.ndarray | None = None) -> str:
    """What torch or Flax computed in float32: frequencies, tables or angles; or ""."""
    if steady(rotation):
        return "frequencies" if single(np.abs(frequencies(rotation))) else ""
    if single(np.real(rotation.table)) and single(np.imag(rotation.table)):
        return "cosines and sines"
    speed = frequencies(rotation) if speed is None else speed
    full = (np.arange(len(rotation.angles))[:, None] + start(rotation.angles)) * speed
    windings = np.round((full - rotation.angles) / (2 * np.pi))
    return "angles" if single(rotation.angles + 2 * np.pi * windings) else ""


def narrow_in_torch(what: str) -> str:
    """Hint for float32 values in torch."""
    return f"{what} computed in float32 in torch, a buffer made outside the call, not in Flax"


def narrow_in_flax(what: str) -> str:
    """Hint for float32 values in Flax."""
    return f"{what} computed in float32 in Flax, a buffer made outside the call, not in torch"


def difference(torch: Rotation, flax: Rotation) -> str:
    """Describes Flax's measured rotation relative to torch's, or ""."""
    if (torch.pairing, torch.width) != (flax.pairing, flax.width):
        return ""
    one, two = frequencies(torch), frequencies(flax)
    close = np.abs(torch.table - flax.table) <= 4 * SINGLE * len(one) * len(torch.table)
    if close.all():
        torch_note, flax_note = narrowed(torch, two), narrowed(flax, one)
        if bool(torch_note) != bool(flax_note):
            return narrow_in_torch(torch_note) if torch_note else narrow_in_flax(flax_note)
    if not (steady(torch) and steady(flax)):
        return ""
    right, base = base_of(torch), base_of(flax)
    if right is not None and base is not None and right != base:
        hint = f"another base of the angles, {base:.8g}, where torch's is {right:.8g}"
        squared = abs(base / right**2 - 1) < SINGLE
        return f"{hint}, as by twice the exponent" if squared else hint
    times = float(np.vdot(one, two) / np.vdot(one, one)) if one.any() else 1.0
    if judge.same_function(times * one, two).ok and times != 1:
        known = {-1.0: "rotated the other way: ", 2.0: "rotated twice: "}.get(round(times, 6), "")
        return f"{known}positions, or frequencies, {times:.6g} times torch's"
    return ""
