"""Runs the comparisons of `flax-attn parity`, and fills in their results as each is done."""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._internal.devices import fake_devices
from .._internal.progress import Progress
from ..errors import ParityError
from ..parity.cases import markdown
from ..parity.cases.cache import cache_settings
from ..parity.cases.home import OWN, has_torch
from ..parity.cases.markdown import PageFacts
from ..parity.cases.prove import Job, jobs, not_proven, record, short
from ..parity.cases.selection import select_cases
from ..parity.cases.strict import strict
from ..parity.cases.workers import Failure, Workers
from ..parity.report import Report, plural
from .results import Proof, Results
from .wrap import wrapped

if TYPE_CHECKING:  # importing these imports jax, which only workers need
    from ..parity.cases.case import Case

NUM_BUNDLED = 2  # number of trained layers included in the library
PAGE_DEVICES = 8  # number of devices used for the page


def proven(options: argparse.Namespace, results: Results, progress: Progress) -> None:
    """Proves cases: those selected by name, or all, or the fixed set in float64 under jit.

    Args:
      options: the command's.
      results: gets a row for each case before the first is proven, and its report when it is.
      progress: reports progress, the mode, the machine and each case.

    Raises:
      ValueError: for a name that matches nothing, a page that cannot be written, or more devices
        than there are.
      ParityError: if JAX does not start.
    """
    live = has_torch() and not options.replay
    whole = bool(options.names or options.all or options.record or options.markdown)
    settings = cache_settings(not options.no_cache)
    more = fake_devices(options.devices) if options.devices else {}
    cores = os.cpu_count() or 1
    with Workers(options.workers or min(2, cores), {**settings, **more}) as workers:
        cases, known, failed = select_cases(OWN, options.names, workers)
        machine = workers.call(_machine, None)
        if isinstance(machine, Failure):
            raise ParityError(machine.text)
        workers.most = options.workers or (cores if machine.platform == "cpu" else 1)
        write_mode(live, machine, progress)
        every = jobs(cases, live, options.seed)
        for name, failure in failed:
            results.add([(name.rpartition(".")[2], "-", not_proven(name, failure.text))])
        if options.devices:
            if options.devices > machine.devices:
                raise ValueError(
                    f"--devices {options.devices}: JAX has "
                    f"{plural(machine.devices, machine.platform)} here. Where it has none but a "
                    "CPU, that one stands for as many as are asked for."
                )
            chosen = [job._replace(devices=options.devices) for job in every if job.eager or whole]
            _prove_each(chosen, results, workers, progress)
            return
        page = Path(options.markdown) if options.markdown else None
        if page is not None:
            markdown.check(page, cases, known)
        for variant, result in record(every, known, workers) if options.record else ():
            if isinstance(result, Failure):
                why = not_proven(variant, f"not recorded: {result.text}")
                results.add([(variant, "-", why)])
            else:
                progress.write_line(f"recorded {result}")
        names = markdown.layers(cases)
        results.about = {variant: PageFacts(name) for variant, name in names.items()}
        chosen = every if whole else short(every)
        _prove_each(chosen, results, workers, progress)
        if not whole:
            rest = {job.listed for job in every} - {job.listed for job in chosen}
            results.untried = len(rest) + NUM_BUNDLED, len({case.variant for case in rest})
        elif not options.names or page:  # rows of a page include the trained layers
            variants = {case.variant for case in cases if case.package == OWN}
            bundled = workers.call(_bundled_proofs, variants)
            if isinstance(bundled, Failure):
                why = not_proven("the layers of trained weights", bundled.text)
                bundled = [("real", "trained weights", why)]
            results.add(bundled)
        if page is not None:
            first = [job for job in every if job.eager and live]
            results.about = _page_facts(first, names, settings, workers)


def _prove_each(
    chosen: Sequence[Job], results: Results, workers: Workers, progress: Progress
) -> None:
    """Proves cases, and writes a line for each when it is done."""
    rows = results.begin(job.listed[3:6] for job in chosen)
    progress.begin(len(rows))
    for i, result in workers.as_completed(prove, chosen):
        row = rows[i]
        progress.advance(row.variant)
        if result is None:
            results.rows.remove(row)
            continue
        failed = isinstance(result, Failure)
        report, row.devices = (not_proven(row.title, result.text), "-") if failed else result
        row.report = replace(report, flax_class=chosen[i].listed.of)
        count = f"{progress.done} of {progress.total}"
        progress.write_line(f"{count}, {row.report.verdict}: {row.title}")


def prove(job: Job) -> tuple[Report, str] | None:
    """The report of a case, and the split of its inputs over devices, if they are sharded.

    None for several devices if the case does not use `attend`, or its sizes allow no split.
    """
    from ..parity.cases.sharded import sharded_report

    case = job.case
    is_own_case = case.home.is_own(case.flax_class)
    if job.devices and is_own_case and not _attends(case):
        return None
    with strict() if is_own_case else nullcontext():
        if not job.devices:
            return case.report(job.live, eager=job.eager), "-"
        sharded = sharded_report(case, job.live, job.devices)
    return None if sharded is None else (sharded[0], str(sharded[1]))


def _page_facts(
    first: Sequence[Job], names: dict[str, str], settings: Mapping[str, str], workers: Workers
) -> dict[str, PageFacts]:
    """By variant, the facts of its page row that reports do not contain.

    Args:
      first: the first case of each reference, if torch runs.
      names: of the layers, by variant.
      settings: environment variables of the processes that have several devices.
      workers: the other processes.
    """
    backends: dict[str, list[str]] = {}
    for job, passed in zip(first, workers.map(_backends_of, first), strict=True):
        passed = ["none"] if isinstance(passed, Failure) else passed
        before = backends.get(job.listed.variant, passed)
        backends[job.listed.variant] = [name for name in before if name in passed]
    splits: dict[str, str] = {}
    with Workers(2, {**settings, **fake_devices(PAGE_DEVICES)}) as many:
        many.folders = workers.folders
        work = [job._replace(devices=PAGE_DEVICES) for job in first]
        for job, result in zip(first, many.map(prove, work), strict=True):
            if isinstance(result, Failure) or (result is not None and not result[0].ok):
                splits[job.listed.variant] = "none"
            elif result is not None:
                splits.setdefault(job.listed.variant, result[1])
    return {
        variant: PageFacts(name, ", ".join(backends.get(variant, ["-"])), splits.get(variant, "-"))
        for variant, name in names.items()
    }


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


def _machine(_: None = None) -> Machine:
    import jax

    device = jax.devices()[0]
    return Machine(device.platform, device.device_kind, len(jax.devices()))


def _bundled_proofs(variants: set[str]) -> list[Proof]:
    return import_module(f"{OWN}.real").kept(variants)


def _backends_of(job: Job) -> list[str]:
    """The backends on which a case is equal; "own" for a layer that does not use `attend`."""
    from ..attend import use_backend
    from ..backends import BACKENDS

    case = job.case
    if not _attends(case):
        return ["own"]
    passed = []
    for backend in BACKENDS:
        try:
            with use_backend(backend):
                if case.report(live=True, eager=False).ok:
                    passed.append(backend)
        except ParityError as error:
            if not isinstance(error.__cause__, NotImplementedError):
                raise  # else it is not served, e.g. other hardware
    return passed


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


def real(results: Results, progress: Progress) -> None:
    """Runs the comparisons on trained weights, which are downloaded."""
    write_mode(True, _machine(), progress)
    package = import_module(f"{OWN}.real")
    names = [f"comparison {n} of {package.TOTAL}" for n in range(1, package.TOTAL + 1)]
    rows = results.begin(("real", "trained weights", name) for name in names)
    progress.begin(len(rows))
    for row, proof in zip(rows, package.rows(progress.at), strict=True):
        row.variant, row.reference, row.report = proof
        progress.advance()


def families(names: Sequence[str], results: Results, progress: Progress) -> None:
    """Compares the attention of published models with transformers, reporting each at once.

    Args:
      names: model types; none for all that are not aliases.
      results: gets a row for each of them.
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
    runner = import_module(f"{OWN}.families")
    chosen = runner.chosen(names)  # before the first line, which says what is proven
    write_mode(True, _machine(), progress)
    rows = results.begin((x.model_type, "transformers", x.model_type) for x in chosen)
    progress.begin(len(rows))
    for row, proof in zip(rows, runner.rows(chosen, progress.at), strict=True):
        progress.advance()
        row.variant, row.reference, row.report = proof.family, proof.reference, proof.report
        results.about[proof.family] = PageFacts(proof.layer)
        verdict = "equal" if proof.report.ok else "DIFFERENT"
        error = proof.report.worst("float64", "output")
        count = f"{progress.done} of {progress.total}"
        progress.write_line(f"{count}: {proof.family}, {proof.layer}: {verdict}, {error:.1e}")
