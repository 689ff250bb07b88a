"""Reports: what was compared, the first difference, and how to reproduce it."""

import json
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from .judge import Verdict
from .side_names import SIDES, Sides, worded

# Row kinds that decide the verdict. A tap may differ while the function is equal.
DECIDING = ("exact", "output", "gradient", "state", "step", "decode")
WIDTHS = ("float64", "float32", "float16", "bfloat16")

EQUAL, ANOTHER_WAY = "equal", "equal (intermediate values differ by design)"
UNSURE = "equal as far as this input can tell"
NOTHING, DIFFERENT = "nothing is proven", "DIFFERENT"

SCHEMA = 1  # version of `report_schema`, which changes if a field does

# Maximum number of lines of a report, a screen; `Report.text(full=True)` has all.
MAX_LINES = 60


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      name: an output, a tap, a gradient ("input x" or a Param's path), a statistic or a fact.
      kind: "exact", "tap", "output", "gradient", "state", "step" of an optimizer, or "decode";
        "local" and "local gradient" where the inputs of a tap were replaced by torch's own.
      dtype: the dtype in which both sides ran.
      mode: "eager" or "jit"; "" for facts without a mode.
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
        if v.other_error is not None:
            text += f" torch's own {v.other_error:.2g}"
        if v.index is not None:
            text += f"  worst at {list(v.index)}: {v.got:.9g}, torch {v.want:.9g}"
        return f"{text}  {v.note}".rstrip()


@dataclass(frozen=True)
class Divergence:
    """A place where Flax computes something different from the same inputs.

    Attributes:
      tap: name of the tap.
      error, limit, statement, index: from the verdict.
      hint: the likely cause, or "" if unknown.
      kind: "value", "gradient", "between" two taps, or the kind of the row if no place was found.
      got, want: Flax's and torch's value at `index`.
      advice: how to narrow it down further, or "".
      note: what else differs there and may be related, or "".
      search: what the search for a change of torch's program gave, or None.

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
    note: str = ""
    search: Any = field(default=None, compare=False, repr=False)

    @property
    def cause(self) -> Any:
        """The change of torch's program that gives Flax's value, or None."""
        return self.search.cause if self.search is not None else None

    @property
    def place(self) -> str:
        """Where it is, in words: "at norm (value)", or "between up and down"."""
        return self.tap if self.kind == "between" else f"at {self.tap} ({self.kind})"

    @classmethod
    def of(cls, row: Row, kind: str, hint: str = "") -> "Divergence":
        """Creates a divergence from a failed row."""
        v = row.verdict
        facts = (v.error, v.limit, v.statement, v.index, hint, kind, v.got, v.want)
        return cls(row.name, *facts)

    def __str__(self) -> str:
        text = f"{self.tap}, {self.kind}: error {self.error:.2g}, limit {self.limit:.2g}"
        if self.index is not None:
            text += f", worst at {list(self.index)}: {self.got:.9g}, torch {self.want:.9g}"
        text += f"\n      looks like {self.hint}" if self.hint else ""
        text += f"\n      note: {self.note}" if self.note else ""
        return text + (f"\n      {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Report:
    """All comparisons of one pair of modules; prints, and writes JSON and HTML.

    Attributes:
      title: names the pair.
      rows: exact facts, then per dtype taps in torch's call order, outputs and gradients.
      params: number of tensors copied.
      constants: torch buffers that Flax computes instead of copying.
      unpaired: taps that exist on one side only.
      notes: further remarks.
      versions: of torch, jax, flax and numpy.
      reproduce: a command line that reproduces the report, or "".
      local: after a failure, each tap and gradient computed from torch's own values, in call order.
      divergences: the places at fault, in torch's call order.
      maps: `|flax - torch|` of the taps that differ locally.
      noise: whether torch's own rounding noise is reported next to every error.
      replayed: why recorded results replace a reference although torch is installed, or "".
      flax_class: name of the Flax class of a case, or "".
      sides: what the two sides are called.

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
    replayed: str = ""
    flax_class: str = ""
    sides: Sides = SIDES

    @property
    def verdict(self) -> str:
        """`EQUAL`, `ANOTHER_WAY`, `UNSURE` (the input cannot tell), `NOTHING` or `DIFFERENT`.

        `NOTHING` means that no output is conclusive in the widest dtype, for example all zeros.
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
        """Whether something is proven and no deciding comparison failed."""
        return not self.failed and self._shown()

    @property
    def certain(self) -> bool:
        """Whether everything is equal without allowing for torch's own rounding noise."""
        return self.ok and not self.unsure

    @property
    def failed(self) -> list[Row]:
        """The deciding comparisons that failed."""
        return [row for row in self.rows if row.kind in DECIDING and row.verdict.differs]

    @property
    def unsure(self) -> tuple[str, ...]:
        """Names that exceed the float64 limit, but not torch's own rounding noise."""
        names = (r.name for r in self.rows if r.kind in DECIDING and r.verdict.by_noise)
        return tuple(dict.fromkeys(names))

    @property
    def rewritten(self) -> tuple[str, ...]:
        """Taps that differ although the function is equal: computed in a different way."""
        names = (r.name for r in self.rows if r.kind == "tap" and r.verdict.differs)
        return tuple(dict.fromkeys(names)) if self.ok else ()

    def _shown(self) -> bool:
        """Whether an output is conclusive in float64, or else in the widest dtype compared."""
        outputs = [row for row in self.rows if row.kind == "output"]
        widest = min((row.dtype for row in outputs), key=WIDTHS.index, default="")
        return any(row.verdict.shows for row in outputs if row.dtype == widest)

    @property
    def first(self) -> Divergence | None:
        """The first divergence in torch's call order, or None."""
        if self.divergences or not self.failed:
            return next(iter(self.divergences), None)
        row = next(x for x in self.rows if x.verdict.differs and x.kind in (*DECIDING, "tap"))
        return Divergence.of(row, "value" if row.kind in ("tap", "output") else row.kind)

    def worst(self, dtype: str, *kinds: str) -> float | None:
        """The largest error in one dtype among rows of these kinds; None if there are none.

        Excludes inconclusive rows, and taps that differ while the result is equal.
        """
        other = self.rewritten
        shown = (r for r in self.rows if r.verdict.shows)
        rows = (r for r in shown if r.kind != "tap" or r.name not in other)
        errors = [r.verdict.error for r in rows if r.dtype == dtype and r.kind in kinds]
        return max(errors, key=badness) if errors else None

    def ratio(self, dtype: str) -> float | None:
        """The outputs' largest error divided by torch's own in one dtype; None if not measured."""
        rows = (r for r in self.rows if r.dtype == dtype and r.kind == "output")
        ratios = [row.verdict.ratio for row in rows if row.verdict.shows]
        known = [ratio for ratio in ratios if ratio is not None]
        return max(known, key=badness) if known else None

    def __str__(self) -> str:
        return self.text()

    def text(self, full: bool = False) -> str:
        """The report as text, of at most `MAX_LINES` lines unless `full`."""
        from .show import lines_of, see_again

        lines, behind = lines_of(self), see_again(self)
        if not full and len(lines) + len(behind) > MAX_LINES:
            shown = MAX_LINES - len(behind) - 1
            rest = plural(len(lines) - shown, "line")
            lines = [*lines[:shown], f"  and {rest} more: report.text(full=True)"]
        return self._worded("\n".join([*lines, *behind]))

    def _worded(self, text: str) -> str:
        """A text with this report's names of its sides; its title and command stay."""
        for part in sorted({self.title, self.reproduce} - {""}, key=len, reverse=True):
            if part in text:
                before, _, after = text.partition(part)
                return self._worded(before) + part + self._worded(after)
        return worded(text, self.sides)

    def summary(self) -> str:
        """The largest errors, in one line."""
        parts = []
        for dtype in dict.fromkeys(row.dtype for row in self.rows if row.dtype):
            ratio, worst = self.ratio(dtype), self.worst(dtype, "output", "tap")
            grads = self.worst(dtype, "gradient")
            text = f"{dtype} {worst:.1e}" if worst is not None else dtype
            text += f", gradients {grads:.1e}" if grads is not None else ""
            steps = self.worst(dtype, "decode")
            text += f", decoded {steps:.1e}" if steps is not None else ""
            parts.append(
                text + (f", {times(ratio)} torch's own error" if ratio is not None else "")
            )
        return worded("; ".join(parts), self.sides)

    def to_dict(self) -> dict[str, Any]:
        """Everything except the maps, as plain Python values; `report_schema` describes it."""
        # A change holds functions; its sentence is the hint.
        plain_places = tuple(replace(place, search=None) for place in self.divergences)
        report = replace(self, maps={}, divergences=plain_places)
        parts = asdict(report)
        del parts["maps"]
        first = asdict(report.first) if report.first else None
        for place in (*parts["divergences"], *([first] if first else [])):
            del place["search"]
        properties = {"verdict": self.verdict, "unsure": self.unsure, "rewritten": self.rewritten}
        head = {"schema": SCHEMA, "ok": self.ok, **properties, "first": first}
        return {**head, "try": worded(_what_to_try(self.first), self.sides), **parts}

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes everything to a JSON file; non-finite numbers as strings."""
        Path(path).write_text(json.dumps(plain(self.to_dict()), indent=1) + "\n")

    def to_html(self, path: str | PathLike[str]) -> None:
        """Writes one self-contained page: error by depth, heat maps, every comparison."""
        from .show import page

        Path(path).write_text(self._worded(page(self)), "utf-8")


def report_schema() -> dict[str, Any]:
    """The JSON schema of `Report.to_dict` after `json`, with what each field means.

    Raises:
      FileNotFoundError: if the installed package lacks `report_schema.json`.

    >>> report_schema()["properties"]["schema"]["const"] == SCHEMA
    True
    """
    return json.loads((Path(__file__).parent / "report_schema.json").read_text("utf-8"))


def _what_to_try(first: Divergence | None) -> str:
    """One sentence on what to change first, from the hint and the advice."""
    if first is None:
        return ""
    hint = f"Flax is different {first.place}: looks like {first.hint}." if first.hint else ""
    return " ".join(filter(None, (hint, first.advice)))


def plain(value: Any) -> Any:
    """Converts non-finite floats in `value` to strings, since JSON has none."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value


def badness(error: float) -> float:
    """Sort key for errors: NaN is the largest."""
    return float("inf") if error != error else error


def times(ratio: float) -> str:
    """Formats a ratio as a multiple.

    >>> times(0.96), times(3666431.0), times(float("inf"))
    ('1.0x', '4e6x', 'infx')
    """
    if not 1000 <= ratio < float("inf"):
        return f"{ratio:.1f}x"
    digit, power = f"{ratio:.0e}".split("e")
    return f"{digit}e{int(power)}x"


def plural(count: int, word: str) -> str:
    """Formats a count with its noun.

    >>> plural(1, "place"), plural(3, "place")
    ('1 place', '3 places')
    """
    return f"{count:,} {word}" + ("" if count == 1 else "s")
