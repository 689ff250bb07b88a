"""The `flax-attn` command: `parity` compares, `bench` times, `explain` shows backends.

`record` saves torch's results, `identify` names the layer that a torch module is, `check-device`
runs everything on one machine. Slow modules are imported only when needed.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import arguments, identify_command
from .files import check_outputs, write
from .options import Parser, Version, missing
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from .._internal.progress import Progress
    from ..parity.report import Report
    from .proving import Proof, Results

OWN = "parity_tests"  # the package of this library's cases
WIDE = 192  # columns if the output is not a terminal
STARTED = time.monotonic()
BENCH = "time attention against others, each proven equal first"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0 if everything is equal, 1 if something differs or nothing is proven, 2 on bad arguments.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = _parser(argv).parse_args(argv)
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    from rich.console import Console

    from ..errors import ParityError

    console = Console(soft_wrap=True, emoji=False)
    try:
        return COMMANDS[options.command](options, console)
    except (ValueError, ModuleNotFoundError) as error:
        _say(Console(stderr=True), f"flax-attn {options.command}: {error}")
        return 2
    except ParityError as error:
        _say(console, str(error))
        return 1
    except KeyboardInterrupt:
        done = "measured" if options.command == "bench" else "proven"
        console.print(f"stopped; nothing is {done}")
        return 130


def _say(console: "Console", text: str) -> None:
    """Prints text that is wrapped at words."""
    console.out(wrapped(text, console.width), highlight=False)


def _bench(options: argparse.Namespace, console: "Console") -> int:
    from .bench_command import bench

    return bench(options, console)


def _explain(options: argparse.Namespace, console: "Console") -> int:
    from .explain_command import explained

    _say(console, explained(options))
    return 0


def _check_device(options: argparse.Namespace, console: "Console") -> int:
    from .._internal.progress import Progress
    from .check_device_command import check_device

    with Progress("flax-attn check-device", console) as progress:
        return check_device(options, console, progress)


def _record(options: argparse.Namespace, console: "Console") -> int:
    from .._internal.progress import Progress
    from .record_command import recorded

    with Progress("flax-attn record", console) as progress:
        return recorded(OWN, options.names, Path(options.to), progress)


def _parser(argv: Sequence[str]) -> Parser:
    parser = Parser(prog="flax-attn", description="Attention in JAX that can be trusted.")
    parser.add_argument("--version", action=Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True)
    parser.commands = commands.choices
    arguments.add_parity(commands)
    arguments.add_record(commands)
    identify_command.add_to(commands)
    arguments.add_explain(commands)
    arguments.add_check_device(commands)
    if "bench" in argv:  # its options are slow to import
        from ..bench.options import add_to

        add_to(commands)
    else:
        commands.add_parser("bench", help=BENCH)
    return parser


def _parity(options: argparse.Namespace, console: "Console") -> int:
    from ..parity.cases.home import has_torch
    from ..parity.cases.known import check_names

    _check_options(options)
    check_outputs(options)
    check_names(OWN, [] if options.families else options.names)
    live = has_torch() and not options.replay
    if (options.record or options.real) and not has_torch():
        raise ValueError("--record and --real need torch: pip install 'flax-attn[torch]'.")
    from .._internal.progress import Progress
    from ..parity.cases import certificate

    with Progress("flax-attn parity", console) as progress:
        outcome = _proven(options, live, progress)
    if outcome.interrupted and not outcome.proofs:
        raise KeyboardInterrupt
    lines = certificate.lines(outcome.proofs)
    _wide_console(console).print(_table(options, outcome, console))
    for report in (report for line in lines for report in line.reports):
        if not report.ok or (options.strict and not report.certain):
            _say(console, f"\n{_report_text(report)}")
    _say(console, _foot(options, outcome))
    write(options, outcome, console)
    if outcome.interrupted:
        return 130
    passed = all(_passes(report, options.strict) for *_, report in outcome.proofs)
    return 0 if outcome.proofs and passed else 1


def _foot(options: argparse.Namespace, outcome: "Results") -> str:
    """The lines below the table: what was not tried or not finished, counts, versions and time."""
    from ..parity.cases import certificate

    seconds = time.monotonic() - STARTED
    of = ("family", "families") if options.families else ("variant", "variants")
    lines = certificate.lines(outcome.proofs)
    foot = certificate.footer(lines, _versions(outcome.proofs), seconds, options.strict, of)
    if outcome.untried:
        foot = f"{certificate.remaining_text(*outcome.untried)}\n{foot}"
    if outcome.interrupted:
        missing = [variant for variant, *_ in outcome.missing]
        foot = f"{foot}\n{certificate.interrupted_text(len(outcome.proofs), missing)}"
    return foot


def _table(options: argparse.Namespace, outcome: "Results", console: "Console") -> "Table":
    from ..parity.cases import certificate

    if options.families:
        from .family_table import table

        return table(certificate.lines(outcome.proofs), outcome.about, options.strict)
    shown = certificate.lines(outcome.proofs)
    for line in shown:
        line.devices = outcome.devices.get((line.variant, line.proven_equal_to), "-")
    return certificate.table(shown, _width(console), options.strict)


def _is_short(options: argparse.Namespace) -> bool:
    """Whether only the fixed set is requested."""
    others = options.real or options.families
    whole = options.all or others or options.record or options.markdown
    return not (options.names or whole)


def _proven(options: argparse.Namespace, live: bool, progress: "Progress") -> "Results":
    from ..parity.cases.cache import cache_settings
    from . import proving

    if options.real:
        return proving.collected(proving.real(OWN, progress), progress)
    if options.families:
        return proving.families(OWN, options.names, progress)
    wanted = proving.ParityOptions(
        package=OWN,
        names=options.names,
        live=live,
        record=options.record,
        page=Path(options.markdown) if options.markdown else None,
        seed=options.seed,
        short=_is_short(options),
        settings=cache_settings(not options.no_cache),
        devices=options.devices,
    )
    return proving.proven(wanted, progress)


def _width(console: "Console") -> int:
    """Width of the terminal in columns; `WIDE` if there is none."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else WIDE


def _wide_console(console: "Console") -> "Console":
    """A console that does not wrap lines, since the table is laid out for the width."""
    from rich.console import Console

    return Console(width=max(console.width, WIDE), soft_wrap=True)


def _versions(proofs: "Sequence[Proof]") -> dict[str, str]:
    if proofs:
        return proofs[0][2].versions
    from ..parity.versions import versions

    return versions()


def _passes(report: "Report", strict: bool) -> bool:
    return report.certain if strict else report.ok


def _report_text(report: "Report") -> str:
    """The report; a single line if nothing could be compared."""
    if report.rows or not report.notes:
        return str(report)
    notes = " ".join(report.notes)
    return notes if notes.startswith(f"{report.title} ") else f"{report.title}: {notes}"


def _check_options(options: argparse.Namespace) -> None:
    from ..parity.cases import markdown

    if options.real and (options.names or options.record or options.replay):
        raise ValueError(
            "--real proves all trained weights; it takes no names, --record or --replay."
        )
    if options.real and options.markdown and markdown.has_marks(Path(options.markdown)):
        raise ValueError(
            "--real proves trained weights alone: give --markdown a page without marks."
        )
    others = ("all", "record", "replay", "real", "markdown")
    if options.families and (options.seed is not None or any(vars(options)[x] for x in others)):
        raise ValueError(
            "--families proves published models alone; it takes names of model types, and no "
            "--all, --record, --replay, --real, --seed or --markdown."
        )
    _check_devices(options)
    if options.all and (options.names or options.real):
        raise ValueError(
            "--all proves every case of this library; names and --real are proven whole without it."
        )
    if options.record and options.replay:
        raise ValueError("--record needs torch's results, --replay does without: choose one.")
    if options.seed is not None and (options.record or options.replay or options.real):
        raise ValueError("--seed draws other numbers than were recorded: torch alone can tell.")


def _check_devices(options: argparse.Namespace) -> None:
    if options.devices is None:
        return
    if options.devices < 2:
        raise ValueError(f"--devices takes two or more; got {options.devices}.")
    others = ("real", "families", "record", "markdown")
    flags = [f"--{name}" for name in others if vars(options)[name]]
    if flags:
        raise ValueError(
            f"--devices proves sharded inputs alone; it takes no {' or '.join(flags)}. The page of "
            "--all --markdown has a column for it."
        )


COMMANDS = {
    "bench": _bench,
    "check-device": _check_device,
    "explain": _explain,
    "identify": identify_command.identify,
    "parity": _parity,
    "record": _record,
}


if __name__ == "__main__":  # for `python -m flax_attn.command.cli`
    raise SystemExit(main())
