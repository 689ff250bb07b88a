"""Markdown page of results: a preset's tables go between its marks; other text is unchanged."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._internal import markdown as _markdown
from .result import Results
from .table import Table, remarks, split, tables

HEADING = "# Benchmarks\n\nRatios first: a competitor's time over that of flax_attn.\n"


def markdown(results: Results, more: list[Table] | None = None) -> str:
    """Formats the section of one run: machine, ratios, remarks, figures."""
    parts = [f"## {results.title}", machine_of(results), *body(results, more)]
    return "\n\n".join(parts) + "\n"


def body(results: Results, more: list[Table] | None = None) -> list[str]:
    """Formats the parts below the machine: ratios, remarks, figures."""
    ratios, details = split(tables(results))
    parts = [_table(t) for t in [*(more or []), *ratios]]
    bullets = [f"* {_escaped(sentence)}" for sentence in remarks(results)]
    parts += ["\n".join(bullets)] if bullets else []
    if details:
        inner = "\n\n".join(_table(t) for t in details)
        parts.append(f"<details><summary>Every figure</summary>\n\n{inner}\n\n</details>")
    return parts


def machine_of(results: Results) -> str:
    """Describes the machine and the versions in a paragraph."""
    machine = results.machine
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    runs = machine.get("runs", [machine])
    peaks = ", ".join(f"{_peaks(name, runs)} in {name}" for name in machine["peak_flops"])
    began = ", ".join(run["began"] for run in runs if "began" in run)
    when = f" {len(runs)} runs, begun at {began} UTC." if len(runs) > 1 else ""
    cores = f", {machine['cores']} cores" if machine["cores"] else ""
    return (
        f"`{results.command}` on {machine['platform']} ({_name_of_device(machine)}{cores}); Python "
        f"{machine['python']}, {versions}. A matrix product reaches {peaks} TFLOP/s here.{when}"
    )


def _peaks(dtype: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats the range of the measured peaks in TFLOP/s."""
    rates = [run["peak_flops"][dtype] / 1e12 for run in runs]
    return " to ".join(dict.fromkeys(f"{rate:.3g}" for rate in (min(rates), max(rates))))


def _name_of_device(machine: Mapping[str, Any]) -> str:
    """The accelerator's name, or the processor's without trademark signs."""
    if machine["platform"] != "cpu":
        return machine["device"]
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", machine["processor"]).strip()


def _table(table: Table) -> str:
    header, *rows = ([*map(_escaped, cells)] for cells in [table.header, *table.rows])
    return f"**{table.title}**\n\n{_markdown.table(header, rows)}".rstrip("\n")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def marks(results: Results, preset: str) -> tuple[str, str]:
    """Returns the marker lines around the section of this preset and device."""
    dtypes = ", ".join(results.machine["peak_flops"])
    name = f"{preset or 'short'}, {_name_of_device(results.machine)}, {dtypes}"
    return f"<!-- bench: {name} -->", f"<!-- end of bench: {name} -->"


def sections(page: str, preset: str, dtype: str = "float32") -> dict[str, str]:
    """Returns, by device, the text between a preset's marks on a page."""
    marks = rf"<!-- bench: {preset}, ([^>]+), {dtype} -->\n(.*?)<!-- end of bench"
    return dict(re.findall(marks, page, re.DOTALL))


def rows(section: str, title: str) -> list[dict[str, str]]:
    """Rows of all tables whose titles start with `title`, as dicts by column heading."""
    tables = rf"\*\*{re.escape(title)}[^\n]*\*\*\n\n(.*?)\n\n"
    all_rows = []
    for text in re.findall(tables, section, re.DOTALL):
        headings, *lines = _markdown.cells(text)
        all_rows += [dict(zip(headings, line, strict=True)) for line in lines]
    return all_rows


def factors(cell: str) -> list[float]:
    """Parses the ratio of a cell, or the ends of its range.

    >>> factors("1.2x to 1.31x"), factors("-")
    ([1.2, 1.31], [])
    """
    return [float(factor) for factor in re.findall(r"([\d.]+)x", cell)]


def write(path: Path, text: str, around: tuple[str, str]) -> None:
    """Writes a section between its marks, or at the end of the page, which may be new."""
    page = path.read_text("utf-8") if path.exists() else HEADING
    place = _markdown.text_between(*map(re.escape, around))
    if place.search(page) is None:
        page = "{}\n\n{}\n{}\n".format(page.rstrip(), *around)
    path.write_text(_markdown.fill(page, place, text), "utf-8")
