"""Reports: what was compared, what differs first, and how to see it again."""

import json
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .judge import Verdict
from .text import text

# Kinds of rows that decide; a tap that differs inside an equal function is another way to write it.
DECIDING = ("exact", "output", "gradient", "state", "step")
WIDTHS = ("float64", "float32", "float16", "bfloat16")

EQUAL, ANOTHER_WAY = "equal", "equal, another way inside"
UNSURE = "equal as far as this input can tell"
NOTHING, DIFFERENT = "nothing is proven", "DIFFERENT"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      name: an output, a tap, a gradient ("input x" or a Param's path), a statistic or a fact.
      kind: "exact", "tap", "output", "gradient", "state" or "step"; "local" and "local gradient"
        where what a tap is computed from was torch's own.
      dtype: in which both sides ran.
      mode: "eager" or "jit"; "" for facts that have none.
      verdict: the judgement.

    >>> from .judge import same_function
    >>> row = Row("output", "output", "float64", "jit", same_function(np.ones(2), np.ones(2)))
    >>> row.verdict.ok
    True
    """

    name: str
    kind: str
    dtype: str
    mode: str
    verdict: Verdict

    def __str__(self) -> str:
        v = self.verdict
        text = f"{self.kind:<9}{self.name:<34} {self.dtype:<9}{self.mode:<6}"
        text += f"{v.error:<9.2g} limit {v.limit:<8.2g}"
        if v.own is not None:
            text += f" torch's own {v.own:.2g}"
        if v.index is not None:
            text += f"  worst at {list(v.index)}: {v.got:.9g}, torch {v.want:.9g}"
        return f"{text}  {v.note}".rstrip()


@dataclass(frozen=True)
class Divergence:
    """A place where Flax computes something else from the same inputs.

    Attributes:
      tap: its name.
      error, limit, statement, index: of the judgement.
      hint: what it looks like, where that is known, else "".
      kind: "value", "gradient", "between" two taps, or the kind of the row where no place could be
        found.
      got, want: Flax's and torch's value at `index`.
      advice: how to look closer, where there is a way.

    >>> print(Divergence("scores", 0.25, 1e-12, "same function", None, "a scale left out"))
    scores, value: error 0.25, limit 1e-12
          looks like a scale left out
    """

    tap: str
    error: float
    limit: float
    statement: str
    index: tuple[int, ...] | None
    hint: str = ""
    kind: str = "value"
    got: float | None = None
    want: float | None = None
    advice: str = ""

    @classmethod
    def of(cls, row: Row, kind: str, hint: str = "") -> "Divergence":
        """The divergence that a failed row shows."""
        v = row.verdict
        facts = (v.error, v.limit, v.statement, v.index, hint, kind, v.got, v.want)
        return cls(row.name, *facts)

    def __str__(self) -> str:
        text = f"{self.tap}, {self.kind}: error {self.error:.2g}, limit {self.limit:.2g}"
        if self.index is not None:
            text += f", worst at {list(self.index)}: {self.got:.9g}, torch {self.want:.9g}"
        text += f"\n      looks like {self.hint}" if self.hint else ""
        return text + (f"\n      {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Report:
    """All comparisons of one pair of modules; prints, and writes JSON and HTML.

    Attributes:
      title: which pair.
      rows: exact facts, then per dtype taps in torch's call order, outputs and gradients.
      params: how many tensors were carried.
      constants: torch's buffers that Flax computes, not carried.
      unpaired: taps that only one side has.
      notes: what else a reader must know.
      versions: of torch, jax, flax and numpy.
      reproduce: a command line that shows it again, or "".
      local: after a failure, each tap and gradient computed from torch's own values, in call order.
      divergences: the places at fault, in torch's call order.
      maps: `|flax - torch|` of the taps that differ locally.
      noise: whether torch's own rounding noise is told beside every error.

    >>> Report("nothing was compared", ()).verdict
    'nothing is proven'
    """

    title: str
    rows: tuple[Row, ...]
    params: int = 0
    constants: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    reproduce: str = ""
    local: tuple[Row, ...] = ()
    divergences: tuple[Divergence, ...] = ()
    maps: dict[str, np.ndarray] = field(default_factory=dict)
    noise: bool = False

    @property
    def verdict(self) -> str:
        """`EQUAL`, `ANOTHER_WAY`, `UNSURE` where the input cannot tell, `NOTHING` or `DIFFERENT`.

        Nothing is proven where no output shows anything in the widest dtype: all zeros, say.
        """
        if self.failed:
            return DIFFERENT
        if not self._shown():
            return NOTHING
        if self.unsure:
            return UNSURE
        return ANOTHER_WAY if self.rewritten else EQUAL

    @property
    def ok(self) -> bool:
        """Whether something is proven, and nothing that decides differs."""
        return not self.failed and self._shown()

    @property
    def certain(self) -> bool:
        """Whether all is equal, without torch's own rounding noise as a reason."""
        return self.ok and not self.unsure

    @property
    def failed(self) -> list[Row]:
        """The comparisons that decide and did not pass."""
        return [row for row in self.rows if row.kind in DECIDING and row.verdict.differs]

    @property
    def unsure(self) -> tuple[str, ...]:
        """What exceeds the limit of float64, but not what torch's own rounding changes there."""
        names = (r.name for r in self.rows if r.kind in DECIDING and r.verdict.by_noise)
        return tuple(dict.fromkeys(names))

    @property
    def rewritten(self) -> tuple[str, ...]:
        """Taps that differ inside a function that is the same: another way to compute it."""
        names = (r.name for r in self.rows if r.kind == "tap" and r.verdict.differs)
        return tuple(dict.fromkeys(names)) if self.ok else ()

    def _shown(self) -> bool:
        """Whether an output shows something, in float64 or else in the widest dtype compared."""
        outputs = [row for row in self.rows if row.kind == "output"]
        widest = min((row.dtype for row in outputs), key=WIDTHS.index, default="")
        return any(row.verdict.shows for row in outputs if row.dtype == widest)

    @property
    def first(self) -> Divergence | None:
        """The first divergence in torch's call order, or None."""
        if self.divergences or not self.failed:
            return next(iter(self.divergences), None)
        row = self.failed[0]
        return Divergence.of(row, "value" if row.kind in ("tap", "output") else row.kind)

    def worst(self, dtype: str, *kinds: str) -> float | None:
        """The largest error in one dtype among rows of these kinds; None if there are none.

        What shows nothing is left out, and taps that are computed another way, with one result.
        """
        other = self.rewritten
        shown = (r for r in self.rows if r.verdict.shows)
        rows = (r for r in shown if r.kind != "tap" or r.name not in other)
        found = [r.verdict.error for r in rows if r.dtype == dtype and r.kind in kinds]
        return max(found, key=badness) if found else None

    def ratio(self, dtype: str) -> float | None:
        """The outputs' largest error over torch's own in one dtype; None if none was measured."""
        rows = (r for r in self.rows if r.dtype == dtype and r.kind == "output")
        ratios = [row.verdict.ratio for row in rows if row.verdict.shows]
        known = [ratio for ratio in ratios if ratio is not None]
        return max(known, key=badness) if known else None

    def __str__(self) -> str:
        return text(self)

    def summary(self) -> str:
        """The largest errors, in one line."""
        parts = []
        for dtype in dict.fromkeys(row.dtype for row in self.rows if row.dtype):
            ratio, worst = self.ratio(dtype), self.worst(dtype, "output", "tap")
            grads = self.worst(dtype, "gradient")
            text = f"{dtype} {worst:.1e}" if worst is not None else dtype
            text += f", gradients {grads:.1e}" if grads is not None else ""
            parts.append(text + (f", {ratio:.1f}x torch's own error" if ratio is not None else ""))
        return "; ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the maps as plain values."""
        parts = asdict(replace(self, maps={}))
        del parts["maps"]
        first = asdict(self.first) if self.first else None
        told = {"verdict": self.verdict, "unsure": self.unsure, "rewritten": self.rewritten}
        return {**parts, "ok": self.ok, **told, "first": first}

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes everything to a JSON file; infinities as strings."""
        Path(path).write_text(json.dumps(plain(self.to_dict()), indent=1) + "\n")

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained page: error by depth, heat maps, every comparison."""
        from .show import page

        Path(path).write_text(page(self), "utf-8")


def plain(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as strings."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def badness(error: float) -> float:
    """What errors are ordered by: NaN is the worst."""
    return float("inf") if error != error else error
