"""Faults of rotary positions: torch's rotation is measured from its taps, then varied."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ....taps import POINTS
from ... import judge
from .attention import orders
from .evidence import Evidence, Guesses, Values
from .explains import in_torch_layout
from .fitting import parallel, settled
from .fused import find_torch_cut, recut
from .recompute import Attention, reach, untapped_points
from .rotation import (
    BASES,
    Rotation,
    base_of,
    difference,
    frequencies,
    joined,
    measured,
    pairs,
    powers,
    start,
    wrong_tables,
)

# Maximum number of scores for which a base is fitted; initial grid of its decimal logarithm.
LARGE, GRID = 1 << 18, np.linspace(1, 8, 113)


def rotated_heads(evidence: Evidence) -> Guesses:
    """Guesses for queries, keys and values: another rotation, or another split into heads."""
    for name, x in sources(evidence):
        want = evidence.plain.reshape(x.shape)
        turning = measured(x, want)
        if turning is not None:
            for what, made in _rotation_guesses(evidence, Rotated(x, turning)):
                yield what, made.reshape(evidence.plain.shape)
        elif judge.same_function(x, want).ok:
            yield from _rotated_values(evidence, x)
        yield from _splits(evidence, name, turning)
    yield from recut(evidence)
    yield from _other_heads(evidence)


class Rotated(NamedTuple):
    """A value before rotation, `B N T h`, and torch's rotation of it."""

    x: np.ndarray
    turning: Rotation


def sources(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """Submodule outputs of the same attention that the point may derive from, as `B N T h`."""
    for name, value in _projections(evidence):
        heads, group = _heads(evidence, value)
        if heads:
            yield name, _split(value, heads, group)
        elif value.ndim == 4 and value.shape[1] == evidence.plain.shape[-2]:
            x = np.swapaxes(value, 1, 2)  # B N T h
            if x.shape[-1] == evidence.plain.shape[-1] and evidence.plain.size % x.size == 0:
                yield name, np.repeat(x, evidence.plain.size // x.size, axis=1)


def _projections(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    owner = evidence.owner
    for name, value in evidence.truth.taps.items():
        inside = name.startswith(f"{owner}." if owner else "") and value.ndim >= 2
        kind = evidence.truth.calls[name].kind
        if inside and value.size and evidence.plain.size % value.size == 0 and kind not in POINTS:
            yield name, value


def _heads(evidence: Evidence, made: np.ndarray) -> tuple[int, int]:
    """Number of heads in a projection, and how often each is repeated in the point."""
    width = evidence.plain.shape[-1]
    if made.shape[-1] % width or made.shape[-2] != evidence.plain.shape[-2]:
        return 0, 0
    return made.shape[-1] // width, evidence.plain.size // made.size


def _split(made: np.ndarray, heads: int, group: int) -> np.ndarray:
    """Reshapes `(B T) (N h)`, or already split heads, to B N T h, repeating shared heads."""
    if made.ndim == 4 and heads == 1:
        return np.repeat(made, group, axis=1)
    split = made.reshape(-1, made.shape[-2], heads, made.shape[-1] // heads)
    return np.repeat(np.swapaxes(split, 1, 2), group, axis=1)


def find_rotated(evidence: Evidence) -> Rotated | None:
    """Finds torch's rotation of a projection, or of a part of one, to the point."""
    for _, x in sources(evidence):
        turning = measured(x, evidence.plain.reshape(x.shape))
        if turning is not None:
            return Rotated(x, turning)
    want = evidence.plain.reshape(-1, evidence.heads(), *evidence.plain.shape[-2:])
    torch_cut = find_torch_cut(evidence, want)
    if torch_cut is None or torch_cut.turning is None:
        return None
    return Rotated(torch_cut.cut.parts[torch_cut.part], torch_cut.turning)


def _rotation_guesses(evidence: Evidence, rotation: Rotated) -> Values:
    x, turning = rotation
    flax = measured(x, in_torch_layout(evidence).reshape(x.shape))
    hint = difference(turning, flax) if flax is not None else ""
    if flax is not None and hint:
        yield f"rotary positions, {hint}", flax(x)
    yield from _other_positions(rotation)
    yield from _other_base(evidence, rotation)


def _other_base(evidence: Evidence, rotation: Rotated) -> Values:
    """Another base, fitted independently of the share of the fault."""
    torch_base = base_of(rotation.turning)
    if torch_base is None or rotation.x.size > LARGE:
        return
    start, got = rotation.turning(rotation.x), in_torch_layout(evidence).reshape(rotation.x.shape)
    base = parallel(lambda at: by_base(rotation, 10**at), start, got, GRID)
    for guess in () if base is None else (float(f"{10**base:.6g}"), 10**base):
        if f"{guess:.8g}" != f"{torch_base:.8g}":
            what = f"another base of the angles, {guess:.8g}, where torch's is {torch_base:.8g}"
            yield f"rotary positions, {what}", by_base(rotation, guess)


def _widths(rotation: Rotated) -> Values:
    """Other widths: more or fewer components of each head rotated than in torch."""
    x, turning = rotation
    torch_width, head = turning.width, x.shape[-1]
    base = base_of(turning)
    bases = BASES if base is None else (base, *(b for b in BASES if b != base))
    angles = turning.angles
    sign = np.sign(frequencies(turning)[0]) or 1.0
    places = sign * (np.arange(len(angles))[:, None] + start(angles * sign))
    for width in (w for w in range(2, head + 1, 2) if w != torch_width):
        half = width // 2
        whole = " (the whole head)" if width == head else ""
        what = (
            f"another width: {width} numbers of each head rotated{whole}, "
            f"torch rotates {torch_width}"
        )
        speeds = {"": powers(bases[0], half)}
        speeds |= {f", by base {b:g}": powers(b, half) for b in bases[1:]}
        if base is not None:
            speeds[", by torch's angles"] = base ** (-np.arange(half) / angles.shape[1])
        for more, speed in speeds.items():
            table = np.exp(1j * places * speed)
            yield f"{what}{more}", replace(turning, table=table, width=width)(x)


def _other_positions(rotation: Rotated) -> Values:
    """The same positions with other pairs, angles or widths."""
    x, turning = rotation
    other = "neighbours" if turning.pairing == "halves" else "halves"
    yield (
        f"rotary pairs of {other}, where torch rotates {turning.pairing}",
        replace(turning, pairing=other)(x),
    )
    for what, table in wrong_tables(turning):
        yield f"rotary positions, {what}", turning.by(table)(x)
    for what, made in (*_widths(rotation), *_half_rotated(x, turning)):
        yield f"rotary positions, {what}", made


def _half_rotated(x: np.ndarray, turning: Rotation) -> Values:
    """Partial rotations, and the tables of one pairing with the pairs of the other."""
    angles, half = turning.angles, turning.width // 2
    few = np.where(np.arange(half) < half // 2, angles, 0.0)
    yield "half of the pairs not rotated", turning.by(few)(x)
    width = 2 * (half // 2)
    first = replace(turning, table=turning.table[:, : half // 2], width=width)
    yield "half of the width rotated", first(x) if width else x
    part, rest = x[..., : turning.width], x[..., turning.width :]
    (a, b), (c, d) = pairs(part, "halves"), pairs(part, "neighbours")
    by_halves, by_neighbours = joined(-b, a, "halves"), joined(-d, c, "neighbours")
    twice, each = np.concatenate([angles] * 2, axis=-1), np.repeat(angles, 2, axis=-1)
    for table, quarter in ((twice, by_neighbours), (each, by_halves)):
        made = part * np.cos(table) + quarter * np.sin(table)
        yield "tables of one pairing, pairs of the other", np.concatenate([made, rest], axis=-1)


def rotated_together(
    evidence: Evidence, attention: Attention
) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    """Queries and keys with the same fault in their rotations."""
    rotations = {point: find_rotated(evidence.at(point)) for point in ("query", "key")}
    known = {point: rotation for point, rotation in rotations.items() if rotation is not None}
    if len(known) < 2:
        return
    shapes = {point: attention.parts[point].shape for point in known}
    ways = [list(_other_positions(rotation)) for rotation in known.values()]
    if [what for what, _ in ways[0]] == [what for what, _ in ways[1]]:
        for (what, query), (_, key) in zip(*ways, strict=True):
            made = dict(zip(known, (query, key), strict=True))
            yield what, {point: x.reshape(shapes[point]) for point, x in made.items()}


def fitted_base(evidence: Evidence) -> Guesses:
    """The base of the rotation of queries and keys, fitted to the differing tap."""
    attention = Attention.of(evidence)
    reach_fn = None if attention is None else reach(evidence, attention)
    if (
        attention is None
        or reach_fn is None
        or not {"query", "key"} <= {*untapped_points(evidence)}
    ):
        return
    parts = attention.parts
    rotations = {point: find_rotated(evidence.at(point)) for point in ("query", "key")}
    known = {point: rotation for point, rotation in rotations.items() if rotation is not None}
    if len(known) < 2 or parts["scores"].size > LARGE:
        return
    torch_base = base_of(known["query"].turning)
    if torch_base is None:
        return

    def made(base: float) -> np.ndarray:
        rotated_heads = {
            p: by_base(rotation, base).reshape(parts[p].shape) for p, rotation in known.items()
        }
        return reach_fn(attention.recompute(rotated_heads))

    laid_out = evidence.layout.value
    exponent = parallel(lambda at: laid_out(made(10**at)), evidence.want, evidence.got, GRID)
    if exponent is None:
        return
    exact = 10 ** settled(lambda at: laid_out(made(10**at)), exponent, evidence.got)
    for guess in (float(f"{10**exponent:.6g}"), 10**exponent, exact):
        what = f"another base of the angles, {guess:.8g}, where torch's is {torch_base:.8g}"
        yield f"rotary positions, {what}", made(guess)


def by_base(rotation: Rotated, base: float) -> np.ndarray:
    """Rotates with another base."""
    angles = rotation.turning.angles
    sign = np.sign(frequencies(rotation.turning)[0])
    places = np.arange(len(angles))[:, None] + start(angles * sign)
    return rotation.turning.by(sign * places * powers(base, angles.shape[1]))(rotation.x)


def _rotated_values(evidence: Evidence, x: np.ndarray) -> Guesses:
    """Values rotated like the keys."""
    key = evidence.at_point("key")
    if evidence.point != "value" or key is None or key.shape[-1] != x.shape[-1]:
        return
    at = evidence.at("key")
    for name, base in sources(at):
        turning = measured(base, key.reshape(base.shape))
        if turning is not None and turning.table.shape[0] == x.shape[-2]:
            made = turning(x).reshape(evidence.plain.shape)
            yield f"rotary positions, values rotated as {name} is", made


def _splits(evidence: Evidence, name: str, turning: Rotation | None) -> Guesses:
    """Other splits of a projection into heads, followed by torch's rotation."""
    made = evidence.truth.taps[name]
    heads, group = _heads(evidence, made)
    if not heads or made.ndim == 4:
        return
    length, width = made.shape[-2], made.shape[-1] // heads
    ways = {
        "heads interleaved: the width before the heads": np.moveaxis(
            made.reshape(-1, length, width, heads), -1, 1
        ),
        "heads cut from positions: no transpose": made.reshape(-1, heads, length, width),
    }
    for what, x in ways.items():
        x = np.repeat(x, group, axis=1)
        done = turning(x) if turning else x
        yield f"{what} (of {name})", done.reshape(evidence.plain.shape)


def _other_heads(evidence: Evidence) -> Guesses:
    """Other head orders: tiled or permuted heads, keys or values instead of queries."""
    heads, plain = evidence.heads(), evidence.plain
    if heads > 1 and plain.shape[0] % heads == 0:
        split = plain.reshape(-1, heads, *plain.shape[1:])
        for what, order in orders(heads):
            yield f"heads in another order: {what}", split[:, order].reshape(plain.shape)
        yield "one head for all", np.repeat(split[:, :1], heads, 1).reshape(plain.shape)
    for point in ("query", "key", "value"):
        other = evidence.at_point(point)
        if point != evidence.point and other is not None and other.shape == plain.shape:
            yield f"the {point} in its place", other
