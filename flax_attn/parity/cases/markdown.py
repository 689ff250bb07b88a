"""The certificate in Markdown: one row per layer, on a page between two marks.

<!-- certificate -->
<!-- end of certificate -->
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..._internal import markdown as _markdown
from .certificate import Line
from .collect import Listed

HEADINGS = ("layer", "equal to", "backends", "devices", "params")
HEADINGS += ("float64", "grads", "decoded", "float32", "bfloat16", "verdict")
MARKS = _markdown.text_between("<!-- certificate -->", "<!-- end of certificate -->")


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
    """Whether the page has the marks of the table."""
    return bool(MARKS.search(_text(path)))


def check(path: Path, cases: Sequence[Listed], known: Sequence[Listed]) -> None:
    """Checks, before the work starts, that the result can be written to a page with markers.

    Args:
      path: the page.
      cases: the cases to be run.
      known: all cases of their packages.

    Raises:
      ValueError: if only some cases of a layer would be run.
    """
    if not has_marks(path):
        return
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
    """Writes the table, between the marks if the page has them.

    Args:
      path: the page; if missing or without marks, it will contain only the table.
      table: from `markdown`.
      whole: whether it replaces all rows between the markers; else rows of other layers remain.

    Returns:
      The pages that were written.
    """
    text = _text(path)
    marks = MARKS.search(text)
    if marks is None:
        path.write_text(table, "utf-8")
        return [path]
    table = table if whole else joined(marks["table"], table)
    path.write_text(_markdown.fill(text, MARKS, table), "utf-8")
    return [path]


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
    marks = MARKS.search(text)
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


def _written(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with its rows in alphabetical order."""
    return _markdown.table(headings, sorted(rows, key=lambda row: row[0]))


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""
