"""`python -m parity_tests.core.bugs [ID ...] --entered FILE`: which tests see the planted bugs.

Ends with an error if there is a bug that no test sees, or if half of the mutants are seen by none.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table

from flax_attn._internal.markdown import fill, table, text_between

from .bug import ROOT, Bug, bugs
from .choice import SECONDS, Entered, chosen
from .mutants import drawn, files
from .trial import ENOUGH, Copy, Outcome, Record

FILES = 6  # whose mutants are tried where none is named
SHOWN = 2  # names of tests in the table
PAGE = ROOT / "docs" / "trial.md"
MARKS = text_between("<!-- bugs -->", "<!-- end of bugs -->")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        wanted = _wanted(options.ids, bugs()) if options.mutants is None else _mutants(options)
        entered = Entered.read(options.entered)
        record, console = Record(options.record), Console()
        known = {bug: record.outcome(bug, options.only_commit) for bug in wanted}
        asked = entered.seconds, options.enough
        new = [bug for bug, x in known.items() if x is None or not x.stands(*asked)]
        _try(new, entered, record, options, console)
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    outcomes = [record.outcome(bug, options.only_commit) for bug in wanted]
    pairs = [(bug, x) for bug, x in zip(wanted, outcomes, strict=True) if x is not None]
    if options.write:
        PAGE.write_text(
            fill(PAGE.read_text("utf-8"), MARKS, by_room(pairs, options.enough)), "utf-8"
        )
    status = report(pairs, console)
    return status if options.mutants is None else few_seen(pairs)


def _mutants(options: argparse.Namespace) -> list[Bug]:
    """Mutants of the files that are named, or of some that the seed chooses."""
    named = options.mutants or files(FILES, options.seed)
    return [bug for file in named for bug in drawn(file, options.count, options.seed)]


def few_seen(pairs: Sequence[tuple[Bug, Outcome]]) -> int:
    """The exit status of mutants, some of which change nothing: 1 if half of them are unseen."""
    seen = sum(bool(outcome.seen) for _, outcome in pairs)
    return int(2 * seen < len(pairs))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parity_tests.core.bugs")
    parser.add_argument("ids", nargs="*", metavar="ID", help="of bugs; without, all are tried")
    parser.add_argument(
        "--entered", type=Path, required=True, metavar="FILE", help="what each test enters"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="bugs tried at once")
    parser.add_argument(
        "--record", type=Path, metavar="PATH", help="outcomes: read first, then added to"
    )
    parser.add_argument(
        "--only-commit", action="store_true", help="leave out tests that no commit runs"
    )
    text = f"try a bug until N tests have seen it; {ENOUGH} where it is not said"
    parser.add_argument("--enough", type=int, default=ENOUGH, metavar="N", help=text)
    text = "recorded CPU seconds of the tests that are tried on one bug"
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help=text)
    parser.add_argument(
        "--mutants", nargs="*", metavar="FILE", help=f"try mutants of these, or of {FILES} drawn"
    )
    parser.add_argument("--count", type=int, default=50, metavar="N", help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants")
    parser.add_argument("--write", action="store_true", help="put a table into docs/trial.md")
    return parser


def _wanted(ids: Sequence[str], every: list[Bug]) -> list[Bug]:
    """The bugs of these ids, or all."""
    known = {bug.id: bug for bug in every}
    for name in ids:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ValueError(f"No bug is called {name}." + f" Did you mean {near[0]}?" * bool(near))
    return [known[name] for name in ids] if ids else every


def _try(
    new: Sequence[Bug],
    entered: Entered,
    record: Record,
    options: argparse.Namespace,
    console: Console,
) -> None:
    """Tries bugs, as many at once as there are jobs, each in a copy of the checkout."""
    texts = {bug.file: (ROOT / bug.file).read_text("utf-8") for bug in new}
    tests = {bug: chosen(bug, texts[bug.file], entered, options.seconds) for bug in new}
    copies: SimpleQueue[Copy] = SimpleQueue()

    def try_one(bug: Bug) -> None:
        copy = copies.get()
        try:
            record.add(copy.try_bug(bug, tests[bug], options.only_commit))
        finally:
            copies.put(copy)
        progress.update(task, description=bug.id, advance=1)

    columns = TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn()
    jobs = min(options.jobs, len(new))
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        for number in range(jobs):
            copies.put(Copy(Path(folder) / str(number), enough=options.enough))
        task = progress.add_task("bugs", total=len(new))
        with ThreadPoolExecutor(max(jobs, 1)) as pool:
            list(pool.map(try_one, new))


def by_room(pairs: Sequence[tuple[Bug, Outcome]], enough: int) -> str:
    """A line for each room: how many bugs were tried and seen, and the ids of the others.

    >>> bug = Bug("window-off-by-one", "masks", "", "", "", "")
    >>> print(by_room([(bug, Outcome(bug.id, "", ("a", "b"), 3, 1.0))], 2), end="")
    | area | tried | seen | by 2 tests | not seen |
    | --- | --- | --- | --- | --- |
    | masks | 1 | 1 | 1 |  |
    """
    rows = []
    for room in sorted({bug.room for bug, _ in pairs}):
        seen = {bug.id: len(x.seen) for bug, x in pairs if bug.room == room}
        many = [str(sum(count >= enough for count in seen.values()))] * (enough > 1)
        unseen = ", ".join(id for id, count in seen.items() if not count)
        rows.append([room, str(len(seen)), str(sum(map(bool, seen.values()))), *many, unseen])
    by_many = [f"by {enough} tests"] * (enough > 1)
    return table(["area", "tried", "seen", *by_many, "not seen"], rows)


def report(pairs: Sequence[tuple[Bug, Outcome]], console: Console) -> int:
    """Prints the table, notes and the bugs that no test saw; the exit status."""
    names = Column("tests that saw it", overflow="fold")
    table = Table(Column("bug", no_wrap=True), "room", names, "tried", "seconds")
    for bug, outcome in pairs:
        seen = [str(len(outcome.seen)), *outcome.seen[:SHOWN]]
        row = (bug.id, bug.room, "\n".join(seen), str(outcome.tried), f"{outcome.seconds:.0f}")
        table.add_row(*row)
    console.print(table)
    for bug, outcome in pairs:
        if outcome.note:
            console.out(f"{bug.id}: {outcome.note}", highlight=False)
    unseen = [bug for bug, outcome in pairs if not outcome.seen]
    for bug in unseen:
        console.out(f"unseen: {bug.id} ({bug.file}): {bug.behaviour}", highlight=False)
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main())
