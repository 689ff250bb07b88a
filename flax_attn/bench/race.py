"""The race: competitors are verified, then timed alternately, in a new order each round."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .competitor import Competitor, first_line
from .program import Program
from .proof import Proof, first_call, prove
from .result import LEFT_OUT, MEASURED, TIMED, WRONG, Row
from .settings import MIN_ROUNDS, Settings, available_memory
from .workload import BOTH, Workload, platform

MIN_SECONDS = 2e-3  # seconds: shorter calls are repeated within one timing
NO_TRIAL_SECONDS = 0.5  # seconds: after a longer first call no trial run is made
WARM_UP_SECONDS = 1.0  # seconds: shorter calls are run once untimed before each timing
CHAIN_SECONDS = 200e-6  # seconds: on an accelerator, shorter calls are chained in one dispatch
Notify = Callable[[str], None]


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
        if (self.row.first_seconds or 0) < WARM_UP_SECONDS:
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
        took = self.row.first_seconds or 0.0
        for placed in self.sets if took < NO_TRIAL_SECONDS else ():
            start = time.perf_counter()
            self.program.wait(self.program.run(placed))
            took = time.perf_counter() - start
        self.repeat = max(1, min(100, round(MIN_SECONDS / max(took, 1e-9))))
        if platform() != "cpu" and took < CHAIN_SECONDS:
            self.repeat = 50
            self.chain = self.program.chained(self.sets[0], self.repeat)


class Race:
    """Runs workloads, caching the proofs and each competitor's speed.

    Args:
      competitors: those available on this machine.
      settings: the limits.
    """

    def __init__(self, competitors: Sequence[Competitor], settings: Settings):
        self.competitors, self.settings = competitors, settings
        self.rate: dict[tuple, float] = {}  # seconds per weight in the last timing
        self.cut: dict[tuple, Proof | None] = {}

    def run(
        self, w: Workload, which: str, rows: list[Row], notify: Notify = lambda _: None
    ) -> None:
        """Appends a row per competitor to `rows`, verified, then timed; `notify` gets progress.

        Timings made before an interrupt are kept.
        """
        entries = []
        for competitor in self.competitors:
            row = Row(w, which, competitor.name, competitor.family)
            rows.append(row)
            notify(f"{competitor.name}: proving")
            entry = self._start(competitor, row)
            if entry is not None:
                entries.append(entry)
        if self.settings.timed:
            notify("timing")
            self._time(entries)
            for entry in entries:
                self.rate[_kind_of_row(entry.row)] = (entry.row.median or 0.0) / w.cells

    def _start(self, competitor: Competitor, row: Row) -> Entry | None:
        """Compiles and verifies a competitor; None, with the reason in its row, if that fails."""
        try:
            row.reason = self._refusal_of_row(competitor, row) or ""
            return None if row.reason else self._proven(competitor, row)
        except Exception as error:  # third-party code may raise anything
            row.status, row.reason = LEFT_OUT, first_line(error)
            return None

    def _refusal_of_row(self, competitor: Competitor, row: Row) -> str | None:
        """Returns why the competitor skips this row, if known before it runs, or None."""
        w, which = row.workload, row.which
        reason = competitor.refusal(w, which)
        if reason is not None:
            return reason
        row.backend = competitor.backend(w)
        weights = competitor.quadratic[which == BOTH] * w.cells * 4
        if self.settings.timed and weights > available_memory():
            return f"its weights would take {weights / 2**30:.0f} GiB"
        expected = self.rate.get(_kind_of_row(row), 0.0) * w.cells
        if expected > self.settings.call:
            return f"a call would take about {expected:.0f} s"
        return None

    def _proven(self, competitor: Competitor, row: Row) -> Entry | None:
        w, which = row.workload, row.which
        prover = competitor.prove
        small = prover(w, which) if prover is not None else self._small(competitor, w, which)
        if small is not None and not self._right(small, row):
            return None
        program = competitor.build(w, which)
        placed = program.place(w.arrays())
        program.compile(placed)
        row.compile_seconds, row.temporary = program.compile_seconds, program.temporary
        runs = small is None or (competitor.is_ours and row.backend != "reference")
        if not self.settings.timed and not runs:
            return self._measured(row)
        if row.temporary is not None and row.temporary > available_memory():
            row.reason = f"it would take {row.temporary / 2**30:.0f} GiB of temporary memory"
            return None
        if prover is not None:
            row.first_seconds = first_call(program, placed)[1]
        else:
            proof, row.first_seconds = prove(program, w, which)
            if not self._right(proof, row):
                return None
        if not self.settings.timed:
            return self._measured(row)
        row.status = TIMED
        sets = [placed, *(program.place(w.arrays(i)) for i in range(1, self.settings.sets))]
        return Entry(row, program, sets)

    def _measured(self, row: Row) -> None:
        row.status = MEASURED if row.temporary is not None else LEFT_OUT
        row.reason = "" if row.temporary is not None else "it does not tell its memory"

    def _small(self, competitor: Competitor, w: Workload, which: str) -> Proof | None:
        """Verifies all rows of a smaller workload; None if `w` is small and nothing is added.

        On an accelerator also at "highest" precision for float32, whose products it rounds.
        """
        cut = w.cut()
        key = competitor.name, cut, which
        if key not in self.cut:
            precisions = ["highest"] if platform() != "cpu" and w.dtype == "float32" else []
            precisions += [None] if cut != w else []
            proofs = []
            for precision in precisions:
                with jax.default_matmul_precision(precision):
                    proofs.append(prove(competitor.build(cut, which), cut, which)[0])
            self.cut[key] = next((p for p in proofs if not p.ok), proofs[-1] if proofs else None)
        return self.cut[key]

    def _right(self, proof: Proof, row: Row) -> bool:
        row.proof = {"error": proof.error, "limit": proof.limit}
        if not proof.ok:
            row.status, row.reason = WRONG, proof.wrong
        return proof.ok

    def _time(self, entries: Sequence[Entry]) -> None:
        shuffle = random.Random(0).shuffle
        for entry in entries:
            entry.settle()
        share = self.settings.seconds / max(1, len(entries))
        for round_index in range(self.settings.rounds):
            order = [e for e in entries if round_index < MIN_ROUNDS or _time_is_up(e) < share]
            shuffle(order)
            for entry in order:
                entry.time(round_index)


def _time_is_up(entry: Entry) -> float:
    return sum(entry.row.seconds) * entry.repeat


def _kind_of_row(row: Row) -> tuple:
    w = row.workload
    return row.competitor, row.which, w.describe_mask, w.dtype, w.width, w.layer
