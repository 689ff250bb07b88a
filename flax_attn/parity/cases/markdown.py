"""The certificate in Markdown: one row per layer on a page, and a short form on another.

A page holds the table between two markers; the first may name the page of the short form:

    <!-- certificate; short form in README.md -->
    <!-- end of certificate -->

That page holds `<!-- short certificate -->` and `<!-- end of short certificate -->`; the first
marker may name the layers to show, as in `<!-- short certificate of CausalAttention, Mamba -->`.
The short form is generated from the table, so the two cannot disagree.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..._internal import markdown as _markdown
from ..report import badness
from .certificate import Line
from .collect import Listed

HEADINGS = ("layer", "equal to", "backends", "devices", "params")
HEADINGS += ("float64", "grads", "decoded", "float32", "bfloat16", "verdict")
SHORT = ("layer", "equal to", "worst error", "verdict")
FULL_MARKS = _markdown.text_between(
    r"<!-- certificate(?:; short form in (?P<short>\S+))? -->", "<!-- end of certificate -->"
)
SHORT_MARKS = _markdown.text_between(
    r"<!-- short certificate(?: of (?P<layers>[\w, ]+))? -->", "<!-- end of short certificate -->"
)


class PageFacts(NamedTuple):
    """Facts of a row that the reports do not contain.

    Attributes:
      layer: the Flax class.
      backends: the backends that passed.
      devices: the device mesh on which it passed, batch x length.
    """

    layer: str
    backends: str = "-"
    devices: str = "-"


def layers(cases: Iterable[Listed]) -> dict[str, str]:
    """Names of the Flax classes of each variant."""
    names: dict[str, list[str]] = {}
    for case in cases:
        names.setdefault(case.variant, []).append(case.of)
    return {variant: ", ".join(dict.fromkeys(classes)) for variant, classes in names.items()}


def markdown(lines: Iterable[Line], about: Mapping[str, PageFacts]) -> str:
    """The table with all columns: one row per variant; torch's own references come first.

    Args:
      lines: the certificate's, one per variant and reference.
      about: facts by variant; a missing variant is listed under its own name.
    """
    variants: dict[str, list[Line]] = {}
    for line in lines:
        variants.setdefault(line.variant, []).append(line)
    return _written(HEADINGS, (_row(group, about) for group in variants.values()))


def short(table: str, layers: Sequence[str] = ()) -> str:
    """The table with only the columns of the short form; the worst error is in float64.

    Args:
      table: from `markdown`.
      layers: the layers to include, in this order; all if empty.

    >>> row = ["A", "b", "own", "-", "3", "1.0e-16", "2.0e-15", "-", "-", "-", "equal"]
    >>> print(short(_written(HEADINGS, [row])).splitlines()[-1])
    | A | b | 2.0e-15 | equal |
    """
    every, brief = rows(table), []
    for name in layers or every:
        if name not in every:
            continue
        cells = dict(zip(HEADINGS, every[name], strict=True))
        errors = [cells[name] for name in ("float64", "grads", "decoded") if cells[name] != "-"]
        worst = max(errors, key=lambda cell: badness(float(cell)), default="-")
        equal_to = "; ".join(map(_short_name, cells["equal to"].split("; ")))
        brief.append([cells["layer"], equal_to, worst, cells["verdict"]])
    return _markdown.table(SHORT, brief)


def rows(table: str) -> dict[str, list[str]]:
    """The cells of each row, keyed by the first cell.

    >>> rows("| layer | verdict |\\n| --- | --- |\\n| A | equal |\\n")
    {'A': ['A', 'equal']}
    """
    return {row[0]: row for row in _markdown.cells(table)[1:]}


def joined(old: str, new: str) -> str:
    """A table in which new rows replace or join old ones, in alphabetical order.

    Columns that the old table lacks are "-" in its rows.

    >>> print(joined("| v |\\n| --- |\\n| b |", "| v | w |\\n| --- | --- |\\n| a | 1 |"), end="")
    | v | w |
    | --- | --- |
    | a | 1 |
    | b | - |
    """
    before, *old_rows = _markdown.cells(old)
    headings = _markdown.cells(new)[0]
    named = [dict(zip(before, row, strict=False)) for row in old_rows]
    same = {
        row[0]: [cells.get(name, "-") for name in headings]
        for row, cells in zip(old_rows, named, strict=True)
    }
    return _written(headings, (same | rows(new)).values())


def has_marks(path: Path) -> bool:
    """Whether the page has markers for the table or for its short form."""
    text = _text(path)
    return bool(FULL_MARKS.search(text) or SHORT_MARKS.search(text))


def check(path: Path, cases: Sequence[Listed], known: Sequence[Listed]) -> None:
    """Checks, before the work starts, that the result can be written to a page with markers.

    Args:
      path: the page.
      cases: the cases to be run.
      known: all cases of their packages.

    Raises:
      ValueError: if the page holds the short form, or names a page without one; or if only some
        cases of a layer would be run.
    """
    text = _text(path)
    marks = FULL_MARKS.search(text)
    if marks is None and SHORT_MARKS.search(text):
        raise ValueError(
            f"{path} holds only the short form of a certificate: give --markdown the page whose "
            f"first mark says '; short form in {path.name}', and both are written."
        )
    if marks is None:
        return
    other = Path(os.path.normpath(path.parent / (marks["short"] or "")))
    if marks["short"] and not SHORT_MARKS.search(_text(other)):
        raise ValueError(
            f"{path} says that {other} holds its short form, but "
            "page has no '<!-- short certificate -->' and '<!-- end of short certificate -->'."
        )
    wanted = Counter((case.package, case.variant) for case in cases)
    every = Counter((case.package, case.variant) for case in known)
    for place, count in wanted.items():
        if count < every[place]:
            _, variant = place
            raise ValueError(
                f"A row of {path} speaks for all {every[place]} cases of a layer, but only "
                f"{count} of {variant} would be proven: ask for {variant}, not for a part of it."
            )


def write(path: Path, table: str, whole: bool) -> list[Path]:
    """Writes the table and its short form, between their markers if the page has them.

    Args:
      path: the page; if missing or without markers, it will contain only the table.
      table: from `markdown`.
      whole: whether it replaces all rows between the markers; else rows of other layers remain.

    Returns:
      The pages that were written.
    """
    text = _text(path)
    marks = FULL_MARKS.search(text)
    if marks is None:
        path.write_text(table, "utf-8")
        return [path]
    table = table if whole else joined(marks["table"], table)
    path.write_text(_markdown.fill(text, FULL_MARKS, table), "utf-8")
    if not marks["short"]:
        return [path]
    other = Path(os.path.normpath(path.parent / marks["short"]))
    text = _text(other)
    marks = SHORT_MARKS.search(text)
    if marks:
        layers = (marks["layers"] or "").split(", ")
        brief = short(table, [name for name in layers if name])
        other.write_text(_markdown.fill(text, SHORT_MARKS, brief), "utf-8")
    return [path, other]


def write_part(path: Path, table: str) -> list[Path]:
    """Writes rows of an interrupted run: no row of the page is lost, and none names less.

    A row stays as it is if the new one lacks a reference that it names; else it keeps its backends
    and devices where the new one has none. A page without marks must hold a certificate alone.

    Args:
      path: the page; it is made if missing.
      table: from `markdown`.

    Returns:
      The pages that were written; none for a page that holds anything else.
    """
    text = _text(path)
    marks = FULL_MARKS.search(text)
    old = marks["table"] if marks else text
    before, new = rows(old), rows(table)
    if marks is None and text and _markdown.cells(text)[0] != [*HEADINGS]:
        return []
    for name, row in new.items():
        was = before.get(name, [])
        if len(was) != len(row):
            continue
        if {*was[1].split("; ")} <= {*row[1].split("; ")}:
            row[2:4] = [b if a == "-" else a for a, b in zip(row[2:4], was[2:4], strict=True)]
        else:
            new[name] = was
    part = _written(HEADINGS, new.values())
    return write(path, part if marks or not text else joined(old, part), whole=False)


def _row(lines: Sequence[Line], about: Mapping[str, PageFacts]) -> list[str]:
    variant = lines[0].variant
    layer, backends, devices = about.get(variant, PageFacts(variant))
    # torch's own modules before those of other packages, and this library's in torch last.
    references = sorted(
        (line.proven_equal_to for line in lines),
        key=lambda name: (name.startswith("torch_ref."), not name.startswith("torch.")),
    )
    reports = [report for line in lines for report in line.reports]
    _, equal_to, *rest = Line(variant, "; ".join(references), reports, devices).cells()
    return [layer, equal_to, backends, *rest]


def _short_name(reference: str) -> str:
    """Shortens a reference to its package and class; torch's paths are left unchanged.

    >>> _short_name("transformers.models.t5.modeling_t5.T5Attention")
    'transformers.T5Attention'
    >>> _short_name("torch.nn.functional.scaled_dot_product_attention")
    'torch.nn.functional.scaled_dot_product_attention'
    """
    parts = reference.split(".")
    return reference if parts[0] == "torch" or len(parts) < 4 else f"{parts[0]}.{parts[-1]}"


def _written(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with its rows in alphabetical order."""
    return _markdown.table(headings, sorted(rows, key=lambda row: row[0]))


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""
