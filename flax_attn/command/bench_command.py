"""`flax-attn bench`: reads the options, runs the benchmark, shows and writes the results."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .._internal.nearest import did_you_mean
from .._internal.progress import Progress
from ..bench import page, plot, scale
from ..bench.competitor import FAMILIES, Competitor
from ..bench.machine import machine
from ..bench.presets import Preset, chosen, devices_of
from ..bench.race import Race
from ..bench.reader import read
from ..bench.result import WRONG, Results, together
from ..bench.table import Printer, Table, compared, legend, remarks, tables
from ..bench.task import Task
from .options import check_file, made_folder
from .wrap import wrapped

FILES = ("--json", "--markdown", "--png", "--out", "--together", "--compare")
MORE = "--all shows memory, quartiles, rates, errors and all the rest."


def bench(options: argparse.Namespace, console: Console) -> int:
    """Runs `flax-attn bench`: 0 if all competitors were equal, 1 if not, 130 if interrupted.

    Raises:
      ValueError: for invalid options.
    """
    preset = chosen(options)
    if options.preset == "scale":
        scale.make_devices(max(devices_of(options)))
    tasks = preset.tasks(options)
    competitors, absent = _competitors(options, preset)
    old = None if options.compare is None else read(Path(options.compare))
    files = _files(options)
    budget = {"rounds": options.rounds, "seconds": options.seconds}
    settings = replace(preset.settings, **{name: x for name, x in budget.items() if x is not None})
    race = Race(competitors, settings)

    def print_text(text: str) -> None:
        console.out(wrapped(text, console.width), highlight=False)

    width = None if options.all else console.width
    printer = Printer(partial(print_line, console), width)
    with Progress("flax-attn bench", console) as progress:
        command = shlex.join(["flax-attn", "bench", *_without_files(sys.argv[2:])])
        facts = machine(options.dtype or ("float32",))
        results = Results(preset.title, command, facts, absent=absent)
        earlier = _earlier(options.together, results)
        print_text(page.machine_of(results))
        run(tasks, race, results, printer, progress, files.get("json"))
    comparison = [] if old is None else [compared(results, old)]
    if comparison and not comparison[0].races:
        print_text(f"nothing in {options.compare} was run here too")
        comparison = []
    whole = together([*earlier, results])
    printer.show(comparison)
    if earlier:
        Printer(printer.say, width).show(tables(whole))
    if any(row.amount is not None for row in results.rows):
        print_text(f"\n{legend(results)}{'' if options.all else f' {MORE}'}")
    for sentence in remarks(results):
        print_text(sentence)
    for path in write(results, whole, files, options.preset, comparison):
        print_text(f"wrote {path}")
    if not results.complete:
        print_text("stopped; what was measured before is shown and written")
        return 130
    return 1 if any(row.status == WRONG for row in results.rows) else 0


def print_line(console: Console, line: str) -> None:
    """Prints a line of a table unchanged, with the fastest bold and green on a terminal."""
    text = Text(line)
    text.highlight_words(["fastest"], "bold green")
    console.print(text, soft_wrap=True)


def run(
    tasks: Sequence[Task],
    race: Race,
    results: Results,
    printer: Printer,
    progress: Progress,
    path: Path | None = None,
) -> None:
    """Runs every task, adding rows to the results, and printing and writing them.

    After Ctrl-C the results hold what was measured until then, and what was not.
    """
    progress.begin(len(tasks))
    results.wanted = len(tasks)
    try:
        for task in tasks:
            where = ", ".join(f"{head} {x}" for head, x in [*task.cells.items()][:1])
            race.run(task, results.rows, lambda step, where=where: progress.at(f"{where}: {step}"))
            printer.show(tables(results))
            progress.advance()
            results.missing = [str(task) for task in tasks[progress.done :]]
            if path is not None:
                results.write(path)  # a crash keeps it
        results.complete = True
    except KeyboardInterrupt:
        results.stop()
        results.missing = [str(task) for task in tasks[progress.done :]]
        printer.show(tables(results))


def _competitors(
    options: argparse.Namespace, preset: Preset
) -> tuple[list[Competitor], dict[str, str]]:
    """Available competitors, with this library's first, and why others are absent."""
    families = preset.against if options.against is None else options.against
    families = FAMILIES if families is None else () if families == ("none",) else families
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        known = did_you_mean(unknown[0], [*FAMILIES, "none"], "it takes")
        raise ValueError(f"--against does not take {unknown[0]!r}: {known}")
    every = [c for c in preset.competitors(options) if c.is_ours or c.family in families]
    reasons = {c.family: reason for c in every if (reason := c.absent())}
    return [c for c in every if c.family not in reasons], reasons


def _earlier(names: str | None, results: Results) -> list[Results]:
    """Reads the runs to show together with this one, and checks them before measuring."""
    earlier = [read(Path(name)) for name in (names or "").split(",") if name]
    together([*earlier, results])
    return earlier


def _without_files(args: Sequence[str]) -> list[str]:
    """The arguments without options that name files or choose columns, which change no result."""
    options = []
    for before, arg in zip(["", *args], args, strict=False):
        if before not in FILES and arg.split("=")[0] not in (*FILES, "--all", "--all-figures"):
            options.append(arg)
    return options


def write(
    results: Results, whole: Results, files: dict[str, Path], preset: str, more: Sequence[Table]
) -> list[Path]:
    """Writes the requested files and returns their paths; the page shows all runs of `whole`."""
    written = []
    if "json" in files:
        results.write(files["json"])
        written.append(files["json"])
    if "markdown" in files:
        text = page.markdown(whole, more)
        page.write(files["markdown"], text, page.marks(results, preset))
        written.append(files["markdown"])
    if "png" in files:
        written += plot.plots(results, files["png"])
    return written


def _files(options: argparse.Namespace) -> dict[str, Path]:
    """Output files by kind; checks in advance that they can be written."""
    named = {k: v for k in ("json", "markdown", "png") if (v := getattr(options, k)) is not None}
    for name, file in named.items():
        check_file(f"--{name}", file)
    files = {name: Path(file) for name, file in named.items()}
    if options.out is not None:
        files = {**_in_folder(options.out), **files}
    if options.png and (reason := plot.absent()):
        raise ValueError(f"--png cannot be had: {reason}.")
    return files


def _in_folder(name: str) -> dict[str, Path]:
    """Creates the folder of `--out` and returns its files."""
    out = made_folder("--out", name)
    files = {"json": out / "bench.json", "markdown": out / "bench.md"}
    if plot.absent() is None:
        files["png"] = out / "bench.png"
    for path in files.values():
        check_file("--out", str(path))
    return files
