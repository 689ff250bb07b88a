"""The command: `flax-attn parity` proves every variant equal, `flax-attn bench` times attention."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress

from .attend import use_backend
from .backends import BACKENDS
from .bench.options import add_to as add_bench
from .parity import Case, ParityError, Report
from .parity.cases import certificate, markdown
from .parity.cases.asked import ask
from .parity.cases.case import has_torch
from .parity.cases.collect import Listed
from .parity.cases.prove import Job, jobs, not_proven, prove, record
from .parity.cases.workers import Failure, Workers
from .parity.compare import versions
from .parity.report import plain
from .parity.show import pages

OWN = "parity_tests"
WIDTH = 192
Proof = tuple[str, str, Report]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 if all is equal, 1 if something differs, 2 if the question is unclear."""
    options = _parser().parse_args(argv)
    console = Console(soft_wrap=True, emoji=False)
    try:
        return _bench(options, console) if options.command == "bench" else _parity(options, console)
    except (ValueError, ModuleNotFoundError) as error:
        said = f"flax-attn {options.command}: {error}"
        Console(stderr=True, soft_wrap=True).out(said, highlight=False)
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
        help="a variant or its class; a package, a module or a file that holds CASES; after it, or "
        "of this library, one case: its name, or its title as a report prints it",
    )
    parity.add_argument("--json", metavar="FILE", help="write every comparison as JSON")
    parity.add_argument("--html", metavar="FILE", help="write one page with every comparison")
    parity.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the table, between the marks if the file has them, and its short form on the "
        "page that the first mark names; a part of the variants leaves other rows as they are",
    )
    _add_ways(parity)
    add_bench(commands)
    return parser


def _add_ways(parity: argparse.ArgumentParser) -> None:
    """Options that say against what, and how strictly, cases are proven."""
    parity.add_argument("--record", action="store_true", help="record torch's results first")
    parity.add_argument("--replay", action="store_true", help="use the record though torch is here")
    parity.add_argument(
        "--strict",
        action="store_true",
        help="what is equal only as far as its input can tell counts as different",
    )
    parity.add_argument("--seed", type=int, metavar="N", help="draw other numbers, in every case")
    parity.add_argument(
        "--real", action="store_true", help="prove trained weights instead (downloads two packages)"
    )


def _parity(options: argparse.Namespace, console: Console) -> int:
    start = time.perf_counter()
    _check_options(options)
    live = has_torch() and not options.replay
    if (options.record or options.real) and not has_torch():
        raise ValueError("--record and --real need torch: pip install 'flax-attn[torch]'.")
    if options.real:
        _say_how(live, _machine(), console)
        with Progress(console=console, transient=True) as progress:
            proofs, about = list(_real(progress)), {}
    else:
        proofs, about = _proven(options, live, console)
    lines = certificate.lines(proofs)
    Console(width=max(console.width, WIDTH), soft_wrap=True).print(certificate.table(lines))
    for report in (report for line in lines for report in line.reports):
        if not report.ok or (options.strict and not report.certain):
            console.out(f"\n{_told(report)}", highlight=False)
    found = proofs[0][2].versions if proofs else versions()
    seconds = time.perf_counter() - start
    console.out(certificate.footer(lines, found, seconds, options.strict), highlight=False)
    _write(options, proofs, markdown.markdown(lines, about), console)
    return 0 if proofs and all(_passes(report, options.strict) for _, _, report in proofs) else 1


def _passes(report: Report, strict: bool) -> bool:
    return report.certain if strict else report.ok


def _told(report: Report) -> str:
    """The report; in one line where nothing could be compared."""
    if report.rows or not report.notes:
        return str(report)
    told = " ".join(report.notes)
    return told if told.startswith(f"{report.title} ") else f"{report.title}: {told}"


def _check_options(options: argparse.Namespace) -> None:
    if options.real and (options.names or options.record or options.replay):
        raise ValueError(
            "--real proves all trained weights; it takes no names, --record or --replay."
        )
    if options.real and options.markdown and markdown.has_marks(Path(options.markdown)):
        raise ValueError(
            "--real proves trained weights alone: give --markdown a page without marks."
        )
    if options.record and options.replay:
        raise ValueError("--record needs torch's results, --replay does without: choose one.")
    if options.seed is not None and (options.record or options.replay or options.real):
        raise ValueError("--seed draws other numbers than were recorded: torch alone can tell.")


def _say_how(live: bool, machine: tuple[str, str], console: Console) -> None:
    how = "live against torch" if live else "against recorded results, since torch is not used"
    console.out(f"{how}, on {machine[0]} ({machine[1]})", highlight=False)


def _machine(_: None = None) -> tuple[str, str]:
    """What JAX runs on."""
    device = jax.devices()[0]
    return device.platform, device.device_kind


def _proven(
    options: argparse.Namespace, live: bool, console: Console
) -> tuple[list[Proof], dict[str, markdown.About]]:
    """All that is asked for, proven by workers, and by variant what a Markdown row says of it."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a project's own package, as `python -m` finds it
    with Workers() as workers:
        asked = ask(OWN, options.names, workers)
        if options.markdown:
            markdown.check(Path(options.markdown), asked.cases, asked.known)
        wanted = jobs(asked.cases, live, options.seed)
        machine = workers.call(_machine, None)
        if isinstance(machine, Failure):
            raise ParityError(machine.text)
        workers.most = (os.cpu_count() or 1) if machine[0] == "cpu" else 1
        _say_how(live, machine, console)
        failed = list(asked.failed)
        for result in record(wanted, asked.known, workers) if options.record else ():
            if isinstance(result, Failure):
                failed.append((result.about, result))
            else:
                console.out(f"recorded {result}", highlight=False)
        with Progress(console=console, transient=True) as progress:
            proofs = list(_proofs(wanted, workers, progress))
        if not options.names or (options.markdown and _holds_kept(asked.cases)):
            proofs.append(_kept(workers))
        backends = _backends(wanted, workers) if options.markdown and live else {}
    proofs += [(name.rpartition(".")[2], "-", not_proven(name, why)) for name, why in failed]
    layers = markdown.layers(asked.cases)
    return proofs, {v: markdown.About(layers[v], backends.get(v, "-")) for v in layers}


def _proofs(wanted: Sequence[Job], workers: Workers, progress: Progress) -> Iterator[Proof]:
    task = progress.add_task("parity", total=len(wanted))
    for job, report in zip(wanted, prove(wanted, workers), strict=True):
        progress.update(task, description=job.listed.variant, advance=1)
        yield job.listed.variant, job.listed.witness, report


def _holds_kept(cases: Sequence[Listed]) -> bool:
    """Whether the layer of the trained weights is among these: its row names them too."""
    variant = import_module(f"{OWN}.real").VARIANT
    return any((case.package, case.variant) == (OWN, variant) for case in cases)


def _kept(workers: Workers) -> Proof:
    """The layer with trained weights that comes with the library."""
    result = workers.call(_kept_proof, None)
    if isinstance(result, Failure):
        return "real", "trained weights", not_proven("the layer of trained weights", result)
    return result


def _kept_proof(_: None) -> Proof:
    return import_module(f"{OWN}.real").kept()


def _backends(wanted: Sequence[Job], workers: Workers) -> dict[str, str]:
    """By variant, the backends of this machine on which its first case of each witness is equal."""
    found: dict[str, list[str]] = {}
    first = [job for job in wanted if job.eager]
    for job, names in zip(first, workers.map(_backends_of, first), strict=True):
        names = ["none"] if isinstance(names, Failure) else names
        before = found.get(job.listed.variant, names)
        found[job.listed.variant] = [name for name in before if name in names]
    return {variant: ", ".join(names) for variant, names in found.items()}


def _backends_of(job: Job) -> list[str]:
    """The backends on which a case is equal; "own" for a layer that does not use `attend`."""
    case = job.case
    if not hasattr(sys.modules[case.flax_class.__module__], "attend"):
        return ["own"]
    return [name for name in BACKENDS if _equal_on(name, case)]


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


def _write(
    options: argparse.Namespace, proofs: Sequence[Proof], table: str, console: Console
) -> None:
    """Writes the files that were asked for."""
    if options.json:
        text = json.dumps(plain([_as_dict(proof) for proof in proofs]), indent=1)
        Path(options.json).write_text(text + "\n")
    if options.html:
        Path(options.html).write_text(pages([report for _, _, report in proofs]), "utf-8")
    if options.markdown:
        written = markdown.write(Path(options.markdown), table, whole=not options.names)
        console.out(f"wrote {' and '.join(map(str, written))}", highlight=False)


def _as_dict(proof: Proof) -> dict[str, object]:
    variant, witness, report = proof
    return {"variant": variant, "proven_equal_to": witness, **report.to_dict()}
