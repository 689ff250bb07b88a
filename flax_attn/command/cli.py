"""The `flax-attn` command: `parity` compares, `bench` times, `explain` shows backends.

`record` saves torch's results, `identify` names the layer that a torch module is, `check-device`
runs everything on one machine. Slow modules are imported only when needed.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import identify_command
from .options import Parser, Version, check_file, missing

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
        message = f"flax-attn {options.command}: {error}"
        Console(stderr=True, soft_wrap=True).out(message, highlight=False)
        return 2
    except ParityError as error:
        console.print(f"{error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        done = "measured" if options.command == "bench" else "proven"
        console.print(f"stopped; nothing is {done}")
        return 130


def _bench(options: argparse.Namespace, console: "Console") -> int:
    from .bench_command import bench

    return bench(options, console)


def _explain(options: argparse.Namespace, console: "Console") -> int:
    from .explain_command import explained

    console.out(explained(options), highlight=False)
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
    _add_parity(commands)
    _add_record(commands)
    identify_command.add_to(commands)
    _add_explain(commands)
    _add_check_device(commands)
    if "bench" in argv:  # its options are slow to import
        from ..bench.options import add_to

        add_to(commands)
    else:
        commands.add_parser("bench", help=BENCH)
    return parser


def _add_parity(commands: Any) -> None:
    parity = commands.add_parser(
        "parity",
        help="prove every variant equal to its PyTorch originals",
        description="Compares outputs, intermediate values and gradients: live where torch is "
        "installed, else against what torch gave when it was recorded. Without names it proves "
        "a fixed set of cases, one of each kind of layer, in float64 under jit, which takes about "
        "a minute; --all proves everything, eagerly and under jit, in float32 and bfloat16 too. "
        "The columns: number of weight tensors copied; largest float64 error of values and of "
        "gradients; error in float32 and bfloat16 divided by torch's own.",
    )
    parity.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="what to prove whole: a variant or its class; a package, a module or a file that "
        "holds CASES; the name of one case, as a report prints it",
    )
    parity.add_argument("--all", action="store_true", help="prove every case of this library whole")
    parity.add_argument("--json", metavar="FILE", help="write every comparison as JSON")
    parity.add_argument("--html", metavar="FILE", help="write one page with every comparison")
    parity.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the table, between the marks if the file has them, and its short form on the "
        "page that the first mark names; a part of the variants leaves other rows as they are "
        "(without names: --all)",
    )
    _add_ways(parity)


def _add_ways(parity: argparse.ArgumentParser) -> None:
    """Adds options for what cases are compared with, and how strictly."""
    parity.add_argument(
        "--record",
        action="store_true",
        help="record torch's results first (without names: --all)",
    )
    parity.add_argument("--replay", action="store_true", help="use the record though torch is here")
    parity.add_argument(
        "--strict",
        action="store_true",
        help="what is equal only as far as its input can tell counts as different",
    )
    parity.add_argument("--seed", type=int, metavar="N", help="draw other numbers, in every case")
    parity.add_argument(
        "--real", action="store_true", help="prove trained weights instead (fetches four packages)"
    )
    parity.add_argument(
        "--families",
        action="store_true",
        help="prove the attention of published models instead, in float64 with gradients, and list "
        "the model types that `flax_attn.families` reads; with names, of these model types alone "
        "(needs transformers)",
    )
    parity.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="prove layers with their inputs sharded over as many of N devices as batch and length "
        "allow, against the original on one, in float64: the first case of each, or all of what is "
        "named; a CPU stands for as many as are asked for",
    )
    parity.add_argument(
        "--no-cache",
        action="store_true",
        help="keep no compiled programs (1 GiB at most, in your cache folder, unless "
        "JAX_COMPILATION_CACHE_DIR says where)",
    )


def _add_record(commands: Any) -> None:
    record = commands.add_parser(
        "record",
        help="record all that PyTorch gives for cases, to prove ports on a machine without it",
        description="Writes one file for each case: inputs, weights, outputs, intermediate values, "
        "gradients, dropout masks and rounding noise. There flax_attn.parity.Recording(file) "
        "stands for the torch module.",
    )
    record.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="a class by its import path; or, as of parity, a variant, a package, a module or a "
        "file that holds CASES, and after it one case",
    )
    record.add_argument(
        "--to",
        default=".",
        metavar="FOLDER",
        help="the files' folder, made if missing; default: here",
    )


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="say which backend `attend` takes for a request, and why the others do not serve it",
        description="Prints every backend's verdict on attention over arrays of these shapes; "
        "nothing is computed. Example: flax-attn explain --q 2 5 6 8 --kv 2 9 3 8 --dtype bfloat16 "
        "--mask 'Causal() & Window(3, 0)' --on tpu",
    )
    add, shape = explain.add_argument, {"type": int, "nargs": "+"}
    add("--q", **shape, required=True, metavar="SIZE", help="shape of the queries: B T N H")
    add("--kv", **shape, metavar="SIZE", help="shape of keys and values: B S K H; default: of --q")
    add("--v", **shape, metavar="SIZE", help="shape of the values, where it is another: B S K h")
    add("--dtype", default="float32", metavar="DTYPE", help="float32 (default), bfloat16, ...")
    add("--mask", default="FULL", metavar="MASK", help="of flax_attn's masks, with & | ~")
    add("--sinks", action="store_true", help="with a sink logit for each query head")
    add("--dropout", type=float, metavar="RATE", help="with dropout of this rate")
    add("--shards", type=int, metavar="N", help="with the length sharded over N devices")
    add("--strategy", default="all_gather", metavar="NAME", help="all_gather, ring or ulysses")
    add("--layout", default="contiguous", metavar="NAME", help="contiguous, zigzag or striped")
    add("--on", metavar="PLATFORM", help="cpu, gpu or tpu; default: this machine")
    add("--capability", metavar="X.Y", help="of the GPU: 9.0 for an H100; default 8.0")


def _add_check_device(commands: Any) -> None:
    check = commands.add_parser(
        "check-device",
        help="prove and time this library on the device at hand, and write a report",
        description="In this order: device and versions; recorded results of PyTorch for every "
        "layer, in float32 and bfloat16; every backend against the plain formula on 60 requests; "
        "attention from 1k to 32k tokens, and steps of decoding, beside jax.nn and torch; memory "
        "at T and 2T tokens. Each part leaves its file in the folder as soon as it is done. Needs "
        "no network and no torch. What does not fit into the time is listed in the report. Ends "
        "with 0 if all that was tried is equal, 1 if something differs, 2 if nothing is proven.",
    )
    check.add_argument(
        "--out", required=True, metavar="FOLDER", help="where the files and report.md go"
    )
    check.add_argument(
        "--minutes", type=float, metavar="N", help="about how long; default: 8, with --small 2"
    )
    check.add_argument(
        "--only",
        metavar="PARTS",
        help="of machine, layers, requests, speed and memory, with commas; the first always runs",
    )
    check.add_argument(
        "--small", action="store_true", help="few and small inputs, to try the command on a CPU"
    )


def _parity(options: argparse.Namespace, console: "Console") -> int:
    from ..parity.cases.home import has_torch
    from ..parity.cases.known import check_names

    _check_options(options)
    _check_outputs(options)
    check_names(OWN, [] if options.families else options.names)
    live = has_torch() and not options.replay
    if (options.record or options.real) and not has_torch():
        raise ValueError("--record and --real need torch: pip install 'flax-attn[torch]'.")
    from .._internal.progress import Progress
    from ..parity.cases import certificate

    with Progress("flax-attn parity", console) as progress:
        outcome = _proven(options, live, progress)
    proofs = outcome.proofs
    lines = certificate.lines(proofs)
    _wide_console(console).print(_table(options, outcome, console))
    for report in (report for line in lines for report in line.reports):
        if not report.ok or (options.strict and not report.certain):
            console.out(f"\n{_report_text(report)}", highlight=False)
    seconds = time.monotonic() - STARTED
    of = ("family", "families") if options.families else ("variant", "variants")
    foot = certificate.footer(lines, _versions(proofs), seconds, options.strict, of)
    if outcome.untried:
        foot = f"{certificate.remaining_text(*outcome.untried)}\n{foot}"
    console.out(foot, highlight=False)
    _write(options, outcome, console)
    return 0 if proofs and all(_passes(report, options.strict) for _, _, report in proofs) else 1


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
        return proving.Results(proving.real(OWN, progress))
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


def _check_outputs(options: argparse.Namespace) -> None:
    """Checks in advance that output files can be written."""
    for option in ("json", "html", "markdown"):
        name = getattr(options, option)
        if name is not None:
            check_file(f"--{option}", name)


def _write(options: argparse.Namespace, outcome: "Results", console: "Console") -> None:
    """Writes the requested files."""
    from ..parity.cases import certificate, markdown
    from ..parity.report import plain
    from ..parity.show import pages

    proofs = outcome.proofs
    if options.json:
        text = json.dumps(plain([_as_dict(proof) for proof in proofs]), indent=1)
        Path(options.json).write_text(text + "\n")
    if options.html:
        Path(options.html).write_text(pages([report for _, _, report in proofs]), "utf-8")
    if options.markdown:
        table = markdown.markdown(certificate.lines(proofs), outcome.about)
        written = markdown.write(Path(options.markdown), table, whole=not options.names)
        console.out(f"wrote {' and '.join(map(str, written))}", highlight=False)


def _as_dict(proof: "Proof") -> dict[str, object]:
    variant, reference, report = proof
    return {"variant": variant, "proven_equal_to": reference, **report.to_dict()}


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
