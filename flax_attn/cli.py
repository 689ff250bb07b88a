"""The command: `flax-attn parity` proves every variant equal, `flax-attn bench` times attention."""

import argparse
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .bench.options import add_to as add_bench
from .parity import ParityError, Report
from .parity.cases import certificate
from .parity.cases.case import has_torch
from .parity.cases.prove import jobs

OWN = "parity_tests"
WIDTH = 128
MARKS = ("<!-- certificate -->", "<!-- end of certificate -->")
Proof = tuple[str, str, Report]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 if all is equal, 1 if something differs, 2 if the question is unclear."""
    options = _parser().parse_args(argv)
    console = Console(soft_wrap=True)
    try:
        return _bench(options, console) if options.command == "bench" else _parity(options, console)
    except (ValueError, ModuleNotFoundError) as error:
        said = f"flax-attn {options.command}: {error}"
        Console(stderr=True, soft_wrap=True).print(said, markup=False)
        return 2
    except ParityError as error:
        console.print(f"{error}", markup=False, highlight=False)
        return 1
    except KeyboardInterrupt:
        done = "measured" if options.command == "bench" else "proven"
        console.print(f"stopped; nothing is {done}")
        return 130


def _bench(options: argparse.Namespace, console: Console) -> int:
    from .bench.command import bench  # late, so that `parity` does not wait for it

    return bench(options, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flax-attn", description="Attention in JAX that can be trusted."
    )
    parser.add_argument("--version", action="version", version=f"flax-attn {version('flax-attn')}")
    commands = parser.add_subparsers(dest="command", required=True)
    parity = commands.add_parser(
        "parity",
        help="prove every variant equal to its PyTorch originals",
        description="Compares outputs, intermediate values and gradients, eagerly and under jit: "
        "live where torch is installed, else against what torch gave when it was recorded. The "
        "columns: weight tensors carried; largest float64 error of values and of gradients; error "
        "in float32 and bfloat16 over torch's own.",
    )
    parity.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="a variant, one case as a report prints it, or a package whose modules hold CASES",
    )
    parity.add_argument("--json", metavar="FILE", help="write every comparison as JSON")
    parity.add_argument("--html", metavar="FILE", help="write one page with every comparison")
    parity.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the table; between its marks, if the file has them",
    )
    parity.add_argument("--record", action="store_true", help="record torch's results first")
    parity.add_argument("--replay", action="store_true", help="use the record though torch is here")
    parity.add_argument(
        "--real", action="store_true", help="prove trained weights instead (downloads two packages)"
    )
    add_bench(commands)
    return parser


def _parity(options: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    _check_options(options)
    live = has_torch() and not options.replay
    if (options.record or options.real) and not has_torch():
        raise ValueError("--record and --real need torch: pip install 'flax-attn[torch]'.")
    how = "live against torch" if live else "against recorded results, since torch is not used"
    backends: dict[str, str] = {}
    with Workers() as workers:
        asked = Asked([], [], []) if options.real else _asked(options.names, workers)
        wanted = jobs(asked.cases, live, options.seed)
        if not options.real or not _is_cpu(workers, console, how):
            _is_cpu(workers, console, how)
        proofs = list(asked.failed)
        if options.record:
            proofs += _recorded(wanted, asked, workers, console)
        with Progress(console=console, transient=True) as progress:
            proofs += _proofs(wanted, workers, progress)
        if not options.real and not options.names:
            proofs.append(_kept(workers))
        if options.markdown and live:
            backends = _backends(wanted, workers)
    if options.real:
        with Progress(console=console, transient=True) as progress:
            proofs = list(_real(progress))
    return _written(proofs, options, console, backends, start)


def _real(progress: Progress) -> Iterable[Proof]:
    return import_module(f"{OWN}.real").run(progress)


def _as_dict(proof: Proof) -> dict[str, object]:
    variant, witness, report = proof
    return {"variant": variant, "proven_equal_to": witness, **report.to_dict()}


def _write_markdown(path: Path, table: str, whole: bool) -> None:
    """Writes the table; between the marks if there are some, where a part leaves other rows be."""
    old = path.read_text("utf-8") if path.exists() else ""
    if all(mark in old for mark in MARKS):
        before, rest = old.split(MARKS[0], 1)
        held, after = rest.split(MARKS[1], 1)
        table = table if whole else certificate.joined(held.strip(), table)
        table = f"{before}{MARKS[0]}\n{table}{MARKS[1]}{after}"
    path.write_text(table, "utf-8")
