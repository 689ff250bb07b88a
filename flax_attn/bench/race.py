"""The race: competitors are verified, then timed alternately, in a new order each round."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .competitor import Competitor, first_line
from .machine import available_memory
from .program import Program
from .proof import Proof, first_call, judged_call
from .result import LEFT_OUT, MEASURED, MIN_SURE, TIMED, WRONG, Row
from .task import BOTH, Task, platform

MIN_ROUNDS = 3
MIN_SECONDS = 2e-3  # seconds: shorter calls are repeated within one timing
NO_TRIAL_SECONDS = 0.5  # seconds: after a longer first call no trial run is made
WARM_UP_SECONDS = 1.0  # seconds: shorter calls are run once untimed before each timing
CHAIN_SECONDS = 200e-6  # seconds: on an accelerator, shorter calls are chained in one dispatch


@dataclass(frozen=True)
class Settings:
    """Limits of one run.

    Attributes:
      rounds: maximum number of timings per competitor.
      seconds: approximate limit for timing all competitors of a task, beyond the first rounds.
      call: longest single call in seconds; a competitor expected to take longer is left out.
      sets: number of sets of inputs, used in turn.
      timed: whether anything is timed; else only the compiled program's memory is reported.
    """

    rounds: int = 15
    seconds: float = 2.0
    call: float = 3.0
    sets: int = 2
    timed: bool = True


@dataclass
class Entry:
    """A verified competitor ready for timing: its row, its program and the sets of inputs."""

    row: Row
    program: Program
    sets: list[Any]
    repeat: int = 1
    chain: Callable[[], None] | None = None

    def time(self, round_index: int) -> None:
        """Appends one timing to the row, in seconds per call."""
        placed = self.sets[round_index % len(self.sets)]
        if self.chain is not None:
            start = time.perf_counter()
            self.chain()
            self.row.seconds.append((time.perf_counter() - start) / self.repeat)
            return
        if self.row.figures.get("first_seconds", 0.0) < WARM_UP_SECONDS:
            self.program.wait(self.program.run(placed))
        at_once = platform() != "cpu"  # accelerators queue calls, which hides dispatch time
        start = time.perf_counter()
        for i in range(self.repeat):
            result = self.program.run(placed)
            if not at_once or i == self.repeat - 1:
                self.program.wait(result)
        self.row.seconds.append((time.perf_counter() - start) / self.repeat)

    def settle(self) -> None:
        """Chooses the number of calls per timing."""
        took = self.row.figures.get("first_seconds", 0.0)
        for placed in self.sets if took < NO_TRIAL_SECONDS else ():
            start = time.perf_counter()
            self.program.wait(self.program.run(placed))
            took = time.perf_counter() - start
        self.repeat = max(1, min(100, round(MIN_SECONDS / max(took, 1e-9))))
        if platform() != "cpu" and took < CHAIN_SECONDS:
            self.repeat = 50
            self.chain = self.program.chained(self.sets[0], self.repeat)

    @property
    def spent(self) -> float:
        """Seconds that its timings took."""
        return sum(self.row.seconds) * self.repeat

    @property
    def min_rounds(self) -> int:
        """Number of rounds that always run: as many as an interval needs, unless calls are long."""
        is_long = self.row.figures.get("first_seconds", 0.0) > NO_TRIAL_SECONDS
        return MIN_ROUNDS if is_long else MIN_SURE


class Race:
    """Runs tasks, caching the proofs and each competitor's speed.

    Args:
      competitors: those available on this machine.
      settings: the limits.
    """

    def __init__(self, competitors: Sequence[Competitor], settings: Settings):
        self.competitors, self.settings = competitors, settings
        self.rate: dict[tuple, float] = {}  # seconds per weight in the last timing
        self.proofs: dict[tuple, Proof | None] = {}

    def run(
        self, task: Task, rows: list[Row], notify: Callable[[str], None] = lambda _: None
    ) -> None:
        """Appends a row per competitor to `rows`, verified, then timed; `notify` gets progress.

        Timings made before an interrupt are kept.
        """
        entries = []
        for competitor in self.competitors:
            row = Row.of(task, competitor.name, competitor.family)
            rows.append(row)
            notify(f"{competitor.name}: proving")
            entry = self._start(competitor, task, row)
            if entry is not None:
                entries.append(entry)
        if self.settings.timed:
            notify("timing")
            time_interleaved(entries, self.settings)
            for entry in entries:
                key = _kind(task, entry.row.competitor)
                self.rate[key] = (entry.row.amount or 0.0) / task.weights

    def _start(self, competitor: Competitor, task: Task, row: Row) -> Entry | None:
        """Compiles and verifies a competitor; None, with the reason in its row, if that fails."""
        try:
            row.reason = self._refusal(competitor, task, row) or ""
            return None if row.reason else self._proven(competitor, task, row)
        except Exception as error:  # third-party code may raise anything
            row.status, row.reason = LEFT_OUT, first_line(error)
            return None

    def _refusal(self, competitor: Competitor, task: Task, row: Row) -> str | None:
        """Returns why the competitor skips this task, if known before it runs, or None."""
        reason = competitor.refusal(task)
        if reason is not None:
            return reason
        row.backend = competitor.backend(task)
        weights = competitor.quadratic[task.which == BOTH] * task.weights * 4
        if self.settings.timed and weights > available_memory():
            return f"its weights would take {weights / 2**30:.0f} GiB"
        expected = self.rate.get(_kind(task, competitor.name), 0.0) * task.weights
        if expected > self.settings.call:
            return f"a call would take about {expected:.0f} s"
        return None

    def _proven(self, competitor: Competitor, task: Task, row: Row) -> Entry | None:
        small = self._small(competitor, task)
        if small is not None and not self._right(small, row):
            return None
        program = competitor.build(task)
        placed = program.place(task.proof_inputs())
        program.compile(placed)
        row.note(
            compile_seconds=program.compile_seconds,
            temporary=program.temporary,
            **program.counts,
        )
        whole = competitor.prove is None and (task.proven_whole or small is None)
        runs = small is None or (whole and competitor.is_ours and row.backend != "reference")
        if not self.settings.timed and not runs:
            return _measured(row)
        if program.temporary is not None and program.temporary > available_memory():
            row.reason = f"it would take {program.temporary / 2**30:.0f} GiB of temporary memory"
            return None
        if whole:
            proof, first = judged_call(program, placed, task)
            if not self._right(proof, row):
                return None
        else:
            first = first_call(program, placed)[1]
        row.note(first_seconds=first)
        if not self.settings.timed:
            return _measured(row)
        row.status = TIMED
        del placed  # large, and not what is timed
        sets = [program.place(task.inputs(i)) for i in range(self.settings.sets)]
        return Entry(row, program, sets)

    def _small(self, competitor: Competitor, task: Task) -> Proof | None:
        small = task if competitor.prove else task.small()
        key = competitor.name, small, small == task  # a task that is small is proven by itself
        if key not in self.proofs:
            self.proofs[key] = competitor.proof_in_small(task)
        return self.proofs[key]

    def _right(self, proof: Proof, row: Row) -> bool:
        row.note(error=proof.error, limit=proof.limit)
        if not proof.ok:
            row.status, row.reason = WRONG, proof.wrong
        return proof.ok


def time_interleaved(entries: Sequence[Entry], settings: Settings) -> None:
    """Times all entries in each round, in a new order."""
    shuffle = random.Random(0).shuffle
    for entry in entries:
        entry.settle()
    share = settings.seconds / max(1, len(entries))
    for round_index in range(settings.rounds):
        order = [e for e in entries if round_index < e.min_rounds or e.spent < share]
        shuffle(order)
        for entry in order:
            entry.time(round_index)


def _measured(row: Row) -> None:
    if "temporary" in row.figures:
        row.status = MEASURED
    else:
        row.reason = "it does not tell its memory"


def _kind(task: Task, name: str) -> tuple:
    return name, task.which, task.table
