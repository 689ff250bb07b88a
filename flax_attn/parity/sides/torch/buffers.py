"""Finds the float64 values of buffers that torch has rounded, such as `inv_freq` in float32.

Moved to float64, a module keeps the rounded values, while a port may compute them in float64: both
are right, and all results differ by 1e-8. They are the same function if torch, with each buffer
moved by a few units in its last place, gives Flax's results to the limit of float64. The move
follows from the results by least squares, since a few units change them linearly.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ... import judge
from ..match import reuse_layouts
from ..original import Arrays, Original
from ..pair import Pair, matches
from ..run import Run, is_floating

MAX_ELEMENTS = 256  # torch runs once for each
MAX_SAMPLES = 1024  # elements of one output or tap that take part in the fit
ROUNDS = 3
RCOND = 1e-8
UNROUNDED = (
    "{} of torch is rounded to {}: float64 results are compared with it moved by up to {:.1g} of "
    "its units in the last place, which gives Flax's results"
)
NARROW = ("float32", "bfloat16", "float16")


# Flax's and torch's value of outputs and taps.
Values = dict[str, tuple[np.ndarray, np.ndarray]]


class Unrounded(NamedTuple):
    """The torch side with its buffers moved, and a note for each of them."""

    original: Original
    notes: list[str]


def unrounded(pair: Pair, got: Run, truth: Run) -> Unrounded | None:
    """Moves torch's rounded buffers so that its float64 results are Flax's.

    Returns:
      None if no such move exists, or torch cannot be run again.
    """
    fit = _Fit(pair, got, truth, _buffers(pair, truth))
    move = fit.solve() if 0 < fit.size <= MAX_ELEMENTS else None
    original = None if move is None else pair.original.with_buffers(fit.moved(move))
    if move is None or original is None:
        return None
    dtypes = {source.name: source.dtype for source in pair.original.sources}
    most = {name: float(np.abs(by).max(initial=0.0)) for name, by in fit.split(move).items()}
    notes = [UNROUNDED.format(name, dtypes[name], by) for name, by in most.items() if by]
    return Unrounded(original, notes)


def _buffers(pair: Pair, truth: Run) -> Arrays:
    """Torch's rounded buffers that Flax does not take over and that no call changes."""
    carried = {name for move in (pair.plan.moves if pair.plan else ()) for name in move.sources}
    kinds = {source.name: source for source in pair.original.sources}
    return {
        name: value
        for name, value in pair.original.buffers().items()
        if kinds[name].kind == "buffer" and kinds[name].dtype in NARROW
        if name not in carried and name not in truth.changed
    }


class _Fit:
    """Torch's results as a function of its buffers' elements, moved by units in the last place.

    Equal buffers, as of repeated layers, are moved together. Zeros and infinities are exact.
    """

    def __init__(self, pair: Pair, got: Run, truth: Run, buffers: Mapping[str, np.ndarray]):
        self.pair, self.got, self.truth, self.buffers = pair, got, truth, buffers
        self.matches = list(matches(got, truth, pair.names)) if buffers else []
        self.first: dict[str, str] = {}
        known: dict[tuple, str] = {}
        for name, x in buffers.items():
            key = x.dtype.name, x.shape, x.tobytes()
            self.first[name] = known.setdefault(key, name)
        self.places = {
            name: np.flatnonzero(np.isfinite(x) & (x != 0))
            for name, x in buffers.items()
            if self.first[name] == name
        }
        self.size = sum(map(len, self.places.values()))

    def split(self, move: np.ndarray) -> dict[str, np.ndarray]:
        """The part of a move that belongs to each buffer."""
        ends = np.cumsum([len(places) for places in self.places.values()])[:-1]
        parts = dict(zip(self.places, np.split(move, ends), strict=True))
        return {name: parts[first] for name, first in self.first.items()}

    def moved(self, move: np.ndarray) -> dict[str, np.ndarray]:
        """The buffers in float64, each element moved by so many units in its last place."""
        values = {}
        for name, by in self.split(move).items():
            x, places = self.buffers[name], self.places[self.first[name]]
            wide = x.astype(np.float64).ravel()
            # Sines near zero have the error of their angle, which is one of the whole table.
            size = np.abs(wide[places])
            size = size.max() if (wide < 0).any() and (wide > 0).any() else size
            wide[places] += by * float(ml_dtypes.finfo(x.dtype).eps) * size
            values[name] = wide.reshape(x.shape)
        return values

    def run(self, move: np.ndarray) -> Values | None:
        """Flax's and torch's values by name; None if torch cannot be run again."""
        original = self.pair.original.with_buffers(self.moved(move))
        if original is None:
            return None
        return self.values(original.run("float64", self.truth.keeps)[0])

    def values(self, run: Run) -> Values:
        laid_out = reuse_layouts(self.matches, self.got, run)
        taps = {f"tap {name}": (match.got, match.value) for name, _, match in laid_out}
        outputs = {
            f"output {name}": (self.got.outputs[name], value)
            for name, value in run.outputs.items()
            if name in self.got.outputs and is_floating(value)
        }
        # Gradients tell what outputs do not: of a sum with a weight, the part that it drops.
        gradients = {
            f"gradient {name}": (self.got.gradients[name], value)
            for name, value in self.pair.names.gradients(run.gradients).items()
            if name in self.got.gradients
        }
        pairs = {**taps, **outputs, **gradients}.items()
        return {k: (x, y) for k, (x, y) in pairs if x.shape == y.shape and np.isfinite(y).any()}

    def solve(self) -> np.ndarray | None:
        """Returns the move that explains all results which it may explain, or None."""
        most = judge.BUFFER_UNITS
        start = self.values(self.truth)
        farther = self.run(most * np.random.default_rng(0).choice((-1.0, 1.0), self.size))
        names = self._explicable(start, farther) if farther is not None else []
        if all(judge.error(*start[name]) <= judge.SAME_FUNCTION for name in names):
            return None
        sample = _Sample(start, names)
        wants, base = sample(start, 0), sample(start, 1)
        columns = [self.run(most * unit) or start for unit in np.eye(self.size)]
        slopes = np.stack([sample(x, 1) - base for x in columns], -1) / most
        move = np.zeros(self.size)
        for _ in range(ROUNDS):
            move += np.linalg.lstsq(slopes, wants - base, RCOND)[0]
            now = self.run(move) if np.abs(move).max() <= most else None
            if now is None:
                return None
            if all(judge.error(*now[name]) <= judge.SAME_FUNCTION for name in names):
                return move
            base = sample(now, 1)
        return None

    def _explicable(self, start: Values, farther: Values) -> list[str]:
        """Names of the values whose error is no larger than what the largest move changes."""
        changes = {
            name: judge.error(farther[name][1], want)
            for name, (_, want) in start.items()
            if name in farther
        }
        limits = {k: max(judge.SAME_FUNCTION, judge.NOISE * by) for k, by in changes.items()}
        return [name for name, limit in limits.items() if judge.error(*start[name]) <= limit]


class _Sample:
    """Maps values to a vector of some of their elements, relative to the norm of each value."""

    def __init__(self, values: Values, names: Sequence[str]):
        drawn = np.random.default_rng(0)
        self.picks: dict[str, tuple[np.ndarray, float]] = {}
        for name in names:
            want = judge.real(values[name][1]).ravel()
            finite = np.flatnonzero(np.isfinite(want))
            few = drawn.choice(finite, min(MAX_SAMPLES, finite.size), replace=False)
            self.picks[name] = few, float(np.linalg.norm(want[finite])) or 1.0

    def __call__(self, values: Values, side: int) -> np.ndarray:
        """`side`: 0 for Flax's values, 1 for torch's."""
        flat = {name: judge.real(values[name][side]).ravel() for name in self.picks}
        return np.concatenate([flat[k][few] / size for k, (few, size) in self.picks.items()])
