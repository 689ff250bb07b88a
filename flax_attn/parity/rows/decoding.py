"""Rows of decoding: each step compared with torch, and with Flax's own full forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .. import judge
from ..decode import Cut
from ..report import Row
from ..sides.run import Run
from ..sides.steps import Decoded, joined
from .values import value_of

OWN_STEPS = (
    "torch's own steps differ from its full forward pass in {} ({:.1e}): Flax's are held against "
    "the steps alone"
)


@dataclass(frozen=True)
class Place:
    """The first difference of a split.

    Attributes:
      cut: the split.
      step: index of the step, from 0.
      token: index among all tokens, from 0.
      row: indices of the axes before the token axis.
    """

    cut: Cut
    step: int
    token: int
    row: tuple[int, ...]

    def __str__(self) -> str:
        row = f", row {list(self.row)}" if self.row else ""
        return f"step {self.step + 1} of {self.cut}, token {self.token}{row}"


@dataclass(frozen=True)
class CutComparison:
    """One split compared with a reference: the report's row, and the first difference, if any.

    Attributes:
      against: "torch" or "whole", Flax's own full forward pass.
    """

    cut: Cut
    against: str
    row: Row
    place: Place | None


def comparisons(
    steps: Decoded,
    runs: tuple[Run, Run, Run],
    dtype: str,
    mode: str,
    noisy: Sequence[Run] = (),
) -> list[CutComparison]:
    """Compares each split with torch, and in float64 with Flax's own full forward pass.

    `noisy` are torch's full forward passes with perturbed rounding. If torch's own steps differ
    from its full forward pass for a split, only the steps are compared.
    """
    got, torch_output, truth = (run.outputs[steps.output] for run in runs)
    moved, axis, compared = [run.outputs[steps.output] for run in noisy], steps.axis, []
    for cut in steps.cuts:
        mine = steps.got[cut].outputs
        whole, owns, wants = ([*cut.pieces(x, axis)] for x in (got, torch_output, truth))
        owns = steps.torch[cut].outputs if steps.torch else owns
        wants = steps.truth[cut].outputs if steps.torch else wants
        moved_pieces = [[*cut.pieces(x, axis)] for x in moved]
        verdict, place = stepwise(cut, axis, mine, owns, wants, dtype, moved_pieces)
        compared.append(
            CutComparison(cut, "torch", Row(name_of(cut), "decode", dtype, mode, verdict), place)
        )
        if dtype == "float64" and step_gap(steps, cut, truth) is None:
            moved_pieces = [[*cut.pieces(got + (x - truth), axis)] for x in moved]
            verdict, place = stepwise(cut, axis, mine, whole, whole, dtype, moved_pieces)
            row = Row(f"{name_of(cut)}, Flax's whole", "decode", dtype, mode, verdict)
            compared.append(CutComparison(cut, "whole", row, place))
    return compared


def name_of(cut: Cut) -> str:
    """Name of the row that compares the steps of a split with torch."""
    return f"decoded {cut}"


def notes(steps: Decoded, truth: Run) -> list[str]:
    """A note for each split in which torch's own steps differ from its full forward pass."""
    errors = {cut: step_gap(steps, cut, truth.outputs[steps.output]) for cut in steps.cuts}
    return [OWN_STEPS.format(c, error) for c, error in errors.items() if error is not None]


def step_gap(steps: Decoded, cut: Cut, whole: np.ndarray) -> float | None:
    """Error of torch's own steps relative to its full forward pass; None if they agree."""
    outputs = joined(steps.truth[cut].outputs, steps.axis) if steps.truth else whole
    if outputs is None:
        return judge.INF
    verdict = judge.same_function(outputs, whole, fill=True)
    return verdict.error if verdict.differs else None


def stepwise(
    cut: Cut,
    axis: int,
    got: Sequence[np.ndarray],
    torch_output: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    dtype: str,
    moved: Sequence[Sequence[np.ndarray]] = (),
) -> tuple[judge.Verdict, Place | None]:
    """The verdict on the first step that differs, with its place; else on the worst step."""
    verdicts = []
    for i, parts in enumerate(zip(got, torch_output, want, strict=True)):
        verdict = value_of(*parts, dtype, [x[i] for x in moved])
        if verdict.differs:
            place, at = _first(cut, i, axis, parts, dtype)
            index = _in_whole(at or verdict.index, axis, cut.spans[i][0])
            note = f"first in {place}" + (f"; {verdict.note}" if verdict.note else "")
            values = {} if at is None else {"got": float(parts[0][at]), "want": float(parts[2][at])}
            return replace(verdict, index=index, note=note, **values), place
        verdicts.append(verdict)
    shown = [verdict for verdict in verdicts if verdict.shows] or verdicts
    return max(shown, key=lambda verdict: verdict.error), None


Index = tuple[int, ...] | None


def _first(
    cut: Cut, i: int, axis: int, parts: Sequence[np.ndarray], dtype: str
) -> tuple[Place, Index]:
    """The first token of a step that differs by itself, and the index of its worst element."""
    first, end = cut.spans[i]
    got, _, want = parts
    if got.shape != want.shape:
        return Place(cut, i, first, ()), None
    for token in range(end - first):
        at = [slice(None)] * want.ndim
        at[axis] = slice(token, token + 1)
        flax_value, torch_value, wanted = (x[tuple(at)] for x in parts)
        verdict = value_of(flax_value, torch_value, wanted, dtype)
        if verdict.differs and verdict.index is not None:
            index = list(verdict.index)
            index[axis] = token
            return Place(cut, i, first + token, tuple(index[: axis % want.ndim])), tuple(index)
    return Place(cut, i, first, ()), None


def _in_whole(index: Index, axis: int, first: int) -> Index:
    """Converts an index within a step to one among all tokens."""
    if index is None:
        return None
    return tuple(n + first * (i == axis % len(index)) for i, n in enumerate(index))
