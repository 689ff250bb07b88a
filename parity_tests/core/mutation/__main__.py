"""`python -m parity_tests.core.mutation [FILE ...] [--sample N]`: mutants, and which of them live.

Ends with an error if a file lets more than two of a hundred live that are not known to be
equivalent, if a mutant said to be equivalent is none, or if it is no mutant at all.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from . import ENOUGH, Outcome, equivalents, mutants_of, split, stale
from .files import FILES, WITH_LAWS, chosen, path_of
from .operators import Mutant
from .record import Record
from .worker import ROOT, Laws, chain_of, try_all


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    files = chosen(given.files) or WITH_LAWS
    missing = [file for file in files if not (ROOT / path_of(file)).is_file()]
    if missing:
        parser.error(f"there is no {', '.join(map(path_of, missing))}")
    laws = {**FILES, **(dict.fromkeys(files, tuple(given.laws)) if given.laws else {})}
    lawless = [file for file in files if not laws.get(file)]
    if lawless:
        parser.error(
            f"no laws are written for {', '.join(lawless)}; there are some for "
            f"{', '.join(WITH_LAWS)}, and --laws names others"
        )
    made, skipped = split(mutant for file in files for mutant in mutants_of(file))
    if given.sample is not None:
        made = random.Random(given.seed).sample(made, min(given.sample, len(made)))
    console, seconds = Console(), Counter()
    try:
        fates = _run(made, laws, given.jobs, given.resume, seconds, console)
    except (RuntimeError, ValueError) as fault:  # the laws fail with nothing changed
        parser.error(str(fault))
    if given.list:
        for mutant, law in fates.items():
            print(f"{_place(mutant)} {mutant.name}\n    {law}")
    return report(Outcome(fates, equivalents()), console, seconds, Counter(m.file for m in skipped))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.core.mutation")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"of flax_attn, or a folder: {', '.join(FILES)}"
    )
    parser.add_argument("--sample", type=int, metavar="N", help="N mutants, drawn from all files")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--list", action="store_true", help="print every mutant and its end")
    parser.add_argument(
        "--resume", type=Path, metavar="PATH", help="finished mutants: read first, then added to"
    )
    parser.add_argument(
        "--laws", action="append", metavar="BOOK", help="in place of the files' own, from core on"
    )
    return parser


def _run(
    mutants: list[Mutant],
    laws: Laws,
    jobs: int,
    resume: Path | None,
    seconds: Counter,
    console: Console,
) -> dict[Mutant, str | None]:
    """The fates of all, those already known from `resume` included; adds up seconds by file."""
    digests = {file: chain_of(file, laws).digest() for file in {m.file for m in mutants}}
    record = Record(resume, digests) if resume else None
    known = record.finished(mutants) if record else {}
    seconds.update({m.file: 0 for m in mutants})
    for mutant in known:
        seconds[mutant.file] += record.seconds(mutant)
    columns = (TextColumn("{task.description:9}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("mutants", total=len(mutants), completed=len(known))

        def tell(mutant: Mutant, law: str | None, spent: float) -> None:
            seconds[mutant.file] += spent
            progress.advance(task)
            if record:
                record.add(mutant, law, spent)

        new = try_all([m for m in mutants if m not in known], jobs, tell, laws)
    return {mutant: {**known, **new}[mutant] for mutant in mutants}


def report(outcome: Outcome, console: Console, seconds: Counter, skipped: Counter) -> int:
    """Prints the table and all that went wrong; the exit status."""
    table = Table(Column("file", no_wrap=True), *outcome.COLUMNS, "share", "sizes only", "seconds")
    files = list(dict.fromkeys(mutant.file for mutant in outcome.fates))
    for file in sorted(files, key=[*FILES, *files].index):
        count, share = outcome.count(file), f"{100 * outcome.share(file):.1f} %"
        cells = [*(str(count[name]) for name in outcome.COLUMNS), share, str(skipped[file])]
        table.add_row(file, *cells, f"{seconds[file]:.0f}")
    console.print(table)
    for mutant in outcome.alive:
        print(f"alive: {_place(mutant)} {mutant.where} | {mutant.change}\n    {mutant.name}")
    for mutant in outcome.refuted:
        law = outcome.fates[mutant]
        print(f"not equivalent: {_place(mutant)} {mutant.where} | {mutant.change}\n    {law}")
    gone = stale()
    for entry in gone:
        print(f"no such mutant: {entry}")
    enough = all(outcome.share(file) >= ENOUGH for file in files)
    return 0 if enough and not outcome.refuted and not gone else 1


def _place(mutant: Mutant) -> str:
    return f"{path_of(mutant.file)}:{mutant.line}"


if __name__ == "__main__":
    sys.exit(main())
