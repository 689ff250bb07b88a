"""`python -m parity_tests.faults.answer`: draws faults, and prints what is said of each.

`--count N --seed S [--lacking SHARE] [--part I/N] [BLOCK ...]` draws and answers, a line each, and
appends them to `--to FILE`; a part has each N-th block. `--write FILE ...` puts the table of such
files into docs/trial.md.
"""

import argparse
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn._internal.markdown import fill, table, text_between
from flax_attn.parity import ParityError, judge
from flax_attn.parity.call_spec import CallSpec
from flax_attn.parity.compare import make_pair
from flax_attn.parity.options import Options
from flax_attn.parity.recording.recording import original_of
from flax_attn.parity.search.gradients import gradients
from flax_attn.parity.search.replay import Replay, in_float64
from flax_attn.parity.search.span import Cause
from flax_attn.parity.sides.calls import as_side
from flax_attn.parity.sides.run import Run

from ..core.parity.schema import validated
from ..mutations import LACKING
from ..port import Port
from .drawn import Fault, blocks, differ, drawn
from .table import PAGE

MARKS = text_between("<!-- drawn -->", "<!-- end of drawn -->")
QUESTIONS = ("found", "placed", "named", "misled")
SECOND = 1  # the other draw of weights and inputs
SAME = 1e-12  # relative difference of two runs that compute the same


@dataclass(frozen=True)
class Answer:
    """The report on one fault.

    Attributes:
      fault: which.
      found, placed, named: whether it was.
      misled: whether a printed cause fails on a second draw.
      said: what was printed.
      seconds: that the search took, 0 if unknown.
    """

    fault: Fault
    found: bool
    placed: bool = False
    named: bool = False
    misled: bool = False
    said: str = ""
    seconds: float = 0.0

    def facts(self) -> dict[str, Any]:
        """Everything as plain values."""
        fault = self.fault
        facts = {"block": fault.block.name, "kind": fault.kind, "fault": str(fault.mutation)}
        facts |= {"lacking": fault.kind in LACKING, "said": self.said, "seconds": self.seconds}
        return facts | {w: getattr(self, w) for w in QUESTIONS}

    def __str__(self) -> str:
        marks = "".join(w[0] if getattr(self, w) else "-" for w in QUESTIONS)
        return f"{marks} {self.seconds:5.2f}  {self.fault}  =>  {self.said}"


def answered(fault: Fault, right: Run, wrong: Run) -> Answer:
    """Compares the wrong port, and checks on a second draw what was said of it."""
    try:
        report = validated(fault.wrong.report())
    except ParityError as error:
        return Answer(fault, True, said=f"refused: {' '.join(str(error).split())[:200]}")
    except Exception as error:
        return Answer(fault, False, said=f"CRASHED {type(error).__name__}: {str(error)[:200]}")
    first = report.first
    if report.ok or first is None:
        return Answer(fault, not report.ok, said=report.verdict)
    said = f"{first.tap} ({first.kind}): {first.hint or 'no cause'}"
    causes = [place.cause for place in report.divergences if place.cause is not None]
    again = bool(first.hint) and holds(fault, first, causes)
    named = again and first.cause is not None
    compared_taps = [row.name for row in report.rows if row.kind in ("tap", "output")]
    placed = is_placed(first.tap, first.kind, compared_taps, right, wrong)
    seconds = first.search.seconds if first.search is not None else 0.0
    return Answer(fault, True, placed, named, bool(first.hint) and not again, said, seconds)


def holds(fault: Fault, first: Any, causes: Sequence[Any]) -> bool:
    """Whether the printed changes, applied to torch, give Flax's values on another draw.

    Without a change, whether the same words are said again.
    """
    if first.cause is None:
        again = fault.wrong.report(SECOND).first
        return again is not None and again.hint == first.hint
    return gives_flax(fault.wrong, causes, first.kind)


def is_placed(tap: str, kind: str, taps: list[str], right: Run, wrong: Run) -> bool:
    """Whether a place is the first that differs between the right port's run and the wrong one's.

    A value: what it is computed from is unchanged. Between two: the first is unchanged, and what
    arrives at the second is not. A gradient: no value differs.
    """
    tap = tap.removeprefix("model ") if tap.startswith("model output") else tap
    changed = [name for name in _changed(right, wrong) if name in taps]
    if kind == "gradient":
        return not changed
    if kind == "state":
        return tap in _moved(right.state, wrong.state)
    before, _, after = tap.removeprefix("between ").partition(" and ")
    if after:
        arrives = after in changed or _arrives_changed(after, right, wrong)
        return arrives and before not in changed and not _between(before, after, changed, taps)
    if tap in right.outputs:
        from_taps = any(not name.startswith("output") for name in changed)
        return tap in _moved(right.outputs, wrong.outputs) and not from_taps
    return tap in changed and not _arrives_changed(tap, right, wrong)


def _moved(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, x in one.items() if name not in other or differ(x, other[name], SAME)]


def _changed(right: Run, wrong: Run) -> list[str]:
    """The taps and outputs that differ, in call order."""
    return [*_moved(right.taps, wrong.taps), *_moved(right.outputs, wrong.outputs)]


def _arrives_changed(tap: str, right: Run, wrong: Run) -> bool:
    """Whether a submodule's own inputs differ; indices belong to the submodule."""
    pairs = zip(right.inputs.get(tap, ()), wrong.inputs.get(tap, ()), strict=False)
    return any(differ(x, y, SAME) for x, y in pairs if x.dtype.kind in "fc")


def _between(before: str, after: str, changed: Sequence[str], order: list[str]) -> list[str]:
    """Taps after the first and before the second that differ."""
    start = order.index(before) + 1 if before in order else 0
    end = order.index(after) if after in order else len(order)
    return [name for name in order[start:end] if name in changed]


def gives_flax(port: Port, causes: Sequence[Cause], kind: str) -> bool:
    """Whether torch with the changes of causes has the outputs, gradients or state of a port.

    On the second draw of weights and inputs.
    """
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        pair, mine = _pair(port)
        tape = pair.original.program(mine)
    changes = {k: x for cause in causes for k, x in cause.changes.items()}
    kept = "state " if kind == "state" else "output "
    try:
        with in_float64(), np.errstate(all="ignore"):
            if kind == "gradient":
                made = pair.names.gradients(gradients(tape, changes, pair.request.cotangent))
                return all(_same(mine.gradients[k], made[k]) for k in made)
            replay = Replay(tape, changes)
            made = {k: _numpy(replay.value(v)) for k, v in tape.marks.items() if k.startswith(kept)}
    except Exception:  # a change that does not run there does not hold
        return False
    arrays = {k.removeprefix(kept): x for k, x in made.items()}
    if kind == "state":
        arrays = {pair.names.tap(k): x for k, x in arrays.items()} | pair.names.carried(arrays)
        arrays = {k: x for k, x in arrays.items() if k in mine.state}
        return bool(arrays) and all(_same(mine.state[k], x) for k, x in arrays.items())
    return all(k in arrays and _same(x, arrays[k]) for k, x in mine.outputs.items())


def _numpy(x: Any) -> np.ndarray:
    return x.detach().resolve_conj().numpy()


def _pair(port: Port) -> tuple[Any, Any]:
    """Both sides with the weights and inputs of the second draw, and Flax's run."""
    given = port.options
    names = ("constants", "train", "grads", "taps", "torch_call")
    defaults = ((), False, True, True, None)
    constants, train, grads, taps, call = map(given.get, names, defaults)
    spec = CallSpec(port.inputs(SECOND), {}, constants, SECOND, train, grads, taps, call)
    options = Options(("float64",), jit=False, rules=port.rules, flax_call=given.get("flax_call"))
    original = original_of(port.theirs(), spec)
    pair = make_pair(original, as_side(port.mine(rngs=nnx.Rngs(0))), options)
    side = pair.flax("float64", "eager")
    return pair, pair.run_flax(side, pair.weights(pair.narrow("float64")))


def _same(got: np.ndarray, made: np.ndarray) -> bool:
    return got.shape == made.shape and judge.same_function(got, made, zero=True).ok


def text(answers: Sequence[Mapping[str, Any]]) -> str:
    """The table, and a sentence on the time that searches took."""
    usual = [x for x in answers if not x["lacking"]]
    rows = [
        _row(f"`{b}`", [x for x in usual if x["block"] == b])
        for b in dict.fromkeys(x["block"] for x in usual)
    ]
    rows.append(_row("**all**", usual))
    lacking = [x for x in answers if x["lacking"]]
    rows.append(_row("kinds that the catalogue lacks", lacking))
    seconds = [x["seconds"] for x in answers]
    mean, most = sum(seconds) / max(len(seconds), 1), max(seconds, default=0.0)
    said = f"A search took {mean:.1f} CPU seconds in the mean, and at most {most:.0f}."
    return f"{table(('block', 'faults', *QUESTIONS), rows).rstrip()}\n\n{said}\n"


def _row(name: str, answers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name, str(len(answers)), *(str(sum(x[q] for x in answers)) for q in QUESTIONS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lacking", type=float, default=0.0)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--to", type=Path)
    parser.add_argument("--write", type=Path, nargs="+")
    parser.add_argument("blocks", nargs="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.write:
        made = text([json.loads(line) for file in options.write for line in file.open()])
        PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, made), "utf-8")
        return
    part, parts = map(int, options.part.split("/"))
    wanted = [b for b in blocks()[part::parts] if not options.blocks or b.name in options.blocks]
    for each in drawn(wanted, options.count, options.seed, options.lacking):
        answer = answered(*each)
        print(answer, flush=True)
        if options.to:
            with options.to.open("a") as file:
                file.write(json.dumps(answer.facts()) + "\n")


if __name__ == "__main__":
    main()
