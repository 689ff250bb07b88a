"""Faults in splitting a fused projection into queries, keys, values or a gate."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from ....taps import POINTS
from ... import judge
from .evidence import Evidence, Guesses
from .recompute import Attention
from .rotation import Rotation, measured


@dataclass(frozen=True)
class Cut:
    """A projection split into parts with heads.

    Attributes:
      name: name of the projection.
      order: order of its axes, for example "[3, H, D]".
      parts: each `B H T D`, with heads repeated as the attention uses them.
    """

    name: str
    order: str
    parts: tuple[np.ndarray, ...]


def projections(evidence: Evidence) -> Iterator[tuple[str, np.ndarray]]:
    """Submodule outputs in the same module, `B T C`, and concatenations of those with one input."""
    owner, groups = evidence.owner, {}
    for name, value in evidence.truth.taps.items():
        inside = name.startswith(f"{owner}." if owner else "")
        call = evidence.truth.calls[name]
        if not inside or value.ndim < 2 or not value.size or call.kind in POINTS:
            continue
        yield name, value
        source = call.inputs.get("0")
        if source is not None and source.dtype.kind == "f":
            groups.setdefault((source.tobytes(), value.shape[:-1]), []).append((name, value))
    for group in groups.values():
        if 2 <= len(group) <= 4:
            names = ", ".join(name for name, _ in group)
            yield f"{names} side by side", np.concatenate([x for _, x in group], axis=-1)


def cuts(name: str, made: np.ndarray, heads: int, width: int) -> Iterator[Cut]:
    """All possible orders of the axes (parts, heads, components) of `made`."""
    length, whole = made.shape[-2:]
    flat = made.reshape(-1, length, whole)
    for fewer in (n for n in range(1, heads + 1) if heads % n == 0):
        count, rest = divmod(whole, fewer * width)
        if rest or not 2 <= count <= 4:
            continue
        head = "H" if fewer == heads else "K"
        sizes = {str(count): count, head: fewer, "D": width}
        for order in permutations(sizes):
            split = flat.reshape(*flat.shape[:2], *(sizes[axis] for axis in order))
            axes = [2 + order.index(axis) for axis in (str(count), head, "D")]
            parts = split.transpose(axes[0], 0, axes[1], 1, axes[2])
            parts = (np.repeat(part, heads // fewer, axis=1) for part in parts)
            yield Cut(name, f"[{', '.join(order)}]", tuple(parts))
    yield from _grouped(name, flat, heads, width)


def _grouped(name: str, flat: np.ndarray, heads: int, width: int) -> Iterator[Cut]:
    """Splits with fewer keys and values than queries: concatenated, or interleaved by group."""
    fewer, rest = divmod(flat.shape[-1] - heads * width, 2 * width)
    if rest or fewer < 1 or fewer >= heads or heads % fewer:
        return
    group = heads // fewer

    def parts(*pieces: np.ndarray) -> tuple[np.ndarray, ...]:  # B T K n D
        laid_out = (np.moveaxis(x.reshape(*flat.shape[:2], -1, width), 2, 1) for x in pieces)
        return tuple(np.repeat(x, heads // x.shape[1], axis=1) for x in laid_out)

    ends = (heads * width, (heads + fewer) * width)
    yield Cut(name, "[H + K + K, D]", parts(*np.split(flat, ends, axis=-1)))
    split = flat.reshape(*flat.shape[:2], fewer, group + 2, width)
    grouped = (split[..., :group, :], split[..., group, :], split[..., group + 1, :])
    yield Cut(name, "[K, H / K + 2, D]", parts(*grouped))


@dataclass(frozen=True)
class TorchCut:
    """How torch computes a point: the split among `cuts`, the part of it, and the rotation."""

    cuts: tuple[Cut, ...]
    cut: Cut
    part: int
    turning: Rotation | None

    def others(self) -> Iterator[tuple[str, Cut]]:
        """The other splits of the same projection, with descriptions."""
        for cut in self.cuts:
            if cut.order != self.cut.order and len(cut.parts) == len(self.cut.parts):
                name = self.cut.name
                other = f"{name} cut as {cut.order}, where torch cuts {self.cut.order}"
                yield f"{other}: another order of its axes", cut

    def made(self, cut: Cut, part: int | None = None) -> np.ndarray:
        """The point, `B H T D`, computed with another split."""
        x = cut.parts[self.part if part is None else part]
        return self.turning(x) if self.turning else x


def find_torch_cut(evidence: Evidence, want: np.ndarray) -> TorchCut | None:
    """Finds torch's split for a point, `B H T D`, by trying all candidates."""
    heads, length, width = want.shape[1:]
    for name, made in projections(evidence):
        if made.shape[-2] != length or made.shape[-1] % width or made.shape[-1] == width:
            continue
        candidates = tuple(cuts(name, made, heads, width))
        for cut in candidates:
            for place, part in enumerate(cut.parts):
                if part.shape != want.shape:
                    continue
                if judge.same_function(part, want).ok:
                    return TorchCut(candidates, cut, place, None)
                turning = measured(part, want)
                if turning is not None:
                    return TorchCut(candidates, cut, place, turning)
    return None


def by_heads(evidence: Evidence) -> Iterator[np.ndarray]:
    """Torch's value as `B H T D`, in each possible interpretation of its axes."""
    plain, heads = evidence.plain, evidence.heads()
    if plain.ndim >= 3 and plain.size and evidence.point in POINTS[:3]:
        if math.prod(plain.shape[:-2]) % heads == 0:  # otherwise not split into heads
            yield plain.reshape(-1, heads, *plain.shape[-2:])
    elif evidence.point == "input" and plain.ndim == 4 and plain.size:
        yield plain
        yield np.swapaxes(plain, 1, 2)


def recut(evidence: Evidence) -> Guesses:
    """Guesses: a point, or a submodule's input, split with another order of axes."""
    for turned_by, want in enumerate(by_heads(evidence)):
        torch_cut = find_torch_cut(evidence, want)
        if torch_cut is None:
            continue
        for what, cut in torch_cut.others():
            made = torch_cut.made(cut)
            yield what, np.swapaxes(made, 1, 2) if turned_by else made.reshape(evidence.plain.shape)
        for part in range(len(torch_cut.cut.parts)):
            if part != torch_cut.part and torch_cut.cut.parts[part].shape == want.shape:
                made = torch_cut.made(torch_cut.cut, part)
                made = np.swapaxes(made, 1, 2) if turned_by else made.reshape(evidence.plain.shape)
                what = (
                    f"part {part} of {torch_cut.cut.name}, where torch takes part {torch_cut.part}"
                )
                yield f"{what}: {_other_part(evidence, made)}", made
        return


def _other_part(evidence: Evidence, made: np.ndarray) -> str:
    """Describes which point a part of a projection is in torch."""
    for point in POINTS[:3]:
        other = evidence.at_point(point)
        if point != evidence.point and other is not None and other.size == made.size:
            if judge.same_function(made.reshape(other.shape), other).ok:
                return f"the {point} in its place"
    return "another order of the parts"


def recut_together(
    evidence: Evidence, attention: Attention
) -> Iterator[tuple[str, Mapping[str, np.ndarray]]]:
    """Guesses: all points split from one projection, and a gate, with another order of axes."""
    known = {}
    for point in POINTS[:3]:
        if point in attention.parts:
            at = evidence.at(point)
            torch_cut = next((find_torch_cut(at, want) for want in by_heads(at)), None)
            known |= {point: torch_cut} if torch_cut else {}
    for one in known.values():
        for what, cut in one.others():
            changed = {
                point: torch_cut.made(_same(torch_cut, cut)).reshape(attention.parts[point].shape)
                for point, torch_cut in known.items()
                if torch_cut.cut.name == one.cut.name and torch_cut.cut.order == one.cut.order
            }
            taken = {
                torch_cut.part for torch_cut in known.values() if torch_cut.cut.name == one.cut.name
            }
            yield what, changed
            for part in set(range(len(cut.parts))) - taken:
                gate = _gate(attention, evidence, one.cut.parts[part], cut.parts[part])
                yield what, changed | gate


def _same(torch_cut: TorchCut, cut: Cut) -> Cut:
    return next(x for x in torch_cut.cuts if x.order == cut.order)


def _gate(
    attention: Attention, evidence: Evidence, right: np.ndarray, wrong: np.ndarray
) -> dict[str, np.ndarray]:
    """The factor by which contexts change if a gate is split differently."""
    if "context" not in attention.parts:
        return {}
    one, two = attention.merged(right), attention.merged(wrong)
    ratio = attention.ratio(evidence)
    for act in (lambda x: 1 / (1 + np.exp(-x)), lambda x: x / (1 + np.exp(-x)), np.tanh):
        if ratio is not None and judge.same_function(act(one), ratio).ok:
            return {"gate": act(two) / act(one)}
    return {}
