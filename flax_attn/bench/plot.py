"""Plots of time and memory against the length, both axes logarithmic."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .result import Results, Row
from .task import BOTH

MARKERS = "osD^vPX*<>"
COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#17becf", "#7f7f7f")


def absent() -> str | None:
    """Returns why plotting is unavailable, or None."""
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        return f"plots need matplotlib ({error}): pip install 'flax-attn[bench]'"
    return None


def plots(results: Results, path: Path) -> list[Path]:
    """Writes the time plot to `path` and the memory plot next to it; returns written paths."""
    paths = []
    memory_path = path.with_name(f"{path.stem}-memory{path.suffix}")
    for name, label, of in (
        (path, "median time, ms", _time),
        (memory_path, "memory, MiB", _memory),
    ):
        rows = [row for row in results.rows if of(row) is not None]
        if rows:
            _figure(rows, label, of, results).savefig(name, dpi=130)
            paths.append(name)
    return paths


def _time(row: Row) -> float | None:
    return row.amount * 1e3 if row.amount and row.seconds else None


def _memory(row: Row) -> float | None:
    return row.figures.get("temporary", 0.0) / 2**20 or None


def _pass(row: Row) -> str:
    return row.cells.get("pass", "")


def _length(row: Row) -> int:
    return int(next(iter(row.cells.values())))


def _figure(rows: Sequence[Row], label: str, of: Callable, results: Results) -> Any:
    figure_module = import_module("matplotlib.figure")
    across = sorted({_pass(row) for row in rows}, key=lambda which: which == BOTH)
    down = list(dict.fromkeys(row.table for row in rows))
    size = (max(5.6, 4.8 * len(across) + 0.4), 3.7 * len(down) + 1.1)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(down), len(across), squeeze=False, sharex="col")
    names = list(dict.fromkeys(row.competitor for row in rows))
    lines: dict[str, Any] = {}
    bars = len({_length(row) for row in rows}) == 1
    for y, name in enumerate(down):
        for x, which in enumerate(across):
            mine = [row for row in rows if (row.table, _pass(row)) == (name, which)]
            draw = _bars if bars else _lines
            lines |= draw(axes[y][x], mine, names, of)
            _label(axes[y][x], ", ".join(filter(None, (which, name))), label, bars)
    if not bars:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    device = results.machine["device"] if results.machine["platform"] != "cpu" else "CPU"
    figure.suptitle(f"{results.title} ({device})", fontsize=10, wrap=True)
    return figure


def _lines(axis: Any, rows: Sequence[Row], names: Sequence[str], of: Callable) -> dict[str, Any]:
    lines = {}
    for i, name in enumerate(names):
        points = sorted((_length(row), of(row)) for row in rows if row.competitor == name)
        if points:
            style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5}
            style |= {"color": COLOURS[i % len(COLOURS)], "linewidth": 2.2 if i == 0 else 1.3}
            lines[name] = axis.plot(*zip(*points, strict=True), **style)[0]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticker = import_module("matplotlib.ticker")
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    ticks = sorted({_length(row) for row in rows})
    axis.set_xticks(ticks, [_short(tick) for tick in ticks])
    axis.minorticks_off()
    return lines


def _bars(axis: Any, rows: Sequence[Row], names: Sequence[str], of: Callable) -> dict[str, Any]:
    """Draws bars, the shortest on top, for results of a single length."""
    order = sorted(rows, key=of, reverse=True)
    colours = [COLOURS[0] if row.family == "flax_attn" else "#9aa5b1" for row in order]
    bars = axis.barh([row.competitor for row in order], [of(row) for row in order], color=colours)
    axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(x=0.15)
    return {}


def _label(axis: Any, title: str, label: str, bars: bool) -> None:
    axis.set_title(title, fontsize=9)
    if bars or axis.get_subplotspec().is_last_row():
        axis.set_xlabel(label if bars else "T")
    if not bars:
        axis.set_ylabel(label)
    axis.grid(True, which="major", axis="x" if bars else "both", alpha=0.35)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
