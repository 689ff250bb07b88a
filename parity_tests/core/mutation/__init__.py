"""Faults made by machine: every small change of the law and the judge must fail a test.

`python -m parity_tests.core.mutation [FILE ...] [--sample N]` changes one operator, constant,
argument or statement at a time in the files that everything else is measured against, and runs the
laws of that file (`parity_tests/core/*/test_laws_*.py`, see `files`) on the changed code. A mutant
that no law fails is a hole in the laws, unless `equivalent.json` says why nothing of it is seen.

The runner is written by hand because a general tool starts the test suite, and so jax, for each
mutant. Here jax stays warm in one process, only the changed module and what is built on it are
made anew, and a few quick laws are called instead of a suite: a mutant costs well under a second.

`equivalent.json` lists, by file and function, changes in the words of `operators` and the reason
why nobody can see them. A change that occurs several times in its function is named with its
place among these, "(2 of 3)", so that another one like it is not excused unread.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .files import CHOOSES_SIZES, FILES, path_of
from .operators import Mutant, mutants
from .worker import ROOT, source_of

ENOUGH = 0.98  # of the mutants that are not equivalent
EQUIVALENT = Path(__file__).with_name("equivalent.json")

Key = tuple[str, str, str]  # file, function, change


def mutants_of(file: str) -> list[Mutant]:
    """All mutants of a file of flax_attn, "masks/nodes" say."""
    return mutants(file, source_of(file))


def equivalents() -> dict[Key, str]:
    """The reason why nothing can be seen of a mutant, by its key."""
    return {
        (file, where, change): group["reason"]
        for file, functions in json.loads(EQUIVALENT.read_text("utf-8")).items()
        for where, listed in functions.items()
        for group in listed
        for change in group["changes"]
    }


def size_of(mutant: Mutant) -> str | None:
    """The entry of CHOOSES_SIZES that a mutant falls under: it is not judged."""
    for entry in CHOOSES_SIZES.get(mutant.file, ()):
        where, _, part = entry.partition(": ")
        inside = mutant.where == where or mutant.where.startswith(f"{where}.")
        if inside and (not part or part in mutant.parts):
            return entry
    return None


def stale() -> list[str]:
    """What the three lists say of files, changes and functions that are not there."""
    listed = equivalents()
    files = sorted({file for file, _, _ in listed} | set(CHOOSES_SIZES))
    made = [m for file in files if file in FILES for m in mutants_of(file)]
    entries = [(file, entry) for file, listed in CHOOSES_SIZES.items() for entry in listed]
    sizes = {(mutant.file, size_of(mutant)) for mutant in made}
    return [
        *(f"FILES: {file}" for file in FILES if not (ROOT / path_of(file)).is_file()),
        *(f"equivalent.json: {' | '.join(key)}" for key in listed.keys() - {m.key for m in made}),
        *(f"CHOOSES_SIZES: {' | '.join(entry)}" for entry in entries if entry not in sizes),
    ]


def split(made: Iterable[Mutant]) -> tuple[list[Mutant], list[Mutant]]:
    """Those to be judged, and those that only choose a size."""
    made = list(made)
    return [m for m in made if size_of(m) is None], [m for m in made if size_of(m) is not None]


@dataclass(frozen=True)
class Outcome:
    """What became of mutants: the law that fails for each, or None."""

    fates: Mapping[Mutant, str | None]
    reasons: Mapping[Key, str]

    COLUMNS: ClassVar = ("mutants", "killed", "equivalent", "alive")

    def _is_equivalent(self, mutant: Mutant) -> bool:
        return mutant.key in self.reasons

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
