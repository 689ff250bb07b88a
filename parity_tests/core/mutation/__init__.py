"""Faults made by machine: every small change of the law and the judge must fail a test.

`python -m parity_tests.core.mutation [FILE ...] [--sample N]` changes one operator, constant,
argument or statement at a time in the files that everything else is measured against, and runs the
laws of that file (`parity_tests/core/*/test_laws_*.py`) on the changed code. A mutant that no law
fails is a hole in the laws, unless `equivalent.json` says why nothing can be seen of it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .operators import Mutant, mutants
from .worker import source_of

ENOUGH = 0.98  # of the mutants that are not equivalent
EQUIVALENT = Path(__file__).with_name("equivalent.json")


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of one of `worker.FILES`, "masks" say."""
    return mutants(file, source_of(file))


def equivalents() -> dict[tuple[str, str], str]:
    """The reason why nothing can be seen of a mutant, by its file and name."""
    groups = json.loads(EQUIVALENT.read_text("utf-8"))
    return {
        (file, name): group["reason"]
        for file, listed in groups.items()
        for group in listed
        for name in group["mutants"]
    }


@dataclass(frozen=True)
class Outcome:
    """What became of mutants: the law that fails for each, or None."""

    fates: Mapping[Mutant, str | None]
    reasons: Mapping[tuple[str, str], str]

    COLUMNS: ClassVar = ("mutants", "killed", "equivalent", "alive")

    def _is_equivalent(self, mutant: Mutant) -> bool:
        return (mutant.file, mutant.name) in self.reasons

    @cached_property
    def alive(self) -> list[Mutant]:
        """Those that no law fails, though nobody said why."""
        return [m for m, law in self.fates.items() if law is None and not self._is_equivalent(m)]

    @cached_property
    def refuted(self) -> list[Mutant]:
        """Those said to be equivalent that a law fails all the same."""
        return [m for m, law in self.fates.items() if law is not None and self._is_equivalent(m)]

    def count(self, file: str) -> dict[str, int]:
        mine = [mutant for mutant in self.fates if mutant.file == file]
        alive = sum(mutant in self.alive for mutant in mine)
        equivalent = sum(self._is_equivalent(mutant) for mutant in mine)
        killed = len(mine) - alive - equivalent
        return dict(zip(self.COLUMNS, (len(mine), killed, equivalent, alive), strict=True))

    def share(self, file: str) -> float:
        """Killed among those that are not equivalent; 1 where there is none."""
        count = self.count(file)
        return (
            count["killed"] / ((count["killed"] + count["alive"]) or 1) if count["mutants"] else 1.0
        )
