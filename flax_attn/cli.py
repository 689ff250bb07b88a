"""The command: `flax-attn parity` proves every variant equal, `flax-attn bench` times attention."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress

from .attend import use_backend
from .backends import BACKENDS
from .bench.options import add_to as add_bench
from .parity import Case, ParityError, Report
from .parity.cases import certificate
from .parity.cases.case import has_torch
from .parity.cases.collect import select
from .parity.cases.prove import Job, cases_of, jobs, prove, record
from .parity.compare import versions
from .parity.report import plain
from .parity.show import pages

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
    wanted = [] if options.real else _jobs(options.names, live)
    device = jax.devices()[0]
    how = "live against torch" if live else "against recorded results, since torch is not used"
    console.print(f"{how}, on {device.platform} ({device.device_kind})", markup=False)
    if options.record:
        for path in record(wanted):
            console.print(f"recorded {path}", markup=False, highlight=False)
    with Progress(console=console, transient=True) as progress:
        proofs = list(_real(progress) if options.real else _proofs(wanted, progress))
    if not options.real and not options.names:
        proofs.append(import_module(f"{OWN}.real").kept())
    lines = certificate.lines(proofs)
    Console(width=max(console.width, WIDTH), soft_wrap=True).print(certificate.table(lines))
    for line in lines:
        for report in line.reports:
            if not report.ok:
                console.print(f"\n{report}", markup=False, highlight=False)
    found = proofs[0][2].versions if proofs else versions()
    console.print(certificate.footer(lines, found, time.perf_counter() - start), markup=False)
    if options.json:
        Path(options.json).write_text(
            json.dumps(plain([_as_dict(p) for p in proofs]), indent=1) + "\n"
        )
    if options.html:
        Path(options.html).write_text(pages([report for _, _, report in proofs]), "utf-8")
    if options.markdown:
        backends = _backends(wanted) if live else {}
        table = certificate.markdown(lines, backends)
        _write_markdown(Path(options.markdown), table, whole=not options.names)
    return 0 if proofs and all(line.ok for line in lines) else 1


def _check_options(options: argparse.Namespace) -> None:
    if options.real and (options.names or options.record or options.replay):
        raise ValueError(
            "--real proves all trained weights; it takes no names, --record or --replay."
        )
    if options.record and options.replay:
        raise ValueError("--record needs torch's results, --replay does without: choose one.")


def _jobs(names: Sequence[str], live: bool) -> list[Job]:
    """The cases that `names` ask for: of this library, or of packages that have cases."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a project's own package, as `python -m` finds it
    own = cases_of(OWN)
    packages = [n for n in names if "[" not in n and not select(own, [n]) and find_spec(n)]
    held = {OWN: own, **{package: cases_of(package) for package in packages}}
    wanted = [name for name in names if name not in packages]
    unknown = [n for n in wanted if not any(select(cases, [n]) for cases in held.values())]
    if unknown:
        variants = ", ".join(dict.fromkeys(case.variant for case in own))
        raise ValueError(
            f"{unknown[0]!r} is neither a package, nor a case of one that is named before it, nor "
            f"one of the variants: {variants}."
        )
    found = []
    for package, cases in held.items():
        mine = [name for name in wanted if select(cases, [name])]
        if mine or package in packages or not names:
            found += jobs(package, select(cases, mine), live)
    return found


def _proofs(wanted: Sequence[Job], progress: Progress) -> Iterator[Proof]:
    task = progress.add_task("parity", total=len(wanted))
    for job, report in zip(wanted, prove(wanted), strict=True):
        progress.update(task, description=job.case.variant, advance=1)
        yield job.case.variant, job.case.proven_equal_to, report


def _backends(wanted: Sequence[Job]) -> dict[str, str]:
    """By variant, the backends of this machine on which its first case of each witness is equal."""
    found: dict[str, list[str]] = {}
    for case in (job.case for job in wanted if job.eager):
        chooses = hasattr(sys.modules[case.flax_class.__module__], "attend")
        before = found.get(case.variant, [*BACKENDS] if chooses else ["its own steps"])
        found[case.variant] = [name for name in before if not chooses or _equal_on(name, case)]
    return {variant: ", ".join(names) for variant, names in found.items()}


def _equal_on(backend: str, case: Case) -> bool:
    try:
        with use_backend(backend):
            return case.report(live=True, eager=False).ok
    except ParityError as error:
        if isinstance(error.__cause__, NotImplementedError):  # it refuses: another machine's, say
            return False
        raise


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
