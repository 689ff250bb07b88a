"""How long `flax-attn parity` will take: measured seconds of cases, corrected as it goes on."""

import time
from collections.abc import Callable, Sequence

from ..parity.cases.prove import Job
from ..parity.cases.workers import Workers
from ..parity.report import plural

# Seconds on a machine whose workers start in `START_SECONDS`, on one core and without programs that
# were compiled before: of one case in three dtypes, what its eager run adds, and what the first
# case adds, which imports torch. Measured on cases of causal_attention, mamba2 and grouped_query.
START_SECONDS = 6.0
FIRST_SECONDS = 6.0
SECONDS = {"plain": 3.0, "train": 8.0, "eager": 9.0}
SLOWEST = 5.0  # how many times slower than that a machine is taken to be at most
TRAINED = ",train|"  # in the title of a case with dropout
CORRECTED_CASES = 3  # number of cases after which a wrong estimate is corrected in a line
CORRECTED_FACTOR = 1.5  # an estimate that is off by less is not corrected


class Estimate:
    """The time for a list of cases: first from a table, then from those that are done.

    Args:
      jobs: the cases, in their order.
      workers: the processes that will prove them.
      started: seconds in which the workers started, which shows how fast the machine is now.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        workers: Workers,
        started: float = START_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._start = clock, clock()
        self._costs = [_seconds(job) for job in jobs]
        self._processes = max(1, min(workers.most, len(jobs) // 2))
        self._pace = max(1 / SLOWEST, min(SLOWEST, started / START_SECONDS))

    def line(self) -> str:
        """The time for all cases, and their number."""
        self._start = self._clock()
        seconds = self.seconds_left(0) + self._pace * FIRST_SECONDS
        return f"{duration(seconds)}: {plural(len(self._costs), 'case')}"

    def seconds_left(self, done: int) -> float:
        """Seconds for the rest after the first `done` cases, at the speed of these."""
        expected = sum(self._costs[:done]) / self._processes + FIRST_SECONDS
        rate = (self._clock() - self._start) / expected if done else self._pace
        return rate * sum(self._costs[done:]) / self._processes

    def left(self, done: int) -> str:
        """The time for the rest, in words; "" if nothing is left."""
        return f"{duration(self.seconds_left(done))} left" if done < len(self._costs) else ""

    def correction(self, done: int) -> str:
        """A line after the first few cases if the estimate was wrong; else ""."""
        if done != CORRECTED_CASES or done == len(self._costs):
            return ""
        expected = self._pace * sum(self._costs[done:]) / self._processes
        left = self.seconds_left(done)
        off = max(left, expected) / max(min(left, expected), 1e-9)
        if off < CORRECTED_FACTOR or duration(left) == duration(expected):
            return ""
        pace = "longer" if left > expected else "less"
        return f"the first {done} cases took {pace} than expected: {duration(left)} more"


def _seconds(job: Job) -> float:
    kind = "train" if TRAINED in job.listed.title else "plain"
    return SECONDS[kind] + job.eager * SECONDS["eager"]


def duration(seconds: float) -> str:
    """Formats a duration in words.

    >>> duration(12.0), duration(70.0), duration(170.0)
    ('about 10 seconds', 'about a minute', 'about 3 minutes')
    """
    if seconds < 45:
        return f"about {max(10, round(seconds / 10) * 10)} seconds"
    return "about a minute" if seconds < 90 else f"about {seconds / 60:.0f} minutes"
