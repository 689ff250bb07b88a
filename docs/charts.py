"""Draws the charts of docs/benchmarks.md from measured tables: `python docs/charts.py [FOLDER]`.

Time: others beside `attend`, over the length. Memory: the temporary memory of each.
"""

import hashlib
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator

from parity_tests.core.pages.measured import factors, rows, sections

HERE = Path(__file__).parent
COLOURS = {"flax_attn": "#444444", "jax.nn": "#1f77b4", "flax.nnx": "#17becf"}
COLOURS |= {"torch": "#d9480f", "equinox": "#2f9e44"}
STYLES = ("-", "--", ":")
PAGES = {"time": "benchmarks/xeon.md", "memory": "benchmarks/epyc.md"}
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
TABLE = "head width 64, causal, float32"


def times(page: str):
    """One panel a pass: others' time over that of `attend`."""
    figure, axes = plt.subplots(1, 2, figsize=(9.4, 4.2), sharey=True, layout="constrained")
    found = sections(page, "flash")
    for ax, (which, title) in zip(axes, PASSES.items(), strict=True):
        for style, (device, section) in zip(STYLES, found.items(), strict=False):
            table = [row for row in rows(section, TABLE) if row["pass"] == which]
            for name in ("jax.nn", "flax.nnx", "torch"):
                mine = [row for row in table if row["competitor"] == name]
                points = [(int(row["T"]), middle(row["ratio"])) for row in mine]
                label = f"{name}, {device}"
                ax.plot(*zip(*points, strict=True), style, color=COLOURS[name], label=label)
        ax.axhline(1.0, color=COLOURS["flax_attn"], linewidth=2.5)
        ax.text(256, 1.04, "attend", color=COLOURS["flax_attn"], fontsize=9)
        ax.set(title=title, xscale="log", yscale="log", xlabel="tokens")
        dress(ax, [int(row["T"]) for row in table], "x")
    axes[0].set_ylabel("time over that of attend: above 1 is slower")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def memory(page: str):
    """Temporary memory over the length, forward and backward."""
    (section, *_) = sections(page, "memory").values()
    table = rows(section, TABLE)
    figure, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    lengths = [int(row["T"]) for row in table]
    for name in ("flax_attn", "jax.nn", "flax.nnx", "equinox"):
        mine = [row for row in table if row["competitor"] == name]
        points = [(int(r["T"]), float(r["memory"].split()[0].replace(",", ""))) for r in mine]
        style = "s--" if name == "flax.nnx" else "o-"  # on the line of jax.nn
        look = {"linewidth": 2.5, "label": "attend"} if name == "flax_attn" else {"label": name}
        ax.plot(*zip(*points, strict=True), style, color=COLOURS[name], markersize=4, **look)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel="MiB")
    ax.set_title("one head, forward and backward: temporary memory", fontsize=10)
    dress(ax, lengths, " MiB")
    ax.legend(fontsize=8)
    return figure


def middle(cell: str) -> float:
    """Of the ends of a range of several runs."""
    ends = factors(cell)
    return sum(ends) / len(ends)


def dress(ax, lengths: list[int], unit: str) -> None:
    """Lengths below, plain numbers at the side, and a light grid."""
    ticks = sorted({*lengths})
    ax.set_xticks(ticks, [f"{n // 1024}k" if n >= 1024 else str(n) for n in ticks])
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}{unit}"))
    ax.minorticks_off()
    ax.grid(True, alpha=0.3)


def digest(page: str) -> str:
    """Stands in each chart for the tables that it was drawn from."""
    drawn = [*sections(page, "flash").items(), *sections(page, "memory").items()]
    return hashlib.sha256(repr(drawn).encode()).hexdigest()


def draw(folder: Path) -> None:
    """Writes both charts."""
    for name, make in (("time", times), ("memory", memory)):
        page = (HERE / PAGES[name]).read_text("utf-8")
        figure = make(page)
        about = {"Software": None, "Description": digest(page)}
        figure.savefig(folder / f"{name}.png", dpi=110, metadata=about)
        plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
