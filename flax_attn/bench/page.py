"""Markdown page of results: a preset's tables go between its marks; other text is unchanged."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._internal import markdown as _markdown
from .result import Results
from .table import Table, legend, remarks, tables

HEADING = "# Benchmarks\n\nRatios: a competitor's time over that of flax_attn.\n"


def markdown(results: Results, more: Sequence[Table] = ()) -> str:
    """Formats the section of one run: machine, tables, remarks."""
    parts = [f"## {results.title}", machine_of(results), *body(results, more)]
    return "\n\n".join(parts) + "\n"


def body(results: Results, more: Sequence[Table] = ()) -> list[str]:
    """Formats the parts below the machine: tables and remarks."""
    shown = [*more, *tables(results)]
    parts = [_section(table) for table in shown]
    parts += [legend(results)] if shown else []
    bullets = [f"* {_escaped(sentence)}" for sentence in remarks(results)]
    return [*parts, "\n".join(bullets)] if bullets else parts


def machine_of(results: Results) -> str:
    """Describes the machine and the versions in a paragraph."""
    machine = results.machine
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    runs = machine.get("runs", [machine])
    peaks = ", ".join(f"{_peaks(name, runs)} in {name}" for name in machine["peak_flops"])
    rate = f" A large matrix product reaches {peaks} here." if peaks else ""
    began = ", ".join(run["began"] for run in runs if "began" in run)
    when = f" {len(runs)} runs, begun at {began} UTC." if len(runs) > 1 else ""
    cores = f", {machine['cores']} cores" if machine["cores"] else ""
    return (
        f"`{results.command}` on {machine['platform']} ({name_of_device(machine)}{cores}); Python "
        f"{machine['python']}, {versions}.{rate}{when}"
    )


def _peaks(dtype: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats the range of the measured peaks."""
    rates = [run["peak_flops"][dtype] for run in runs]
    unit, size = ("TFLOP/s", 1e12) if max(rates) >= 1e12 else ("GFLOP/s", 1e9)
    return (
        " to ".join(dict.fromkeys(f"{x / size:.3g}" for x in (min(rates), max(rates)))) + f" {unit}"
    )


def name_of_device(machine: Mapping[str, Any]) -> str:
    """The accelerator's name, or the processor's without trademark signs."""
    if machine["platform"] != "cpu":
        return machine["device"]
    return re.sub(r"\((R|TM)\)| Processor| CPU", "", machine["processor"]).strip()


def _section(table: Table) -> str:
    header, *rows = ([*map(_escaped, cells)] for cells in [table.columns, *table.rows])
    return f"**{table.title}**\n\n{_markdown.table(header, rows)}".rstrip("\n")


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def marks(results: Results, preset: str) -> tuple[str, str]:
    """Returns the marker lines around the section of this preset and device."""
    dtypes = ", ".join(results.machine["peak_flops"])
    name = f"{preset or 'short'}, {name_of_device(results.machine)}, {dtypes}"
    return f"<!-- bench: {name} -->", f"<!-- end of bench: {name} -->"


def write(path: Path, text: str, around: tuple[str, str]) -> None:
    """Writes a section between its marks, or at the end of the page, which may be new."""
    page = path.read_text("utf-8") if path.exists() else HEADING
    place = _markdown.text_between(*map(re.escape, around))
    if place.search(page) is None:
        page = "{}\n\n{}\n{}\n".format(page.rstrip(), *around)
    path.write_text(_markdown.fill(page, place, text), "utf-8")
