"""`flax-attn parity`: proves cases, prints the certificate and the differences, writes files."""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .._internal.progress import Progress
from ..parity.cases import certificate, markdown
from ..parity.cases.home import has_torch
from ..parity.cases.prove import not_proven
from ..parity.report import DIFFERENT, NOTHING, UNSURE, Report, plain, plural
from ..parity.versions import versions
from . import proving
from .options import check_file
from .results import Results
from .wrap import wrapped

WIDE = 192  # columns if the output is not a terminal
STARTED = time.monotonic()
MAX_MISSING = 8  # number of variants that are named after an interrupt
INTERRUPTED = "interrupted before it was proven"


def parity(options: argparse.Namespace, console: Console) -> int:
    """Runs the command.

    Returns:
      0 if everything is equal, 1 if something differs or nothing is proven, 130 after Ctrl-C.

    Raises:
      ValueError: for options that exclude each other, or a name or file that cannot be taken.
      KeyboardInterrupt: if nothing was proven before Ctrl-C.
    """
    _check_options(options)
    for option in ("json", "html", "markdown"):
        if vars(options)[option] is not None:
            check_file(f"--{option}", vars(options)[option])
    results = Results()
    try:
        with Progress("flax-attn parity", console) as progress:
            if options.real:
                proving.real(results, progress)
            elif options.families:
                proving.families(options.names, results, progress)
            else:
                proving.proven(options, results, progress)
    except KeyboardInterrupt:
        results.interrupted = True
        if not results.proofs:
            raise
    lines = certificate.lines(results.proofs)
    splits = {(row.variant, row.reference): row.devices for row in reversed(results.rows)}
    for line in lines:
        line.devices = splits[line.variant, line.proven_equal_to]
    if options.families:
        from . import family_table  # imports jax

        table = family_table.table(lines, results.about, options.strict)
    else:
        is_terminal = console.is_terminal or "COLUMNS" in os.environ
        table = certificate.table(lines, console.width if is_terminal else WIDE, options.strict)
    # The table is laid out for the width; a console that is wide enough does not wrap it.
    Console(width=max(console.width, WIDE), soft_wrap=True).print(table)
    reports = [report for line in lines for report in line.reports]
    failed = [report for report in reports if not (report.certain if options.strict else report.ok)]
    for report in failed:
        console.out(wrapped(f"\n{_report_text(report)}", console.width), highlight=False)
    nouns = ("family", "families") if options.families else ("variant", "variants")
    foot = footer(results, lines, options.strict, nouns) + _write_files(options, results)
    console.out(wrapped("\n".join(foot), console.width), highlight=False)
    if results.interrupted:
        return 130
    return 0 if reports and not failed else 1


def footer(
    results: Results,
    lines: Sequence[certificate.Line],
    strict: bool = False,
    nouns: tuple[str, str] = ("variant", "variants"),
) -> list[str]:
    """The run in numbers, between what was not tried and what Ctrl-C prevented.

    Args:
      results: of the command.
      lines: the certificate's lines of them.
      strict: whether equality within rounding noise only counts as different.
      nouns: for a variant, singular and plural.
    """
    foot = []
    if results.untried:
        cases, variants = results.untried
        counts = f"{plural(cases, 'more case')} of {plural(variants, 'variant')}"
        foot.append(f"Not tried: {counts}, float32 and bfloat16; --all proves them.")
    absent = dict.fromkeys(line.proven_equal_to for line in lines if line.replayed)
    if absent:
        foot.append(
            f"recorded: {', '.join(absent)} cannot be imported here, its results are those kept"
        )
    verdicts = [report.verdict for line in lines for report in line.reports]
    different = verdicts.count(DIFFERENT) + verdicts.count(UNSURE) * strict
    result = f"{different} different"
    if verdicts.count(NOTHING) == len(verdicts):
        result = NOTHING
    elif NOTHING in verdicts:
        result += f", {verdicts.count(NOTHING)} not proven"
    variants = len({line.variant for line in lines})
    facts = results.proofs[0][2].versions if results.proofs else versions()
    foot.append(
        f"{variants:,} {nouns[variants != 1]}, {plural(len(verdicts), 'case')}, {result}; "
        f"torch {facts.get('torch', 'missing')}, jax {facts.get('jax')}, "
        f"{time.monotonic() - STARTED:.0f} s"
    )
    if results.interrupted:
        missing = Counter(row.variant for row in results.missing)
        names = [f"{name} ({plural(n, 'case')})" for name, n in missing.items()]
        more = [f"{len(names) - MAX_MISSING} more variants"] if len(names) > MAX_MISSING else []
        rest = ", ".join([*names[:MAX_MISSING], *more]) or "what follows the cases"
        foot.append(
            f"interrupted: {len(results.proofs):,} of {plural(len(results.rows), 'case')} were "
            f"proven; missing: {rest}"
        )
    return foot


def _report_text(report: Report) -> str:
    """The report; a single line if nothing could be compared."""
    if report.rows or not report.notes:
        return str(report)
    notes = " ".join(report.notes)
    return notes if notes.startswith(f"{report.title} ") else f"{report.title}: {notes}"


def _write_files(options: argparse.Namespace, results: Results) -> list[str]:
    """Writes the requested files; returns what is to be said of that.

    After Ctrl-C, JSON and HTML hold the missing cases as not proven, and on a page of Markdown only
    rows of variants change of which no case is missing.
    """
    from ..parity.show import pages

    rows = [
        (x.variant, x.reference, x.report or not_proven(x.title, INTERRUPTED)) for x in results.rows
    ]
    if options.json:
        entries = [{"variant": v, "proven_equal_to": of, **x.to_dict()} for v, of, x in rows]
        Path(options.json).write_text(json.dumps(plain(entries), indent=1) + "\n")
    if options.html:
        Path(options.html).write_text(pages([report for *_, report in rows]), "utf-8")
    if not options.markdown:
        return []
    path, part = Path(options.markdown), {row.variant for row in results.missing}
    whole = [proof for proof in results.proofs if proof[0] not in part]
    if not whole:
        return [f"{path} is as before: no row of it was proven whole"]
    table = markdown.markdown(certificate.lines(whole), results.about)
    if not results.interrupted:
        written = markdown.write(path, table, whole=not options.names)
        return [f"wrote {' and '.join(map(str, written))}"]
    written = markdown.write_part(path, table)
    if not written:
        return [f"{path} is as before: it holds other text than a certificate"]
    also = ": the rows that were proven whole; others are as before"
    return [f"wrote {' and '.join(map(str, written))}{also}"]


def _check_options(options: argparse.Namespace) -> None:
    """Refuses options that exclude each other, or need what is not installed."""
    chosen = {
        name for name, x in vars(options).items() if x is not None and x is not False and x != []
    }
    page = Path(options.markdown) if options.markdown else None
    if options.real and chosen & {"names", "record", "replay"}:
        raise ValueError(
            "--real proves all trained weights; it takes no names, --record or --replay."
        )
    if options.real and page and markdown.has_marks(page):
        raise ValueError(
            "--real proves trained weights alone: give --markdown a page without marks."
        )
    if options.families and chosen & {"all", "record", "replay", "real", "seed", "markdown"}:
        raise ValueError(
            "--families proves published models alone; it takes names of model types, and no "
            "--all, --record, --replay, --real, --seed or --markdown."
        )
    if options.devices is not None and options.devices < 2:
        raise ValueError(f"--devices takes two or more; got {options.devices}.")
    if options.workers is not None and options.workers < 1:
        raise ValueError(f"--workers takes one or more; got {options.workers}.")
    others = [x for x in ("real", "families", "record", "markdown") if x in chosen]
    if options.devices is not None and others:
        raise ValueError(
            f"--devices proves sharded inputs alone; it takes no --{' or --'.join(others)}. The "
            "page of --all --markdown has a column for it."
        )
    if options.all and chosen & {"names", "real"}:
        raise ValueError(
            "--all proves every case of this library; names and --real are proven whole without it."
        )
    if options.record and options.replay:
        raise ValueError("--record needs torch's results, --replay does without: choose one.")
    if options.seed is not None and chosen & {"record", "replay", "real"}:
        raise ValueError("--seed draws other numbers than were recorded: torch alone can tell.")
    if chosen & {"record", "real"} and not has_torch():
        raise ValueError("--record and --real need torch: pip install 'flax-attn[torch]'.")
