"""Reports: what was compared, what differs first, and how to see it again."""

import json
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from .judge import Verdict


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
      name: an output, a tap, a gradient ("input x" or a Param's path) or an exact fact.
      kind: "exact", "tap", "output" or "gradient".
      dtype: in which both sides ran.
      mode: "eager" or "jit"; "" for facts that have none.
      verdict: the judgement.
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
    """The first point, in torch's call order, that is over its limit.

    Attributes:
      tap: its name.
      error, limit, statement, index: of the judgement.
      hint: what it looks like, where that is known, else "".
    """

    tap: str
    error: float
    limit: float
    statement: str
    index: tuple[int, ...] | None
    hint: str = ""


@dataclass(frozen=True)
class Report:
    """All comparisons of one pair of modules; prints, and writes JSON.

    Attributes:
      title: which pair.
      rows: exact facts, then per dtype taps in torch's call order, outputs and gradients.
      params: how many tensors were carried.
      constants: torch's buffers that Flax computes, not carried.
      unpaired: taps that only one side has.
      notes: what else a reader must know.
      versions: of torch, jax, flax and numpy.
      reproduce: a command line that shows it again, or "".
    """

    title: str
    rows: tuple[Row, ...]
    params: int = 0
    constants: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    reproduce: str = ""

    @property
    def ok(self) -> bool:
        """Whether there are comparisons and every one of them passed."""
        return bool(self.rows) and all(row.verdict.ok for row in self.rows)

    @property
    def first(self) -> Divergence | None:
        """The first divergence, or None."""
        row = next((row for row in self.rows if not row.verdict.ok), None)
        if row is None:
            return None
        v = row.verdict
        return Divergence(row.name, v.error, v.limit, v.statement, v.index)

    def worst(self, dtype: str, *kinds: str) -> float | None:
        """The largest error in one dtype among rows of these kinds; None if there are none."""
        found = [r.verdict.error for r in self.rows if r.dtype == dtype and r.kind in kinds]
        return max(found) if found else None

    def ratio(self, dtype: str) -> float | None:
        """The outputs' largest error over torch's own in one dtype; None if none was measured."""
        ratios = [r.verdict.ratio for r in self.rows if r.dtype == dtype and r.kind == "output"]
        return max((ratio for ratio in ratios if ratio is not None), default=None)

    def __str__(self) -> str:
        failed = [i for i, row in enumerate(self.rows) if not row.verdict.ok]
        lines = [f"{self.title}: {len(self.rows)} comparisons, {len(failed)} different"]
        if not self.rows:
            lines.append("  nothing was compared, so nothing is proven")
        if failed:
            lines.append(f"first divergence: {self.rows[failed[0]].name}")
            around = range(max(failed[0] - 1, 0), min(failed[0] + 2, len(self.rows)))
            lines += [f"  {'>' if i == failed[0] else ' '} {self.rows[i]}" for i in around]
            lines += [f"    {self.rows[i]}" for i in failed if i not in around][:12]
            if len(failed) > 14:
                lines.append("    ...")
        elif self.rows:
            lines.append(f"  {self.summary()}")
        lines += [f"  constant, not carried: {', '.join(self.constants)}"] if self.constants else []
        lines += [f"  seen on one side only: {', '.join(self.unpaired)}"] if self.unpaired else []
        lines += [f"  {note}" for note in self.notes]
        if failed and self.reproduce:
            lines.append(f"reproduce: {self.reproduce}")
        return "\n".join(lines)

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
        """Everything as plain values."""
        return {**asdict(self), "ok": self.ok, "first": asdict(self.first) if self.first else None}

    def to_json(self, path: str | PathLike[str]) -> None:
        """Writes everything to a JSON file; infinities as strings."""
        Path(path).write_text(json.dumps(plain(self.to_dict()), indent=1) + "\n")


def plain(value: Any) -> Any:
    """`value` with numbers that JSON cannot hold as strings."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
