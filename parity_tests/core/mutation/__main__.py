"""`python -m parity_tests.core.mutation [FILE ...] [--sample N]`: mutants, and which of them live.

Ends with an error if a file lets more than two of a hundred live that are not known to be
equivalent, or if a mutant said to be equivalent is none.
"""

import argparse
import random
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import ENOUGH, Outcome, equivalents, mutants_of
from .worker import FILES, try_all


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m parity_tests.core.mutation")
    parser.add_argument("files", nargs="*", metavar="FILE", help=", ".join(FILES.values()))
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants, drawn from all files")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--list", action="store_true", help="print every mutant and its end")
    given = parser.parse_args(arguments)
    names = {**{path: name for name, path in FILES.items()}, **{name: name for name in FILES}}
    unknown = [file for file in given.files if file not in names]
    if unknown:
        parser.error(f"no laws are written for {', '.join(unknown)}; there are {', '.join(FILES)}")
    mutants = [m for file in given.files or FILES for m in mutants_of(names[file])]
    if given.sample is not None:
        mutants = random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    console = Console()
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("mutants", total=len(mutants))
        try:
            fates = try_all(mutants, given.jobs, lambda _: progress.advance(task))
        except RuntimeError as fault:  # the laws fail with nothing changed
            parser.error(str(fault))
    outcome = Outcome(fates, equivalents())
    if given.list:
        for mutant, law in fates.items():
            print(f"{FILES[mutant.file]}:{mutant.line} {mutant.name}\n    {law}")
    return report(outcome, console)


def report(outcome: Outcome, console: Console) -> int:
    """Prints the table and all that went wrong; the exit status."""
    table = Table("file", "mutants", "killed", "equivalent", "alive", "share")
    for file, path in FILES.items():
        count = outcome.count(file)
        if count["mutants"]:
            share = f"{100 * outcome.share(file):.1f} %"
            table.add_row(path, *(str(count[name]) for name in outcome.COLUMNS), share)
    console.print(table)
    for mutant in outcome.alive:
        print(f"alive: {FILES[mutant.file]}:{mutant.line} {mutant.name}")
    for mutant in outcome.refuted:
        law = outcome.fates[mutant]
        print(f"not equivalent: {FILES[mutant.file]}:{mutant.line} {mutant.name}\n    {law}")
    enough = all(outcome.share(file) >= ENOUGH for file in FILES)
    return 0 if enough and not outcome.refuted else 1


if __name__ == "__main__":
    sys.exit(main())
