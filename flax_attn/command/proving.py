"""Runs the cases of `flax-attn parity` in workers: selected by name, a fixed set, or all."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from .._internal.devices import fake_devices
from .._internal.progress import Progress
from ..errors import ParityError
from ..parity.cases import markdown
from ..parity.cases.certificate import in_minutes
from ..parity.cases.markdown import PageFacts
from ..parity.cases.prove import Job, jobs, not_proven, prove, record, short
from ..parity.cases.selection import Selection, select_cases
from ..parity.cases.strict import strict
from ..parity.cases.workers import Failure, Workers
from ..parity.report import Report, plural
from .estimate import Estimate
from .results import ParityOptions, Proof, Remaining, Results
from .wrap import wrapped

if TYPE_CHECKING:  # importing these imports jax, which only workers need
    from ..parity.cases.case import Case
    from ..parity.cases.sharded import Split

FULL_CASE_FACTOR = 2.0  # approximate ratio of the time for a full case to one of the fixed set
MIN_TIMED_CASES = 4  # number of cases after which the remaining time is estimated
SLOW_SECONDS = 90.0  # the user is warned if the remaining time is longer
NUM_BUNDLED = 2  # number of trained layers included in the library
PAGE_DEVICES = 8  # number of devices used for the page


def proven(wanted: ParityOptions, progress: Progress) -> Results:
    """Runs everything that was requested.

    Args:
      wanted: the request.
      progress: reports progress, the mode and the machine.
    """
    more = fake_devices(wanted.devices) if wanted.devices else {}
    start = time.monotonic()
    with Workers(settings={**wanted.settings, **more}) as workers:
        workers.start(1 if wanted.names else min(2, os.cpu_count() or 1))
        selection = select_cases(wanted.package, wanted.names, workers)
        every = jobs(selection.cases, wanted.live, wanted.seed)
        machine = workers.call(_machine, None)
        if isinstance(machine, Failure):
            raise ParityError(machine.text)
        started = time.monotonic() - start
        workers.most = (os.cpu_count() or 1) if machine.platform == "cpu" else 1
        write_mode(wanted.live, machine, progress)
        if wanted.devices:
            outcome = _over_devices(every, wanted, machine, workers, progress)
        elif wanted.short:
            outcome = _short(every, workers, progress)
        else:
            estimate = Estimate(every, workers, started)
            outcome = _whole(every, selection, wanted, workers, progress, estimate)
    outcome.proofs += [
        (n.rpartition(".")[2], "-", not_proven(n, why)) for n, why in selection.failed
    ]
    return outcome


class Machine(NamedTuple):
    """The device that JAX runs on."""

    platform: str
    kind: str
    devices: int


def write_mode(live: bool, machine: Machine, progress: Progress) -> None:
    """Writes one line about the reference and the machine."""
    mode = "live against torch" if live else "against recorded results, since torch is not used"
    many = f", {machine.devices} devices" if machine.devices > 1 else ""
    line = f"{mode}, on {machine.platform} ({machine.kind}{many})"
    progress.write_line(wrapped(line, progress.console.width))


def _short(every: Sequence[Job], workers: Workers, progress: Progress) -> Results:
    """Runs the fixed set, and estimates the time for all other cases."""
    wanted, result, times = short(every), Results(), [time.monotonic()]
    try:
        for proof in _proofs(wanted, workers, progress):
            result.proofs.append(proof)
            times.append(time.monotonic())
            if len(result.proofs) == MIN_TIMED_CASES:
                _write_if_slow(times[1:], len(wanted), progress)
    except KeyboardInterrupt:
        result.interrupt(wanted[len(result.proofs) :])
        return result
    seconds = (times[-1] - times[0]) / max(len(wanted), 1)
    done = {job.listed for job in wanted}
    rest = [job.listed.variant for job in every if job.listed not in done]
    cases = len(rest) + NUM_BUNDLED
    result.untried = Remaining(cases, len({*rest}), seconds * FULL_CASE_FACTOR * cases)
    return result


def _write_if_slow(times: Sequence[float], cases: int, progress: Progress) -> None:
    """Writes a line if the rest will take long; `times` exclude the start of the workers."""
    rest = (times[-1] - times[0]) / (len(times) - 1) * (cases - len(times))
    if rest > SLOW_SECONDS:
        progress.write_line(f"{cases} cases; this machine is slow or busy: {in_minutes(rest)} more")


def _whole(
    every: Sequence[Job],
    selection: Selection,
    options: ParityOptions,
    workers: Workers,
    progress: Progress,
    estimate: Estimate,
) -> Results:
    """Runs all comparisons of every case."""
    if options.page is not None:
        markdown.check(options.page, selection.cases, selection.known)
    failures = []
    for result in record(every, selection.known, workers) if options.record else ():
        if isinstance(result, Failure):
            failures.append((result.about, result))
        else:
            progress.write_line(f"recorded {result}")
    names = markdown.layers(selection.cases)
    result = Results(about={variant: PageFacts(name) for variant, name in names.items()})
    try:
        for proof in _proofs(every, workers, progress, estimate):
            result.proofs.append(proof)
        if not options.names or options.page:  # rows of a page include the trained layers
            variants = [case.variant for case in selection.cases if case.package == options.package]
            result.proofs += _bundled_layers(options.package, {*variants}, workers)
        if options.page:
            result.about = _page_facts(every, selection, options, workers)
    except KeyboardInterrupt:
        result.interrupt(every[len(result.proofs) :])
    result.proofs += [(n.rpartition(".")[2], "-", not_proven(n, why)) for n, why in failures]
    return result


def _page_facts(
    every: Sequence[Job], selection: Selection, wanted: ParityOptions, workers: Workers
) -> dict[str, markdown.PageFacts]:
    """By variant, the facts of its page row that reports do not contain."""
    first = [job for job in every if job.eager and wanted.live]
    backends = _backends(first, workers)
    with Workers(2, {**wanted.settings, **fake_devices(PAGE_DEVICES)}) as many:
        many.folders = workers.folders
        devices = _devices(first, many)
    return {
        variant: markdown.PageFacts(name, backends.get(variant, "-"), devices.get(variant, "-"))
        for variant, name in markdown.layers(selection.cases).items()
    }


def _devices(first: Sequence[Job], workers: Workers) -> dict[str, str]:
    """By variant, the device split with which the first case of each reference is equal."""
    device_counts: dict[str, str] = {}
    for job, result in _sharded(first, PAGE_DEVICES, workers):
        if isinstance(result, Failure) or (result is not None and not result[0].ok):
            device_counts[job.listed.variant] = "none"
        elif result is not None:
            device_counts.setdefault(job.listed.variant, str(result[1]))
    return device_counts


def _proofs(
    wanted: Sequence[Job], workers: Workers, progress: Progress, estimate: Estimate | None = None
) -> Iterator[Proof]:
    progress.begin(len(wanted))
    if estimate is not None and wanted:
        progress.write_line(estimate.line())
    for job, report in zip(wanted, prove(wanted, workers), strict=True):
        left = f", {estimate.left(progress.done + 1)}" if estimate is not None else ""
        progress.advance(job.listed.variant + left)
        if estimate is not None and (line := estimate.correction(progress.done)):
            progress.write_line(line)
        yield job.listed.variant, job.listed.reference, report


def _over_devices(
    every: Sequence[Job],
    wanted: ParityOptions,
    machine: Machine,
    workers: Workers,
    progress: Progress,
) -> Results:
    """Runs each case with sharded inputs: the first ones, or all that were selected by name.

    Raises:
      ValueError: if the machine has too few devices.
    """
    count = wanted.devices or 0
    if count > machine.devices:
        raise ValueError(
            f"--devices {count}: JAX has {plural(machine.devices, machine.platform)} here. Where "
            "it has none but a CPU, that one stands for as many as are asked for."
        )
    chosen = [job for job in every if job.eager or not wanted.short]
    outcome = Results()
    progress.begin(len(chosen))
    try:
        for job, result in _sharded(chosen, count, workers):
            variant, reference, title = job.listed[3:6]
            progress.advance(variant)
            if isinstance(result, Failure):
                outcome.proofs.append((variant, reference, not_proven(title, result)))
            elif result is not None:
                outcome.proofs.append((variant, reference, result[0]))
                outcome.devices.setdefault((variant, reference), str(result[1]))
    except KeyboardInterrupt:
        outcome.interrupt(chosen[progress.done :])
    return outcome


def _sharded(wanted: Sequence[Job], devices: int, workers: Workers) -> Iterator[tuple[Job, Any]]:
    """Yields each job with the result of `_prove_over`, or a Failure."""
    work = [(job, devices) for job in wanted]
    return zip(wanted, workers.map(_prove_over, work), strict=True)


def _prove_over(work: tuple[Job, int]) -> "tuple[Report, Split] | None":
    """Runs one case on several devices; None without `attend`, or if no split is possible."""
    from ..parity.cases.sharded import sharded_report

    job, count = work
    case = job.case
    is_own_case = case.home.is_own(case.flax_class)
    if is_own_case and not _attends(case):
        return None
    with strict() if is_own_case else nullcontext():
        return sharded_report(case, job.live, count)


def _machine(_: None = None) -> Machine:
    import jax

    device = jax.devices()[0]
    return Machine(device.platform, device.device_kind, len(jax.devices()))


def _bundled_layers(package: str, variants: set[str], workers: Workers) -> list[Proof]:
    """Compares the bundled layers with trained weights of these variants."""
    result = workers.call(_bundled_proofs, (package, variants))
    if isinstance(result, Failure):
        return [("real", "trained weights", not_proven("the layers of trained weights", result))]
    return result


def _bundled_proofs(wanted: tuple[str, set[str]]) -> list[Proof]:
    package, variants = wanted
    return import_module(f"{package}.real").kept(variants)


def _backends(first: Sequence[Job], workers: Workers) -> dict[str, str]:
    """By variant, the backends on which the first case of each reference is equal."""
    backends: dict[str, list[str]] = {}
    for job, names in zip(first, workers.map(_backends_of, first), strict=True):
        names = ["none"] if isinstance(names, Failure) else names
        before = backends.get(job.listed.variant, names)
        backends[job.listed.variant] = [name for name in before if name in names]
    return {variant: ", ".join(names) for variant, names in backends.items()}


def _backends_of(job: Job) -> list[str]:
    """The backends on which a case is equal; "own" for a layer that does not use `attend`."""
    from ..backends import BACKENDS

    case = job.case
    if not _attends(case):
        return ["own"]
    return [name for name in BACKENDS if _equal_on(name, case)]


def _attends(case: "Case") -> bool:
    """Whether a layer uses `attend`: only its reference backend has attention weights to tap.

    The layer is only traced, so nothing is computed.
    """
    return "weights" in _tap_names(case, "reference") - _tap_names(case, "blockwise")


def _tap_names(case: "Case", backend: str) -> set[str]:
    """Names of a layer's taps with a backend."""
    import jax
    import numpy as np

    from ..attend import use_backend
    from ..taps import listen

    arrays = {name: jax.numpy.asarray(x) for name, x in case.arrays().items()}
    traced = {name: x for name, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}
    names: set[str] = set()

    def call(inputs: dict[str, jax.Array]) -> None:
        case.flax_call(case.flax_module(), **arrays, **inputs)

    with use_backend(backend), listen(lambda name, value: names.add(name)):
        jax.eval_shape(call, {name: arrays.pop(name) for name in traced})
    return names


def _equal_on(backend: str, case: "Case") -> bool:
    from ..attend import use_backend

    try:
        with use_backend(backend):
            return case.report(live=True, eager=False).ok
    except ParityError as error:
        if isinstance(error.__cause__, NotImplementedError):  # not served, e.g. other hardware
            return False
        raise


def real(package: str, progress: Progress) -> Iterator[Proof]:
    """Runs the comparisons on trained weights, which are downloaded."""
    write_mode(True, _machine(), progress)
    yield from _own_proofs(import_module(f"{package}.real"), progress)


def collected(proofs: Iterable[Proof], progress: Progress) -> Results:
    """The results of comparisons that run one by one, until the last or until Ctrl-C."""
    outcome = Results()
    try:
        for proof in proofs:
            outcome.proofs.append(proof)
    except KeyboardInterrupt:
        outcome.interrupted = True
        rest = plural(progress.total - progress.done, "more layer")
        outcome.missing.append(("real", "trained weights", rest))
    return outcome


def families(package: str, names: Sequence[str], progress: Progress) -> Results:
    """Compares the attention of published models with transformers, reporting each at once.

    Args:
      package: with the proofs.
      names: model types; none for all that are not aliases.
      progress: shows how far it is.

    Raises:
      ValueError: if torch or transformers is missing, or a name is no model type.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ValueError(
            "--families compares with the classes of transformers; missing: "
            f"{', '.join(missing)}. pip install torch 'transformers==5.24.*' brings them."
        )
    runner = import_module(f"{package}.families")
    chosen = runner.chosen(names)  # before the first line, which says what is proven
    write_mode(True, _machine(), progress)
    outcome = Results()
    progress.begin(len(chosen))
    try:
        for proof in runner.rows(chosen, progress.at):
            progress.advance()
            verdict = "equal" if proof.report.ok else "DIFFERENT"
            error = proof.report.worst("float64", "output")
            count = f"{progress.done} of {progress.total}"
            progress.write_line(f"{count}: {proof.family}, {proof.layer}: {verdict}, {error:.1e}")
            outcome.about[proof.family] = PageFacts(proof.layer)
            outcome.proofs.append((proof.family, proof.reference, proof.report))
    except KeyboardInterrupt:
        outcome.interrupted = True
        rest = [x.model_type for x in chosen[progress.done :]]
        outcome.missing += [(name, "transformers", name) for name in rest]
    return outcome


def _own_proofs(package: Any, progress: Progress) -> Iterator[Any]:
    """Runs the comparisons of a package with its own runner, `TOTAL` in number."""
    progress.begin(package.TOTAL)
    for proof in package.rows(progress.at):
        progress.advance()
        yield proof
