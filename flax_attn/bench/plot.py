"""Plots of time and memory against the length, both axes logarithmic."""

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .result import Results, Row

MARKERS = "osD^vPX*<>"


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
        (path, "time, ms", _time),
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


def _panel(row: Row) -> str:
    return ", ".join(filter(None, (row.cells.get("pass", ""), row.table)))


def _length(row: Row) -> int:
    return int(next(iter(row.cells.values())))


def _figure(rows: Sequence[Row], label: str, of: Callable, results: Results) -> Any:
    """A panel for each table and pass, with a line a competitor; bars if there is one length."""
    figure_module, ticker = import_module("matplotlib.figure"), import_module("matplotlib.ticker")
    panels = list(dict.fromkeys(map(_panel, rows)))
    names = list(dict.fromkeys(row.competitor for row in rows))
    columns = min(2, len(panels))
    down = -(-len(panels) // columns)
    size = (max(5.6, 4.8 * columns + 0.4), 3.7 * down + 1.1)
    figure = figure_module.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, columns, squeeze=False).ravel()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    ticks = sorted({_length(row) for row in rows})
    lines: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=False):
        mine = [row for row in rows if _panel(row) == panel]
        axis.set_title(panel, fontsize=9, wrap=True)
        if len(ticks) == 1:
            _bars(axis, mine, label, of)
            continue
        for i, name in enumerate(names):
            points = sorted((_length(row), of(row)) for row in mine if row.competitor == name)
            style = {"marker": MARKERS[i % len(MARKERS)], "linewidth": 2.2 if i == 0 else 1.3}
            if points:
                lines[name] = axis.plot(*zip(*points, strict=True), color=f"C{i}", **style)[0]
        axis.set(xscale="log", yscale="log", xlabel="T", ylabel=label)
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda y, _: f"{y:g}"))
        axis.set_xticks(ticks, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in ticks])
        axis.minorticks_off()
        axis.grid(True, alpha=0.35)
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    device = results.machine["device"] if results.machine["platform"] != "cpu" else "CPU"
    figure.suptitle(f"{results.title} ({device})", fontsize=10, wrap=True)
    return figure


def _bars(axis: Any, rows: Sequence[Row], label: str, of: Callable) -> None:
    """Draws bars, the shortest on top."""
    order = sorted(rows, key=of, reverse=True)
    colours = ["C3" if row.family == "flax_attn" else "#9aa5b1" for row in order]
    bars = axis.barh([row.competitor for row in order], [of(row) for row in order], color=colours)
    axis.bar_label(bars, fmt="%.3g", padding=3, fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.margins(x=0.15)
    axis.set_xlabel(label)
