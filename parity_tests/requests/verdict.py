"""What one backend gave, beside the oracle: within the judge's limits, or twice the noise."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flax_attn.parity import judge

from . import oracle
from .programs import Program, Request

DRAWS = 3  # runs of the oracle with every operation moved
HUGE = 1e6  # an lse beyond it is a fill's: judged apart, or it would hide all others


class Row(NamedTuple):
    """One array's verdict: its error over its limit, and whether the limit was the noise.

    `noise` is the oracle's own, asked only where the judge's limit is exceeded, else None.
    """

    name: str
    error: float
    limit: float
    noise: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """At most one for what is equal."""
        ratio = self.error / self.limit if self.limit else (np.inf if self.error else 0.0)
        return float(ratio) if np.isfinite(ratio) else np.inf


class Truth:
    """The oracle's answers to one request: the truth, plain arithmetic's, and noisy ones."""

    def __init__(self, program: Program, request: Request):
        self.program, self.inputs = program, request.truth
        self.floats = request.floats
        self.exact = self._named(oracle.attention(self.inputs))
        for name, x in self.exact.items():
            if np.isnan(x).any() or (name != "lse" and np.isinf(x).any()):
                raise FloatingPointError(f"the oracle itself gives NaN or Inf in {name}")
        self.exact = {n: x if "lse" in n else self._held(x) for n, x in self.exact.items()}

    def _held(self, x: np.ndarray) -> np.ndarray:
        """Infinite where the dtype holds no such number; gradients of float16 come there."""
        most = float(ml_dtypes.finfo(self.program.dtype).max)
        return np.where(np.abs(x) > most, np.sign(x) * np.inf, x)

    @cached_property
    def plain(self) -> dict[str, np.ndarray]:
        """What float32 arithmetic gives, rounded to the dtype: what a narrow dtype can do."""
        named = self._named(oracle.attention(narrowed(self.inputs)))
        wide = {"lse", "huge lse"}
        return {n: x if n in wide else rounded(x, self.program.dtype) for n, x in named.items()}

    @cached_property
    def noisy(self) -> list[dict[str, np.ndarray]]:
        """The oracle with every operation moved by up to one unit in the last place.

        And, in narrow dtypes, plain arithmetic that adds one after the other: a long sum in a
        kernel's order errs by more than numpy's, which adds in pairs.
        """
        eps = float(ml_dtypes.finfo(self.program.wide).eps)
        found = [
            self._named(oracle.attention(self.inputs, oracle.noise(seed, eps)))
            for seed in range(DRAWS)
        ]
        if self.program.wide == "float32":
            found.append(self._named(oracle.attention(narrowed(self.inputs), oracle.in_order)))
        if self.program.dtype == self.program.wide:
            return found
        dtype = self.program.dtype
        return [{n: x if "lse" in n else rounded(x, dtype) for n, x in y.items()} for y in found]

    def noise(self, name: str, scale: float | None) -> float:
        """The largest error of a noisy run; nothing where noise makes NaN or Inf."""
        errors = (judge.error(y[name], self.exact[name], scale) for y in self.noisy)
        return max(e if np.isfinite(e) else 0.0 for e in errors)

    def _named(self, answer: dict[str, Any]) -> dict[str, np.ndarray]:
        floats = {"q": 0, "k": 0, "v": 0, **self.floats}
        grads = {name: answer[name] for name in floats}
        return dict(named(self.program, answer["o"], answer["lse"], grads, self._huge(answer)))

    def _huge(self, answer: dict[str, Any]) -> np.ndarray:
        if not hasattr(self, "huge"):
            lse = answer["lse"]
            self.huge = np.isfinite(lse) & (np.abs(np.where(np.isfinite(lse), lse, 0)) > HUGE)
        return self.huge


def named(
    program: Program, o: Any, lse: Any, grads: dict[str, Any], huge: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Every array by name, batch axes as one; gradients start with "d"."""

    yield "o", np.asarray(o).reshape(*huge.shape, program.h)
    lse = np.asarray(lse).reshape(huge.shape)
    yield "lse", np.where(huge, 0, lse)
    if huge.any():
        yield "huge lse", np.where(huge, lse, 0)
    for name, x in grads.items():
        if name == "score":
            leaves = [(f"{i}.{j}", y) for i, step in enumerate(x) for j, y in enumerate(step)]
            yield from ((f"dscore.{at}", np.asarray(y)) for at, y in leaves)
        else:
            x = np.asarray(x)
            yield f"d{name}", x.reshape(huge.shape[0], *x.shape[-3:]) if name in "qkv" else x


def rows(truth: Truth, got: tuple[Any, Any, dict[str, Any]]) -> list[Row]:
    """The verdict on every array that a backend gave."""
    program = truth.program
    wrong = list(_structure(program, truth.floats, got))
    if wrong:
        return wrong
    arrays = dict(named(program, *got, truth.huge))
    grads = {name: x for name, x in truth.exact.items() if name.startswith("d")}
    found = []
    for name, want in truth.exact.items():
        scale = None
        if name in grads:
            scale = _gradient_scale(program, list(grads.values()), want)
        row = _judged(truth, name, arrays[name], want, scale, grads)
        if row.error > row.limit:
            noise = truth.noise(name, scale)
            row = row._replace(noise=noise, limit=max(row.limit, 2 * noise))
        found.append(row)
    return found


def _structure(program: Program, floats: dict, got: tuple) -> Iterator[Row]:
    """Shapes and dtypes, which are exact."""
    s, (o, lse, grads) = program.sizes, got
    lead = (*s.batch, s.T, s.N)
    wanted = [("o", o, (*lead, program.h), program.dtype), ("lse", lse, lead, program.wide)]
    for name, x in floats.items():
        if name != "score":
            wanted.append((f"d{name}", grads[name], x.shape, program.dtype))
    for name, x, shape, dtype in wanted:
        if x.shape != shape or str(x.dtype) != dtype:
            note = f"{x.dtype}{list(x.shape)} is not {dtype}{list(shape)}"
            yield Row(name, np.inf, 0.0, note=note)


def _gradient_scale(program: Program, grads: list[np.ndarray], own: np.ndarray) -> float:
    narrow = program.dtype != "float64"
    return judge.whole_gradient(grads) if narrow else judge.gradient_scale(grads, own)


def _judged(truth: Truth, name: str, got: Any, want: Any, scale: Any, grads: dict) -> Row:
    dtype = truth.program.dtype
    if dtype == "float64":
        verdict = judge.same_function(got, want, scale, zero=True)
        return Row(name, verdict.error, verdict.limit, note=verdict.note)
    if "lse" in name:
        dtype = "float32"
    if name in grads:
        apart = [truth.plain[n].astype(np.float64) - x for n, x in grads.items()]
        own = judge.whole_gradient(apart) / scale if scale else 0.0
    else:
        own = judge.error(truth.plain[name], want)
    verdict = judge.within_precision(got, own, want, dtype, scale, zero=True)
    return Row(name, verdict.error, verdict.limit, note=verdict.note)


def narrowed(given: oracle.Inputs) -> oracle.Inputs:
    """The same inputs, which a narrow dtype held exactly, in float32."""

    def narrow(x):
        is_float = isinstance(x, np.ndarray) and x.dtype == np.float64
        return x.astype(np.float32) if is_float else x

    changed = {name: narrow(getattr(given, name)) for name in given._fields}
    changed["floats"] = [[narrow(x) for x in step] for step in given.floats]
    return oracle.Inputs(**changed)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """As the dtype holds it, in float64."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(dtype).astype(np.float64)
