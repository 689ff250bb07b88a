"""The files that `flax-attn parity` writes: JSON, a page of HTML, and the certificate."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .options import check_file
from .wrap import wrapped

if TYPE_CHECKING:
    from rich.console import Console

    from .proving import Proof, Results

INTERRUPTED = "interrupted before it was proven"


def check_outputs(options: argparse.Namespace) -> None:
    """Checks in advance that output files can be written.

    Raises:
      ValueError: if one cannot.
    """
    for option in ("json", "html", "markdown"):
        name = getattr(options, option)
        if name is not None:
            check_file(f"--{option}", name)


def write(options: argparse.Namespace, outcome: "Results", console: "Console") -> None:
    """Writes the requested files.

    After Ctrl-C, JSON and HTML hold the missing cases as not proven, and on a page of Markdown only
    rows of variants change of which no case is missing.
    """
    from ..parity.cases.prove import not_proven
    from ..parity.cases.workers import Failure
    from ..parity.report import plain
    from ..parity.show import pages

    proofs = [*outcome.proofs]
    for variant, reference, title in outcome.missing:
        proofs.append((variant, reference, not_proven(title, Failure(INTERRUPTED))))
    if options.json:
        text = json.dumps(plain([_as_dict(proof) for proof in proofs]), indent=1)
        Path(options.json).write_text(text + "\n")
    if options.html:
        Path(options.html).write_text(pages([report for _, _, report in proofs]), "utf-8")
    if options.markdown:
        text = _write_markdown(options, outcome)
        console.out(wrapped(text, console.width), highlight=False)


def _write_markdown(options: argparse.Namespace, outcome: "Results") -> str:
    """Writes the certificate; returns a sentence about what was written."""
    from ..parity.cases import certificate, markdown

    path, proofs = Path(options.markdown), outcome.whole
    if not proofs:
        return f"{path} is as before: no row of it was proven whole"
    table = markdown.markdown(certificate.lines(proofs), outcome.about)
    if outcome.interrupted:
        written = markdown.write_part(path, table)
    else:
        written = markdown.write(path, table, whole=not options.names)
    if not written:
        return f"{path} is as before: it holds other text than a certificate"
    also = ": the rows that were proven whole; others are as before" * outcome.interrupted
    return f"wrote {' and '.join(map(str, written))}{also}"


def _as_dict(proof: "Proof") -> dict[str, object]:
    variant, reference, report = proof
    return {"variant": variant, "proven_equal_to": reference, **report.to_dict()}
