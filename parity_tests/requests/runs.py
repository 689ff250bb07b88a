"""One program, by every backend, for some requests: the worst of it."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from .backends import compiled, settings
from .programs import Program, program, request
from .verdict import Row, Truth, rows

BACKENDS = ("reference", "blockwise")
REQUESTS, FEW = 11, 3  # of one program, and of one with long sequences


@dataclass
class Outcome:
    """What one program showed; `asdict` of it is one line of the progress file.

    Attributes:
      worst: by backend, the largest error over its limit.
      noisy: arrays that were within the noise alone, of `arrays` judged.
      live: the share of rows that see something, over all requests.
      faults: the first few differences, each in words, with its request.
    """

    seed: int
    words: dict[str, str]
    requests: int = 0
    arrays: int = 0
    noisy: int = 0
    live: float = 0.0
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BACKENDS, 0.0))
    faults: list[dict[str, Any]] = field(default_factory=list)
    cpu: float = 0.0
    first_cpu: float = 0.0

    @property
    def verdict(self) -> str:
        """equal, equal within the noise, or DIFFERENT."""
        if self.faults:
            return "DIFFERENT"
        return "equal within noise" if self.noisy else "equal"

    def line(self) -> dict[str, Any]:
        """As JSON has it."""
        worst = {name: round(min(x, 1e300), 4) for name, x in self.worst.items()}
        return {**asdict(self), "worst": worst, "verdict": self.verdict}


def run(seed: int, requests: int | None = None, only: int | None = None) -> Outcome:
    """The program of a seed; `only` asks for one request of it."""
    given, start = program(seed), time.process_time()
    outcome = Outcome(seed, given.words())
    count = (FEW if given.is_long else REQUESTS) if requests is None else requests
    with np.errstate(all="ignore"), settings(given):
        runners: dict[str, Any] = {}
        for index in range(count) if only is None else (only,):
            _ask(given, index, runners, outcome)
            outcome.requests += 1
            outcome.first_cpu = outcome.first_cpu or time.process_time() - start
    outcome.live = round(outcome.live / max(outcome.requests, 1), 3)
    outcome.cpu = round(time.process_time() - start, 3)
    outcome.first_cpu = round(outcome.first_cpu, 3)
    return outcome


def _ask(given: Program, index: int, runners: dict[str, Any], outcome: Outcome) -> None:
    asked = request(given, index)
    truth = Truth(given, asked)
    outcome.live += float(asked.truth.seen.any(3).mean())
    for backend in BACKENDS:
        if runners.get(backend) == "broken":
            continue
        if backend not in runners:
            fixed = asked.data["mask"] if given.fixed else None
            runners[backend] = compiled(given, backend, fixed)
        try:
            got = runners[backend](asked.floats, asked.data, asked.do, asked.dlse)
            got = jax.tree.map(np.asarray, got)
        except Exception as error:  # whatever it is, it is a finding
            runners[backend] = "broken"
            text = f"{type(error).__name__}: {[*str(error).splitlines(), ''][0][:200]}"
            _fault(outcome, index, backend, Row("error", np.inf, 0.0, note=text))
            continue
        for row in rows(truth, got):
            outcome.arrays += 1
            outcome.noisy += row.noise is not None and row.ratio <= 1
            outcome.worst[backend] = max(outcome.worst[backend], row.ratio)
            if not row.ratio <= 1:
                _fault(outcome, index, backend, row)


def _fault(outcome: Outcome, index: int, backend: str, row: Row) -> None:
    outcome.worst[backend] = max(outcome.worst[backend], row.ratio)
    if len(outcome.faults) < 4:
        told = {"request": index, "backend": backend, "array": row.name}
        numbers = {"error": f"{row.error:.2e}", "limit": f"{row.limit:.2e}"}
        noise = None if row.noise is None else f"{row.noise:.2e}"
        outcome.faults.append({**told, **numbers, "noise": noise, "note": row.note})
