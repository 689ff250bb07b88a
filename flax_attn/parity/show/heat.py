"""Heat maps of `|flax - torch|` as inline SVG."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, floor, isfinite, log10
from typing import NamedTuple

import numpy as np

from .html import Html, el, number

PANELS = 24  # maximum number of panels per tap
LEVELS = 20  # number of colours between "equal" and "NaN or Inf"
FEW, FINE, COARSE = 6, 96, 48  # up to FEW panels have FINE cells per side, more have COARSE
FAINT = 0.02  # share of differing elements that may lie below the colour scale
BAR = 140, 12  # pixels of the legend's bar
AXES = {"scores": ("query", "key"), "weights": ("query", "key")}


class Scale(NamedTuple):
    """Colour scale over decades, from `10**low` to `10**high`."""

    low: int
    high: int

    def levels(self, values: np.ndarray) -> np.ndarray:
        """Index of each value's colour: 0 for equal, the last one for non-finite values."""
        finite = np.isfinite(values)
        logs = np.log10(np.where(finite & (values > 0), values, 1.0))
        share = np.clip((logs - self.low) / (self.high - self.low), 0, 1)
        indices = 1 + np.round(share * (LEVELS - 1))
        return np.where(finite, np.where(values > 0, indices, 0), LEVELS + 1).astype(np.uint8)


def scale_of(values: np.ndarray) -> Scale:
    """Whole decades that cover all finite differences but the faintest; at least one decade."""
    finite = values[np.isfinite(values) & (values > 0)]
    if not finite.size:
        return Scale(-1, 0)
    faint = float(np.quantile(finite, FAINT, method="lower"))
    low, high = floor(log10(faint)), ceil(log10(float(finite.max())))
    return Scale(low, max(high, low + 1))


def drawn(levels: np.ndarray, x: float, y: float, width: float, height: float) -> Html:
    """A matrix of levels at a place: a path for each level, with a line for each run in a row.

    >>> drawn(np.array([[0, 2, 2], [2, 0, 0]]), 0, 0, 30, 20)[57:-4]
    '<path d="M1 0h2M0 1h1" opacity="0.12"></path>'
    """
    runs: dict[int, list[str]] = {}
    for i, row in enumerate(levels.astype(int)):
        for start, end in pairwise(np.flatnonzero(np.diff(row, prepend=-1, append=-1))):
            runs.setdefault(int(row[start]), []).append(f"M{start} {i}h{end - start}")
    runs.pop(0, None)
    paths = []
    for level, lines in sorted(runs.items()):
        share = (level - 1) / (LEVELS - 1)
        shade = {"class_": "odd"} if share > 1 else {"opacity": f"{0.1 + 0.9 * share**1.3:.2f}"}
        paths.append(el("path", d="".join(lines), **shade))
    rows, columns = levels.shape
    across, down = width / columns, height / rows
    at = f"translate({x:.6g} {y + down / 2:.6g}) scale({across:.6g} {down:.6g})"
    return el("g", *paths, class_="cells", transform=at)  # a line lies around its middle


def pooled(values: np.ndarray, most: int) -> np.ndarray:
    """Downsamples a matrix to at most `most` cells per side by maximum.

    >>> pooled(np.array([[1.0, 5.0, 2.0, 0.0]]), 2)
    array([[5., 2.]])
    """
    for axis in (0, 1):
        count = values.shape[axis]
        if count > most:
            starts = np.arange(0, count, -(-count // most))
            values = np.maximum.reduceat(values, starts, axis=axis)
    return values


def heat_map(tap: str, difference: np.ndarray) -> Html:
    """All panels of one tap: a matrix of the last two axes for each leading index."""
    values = np.abs(np.asarray(difference).astype(np.float64))
    if not values.size:
        return el("p", f"Nothing to draw: its shape is {list(values.shape)}.", class_="quiet")
    values = np.where(np.isnan(values), np.inf, values)
    stack = values.reshape(-1, *(1, 1, *values.shape)[-2:])
    worst = np.sort(np.argsort(-stack.max(axis=(1, 2)), kind="stable")[:PANELS])
    drawing = Drawing(tap, values.ndim, scale_of(values), len(worst) > FEW)
    peak = int(values.argmax()) // stack[0].size if values.any() else -1
    panels = [
        drawing.panel(
            stack[i], [int(k) for k in np.unravel_index(i, values.shape[:-2])], bool(i == peak)
        )
        for i in worst
    ]
    some = len(worst) < len(stack)
    left = f"The {len(worst)} worst of {len(stack)} panels. " if some else ""
    return el(
        "figure",
        el("div", *panels, class_="panels"),
        _legend(drawing.scale, bool(np.isinf(values).any())),
        el("figcaption", left, _caption(values), class_="quiet"),
        class_="heat",
    )


def _caption(values: np.ndarray) -> str:
    odd, equal = int(np.isinf(values).sum()), int((values == 0).sum())
    parts = [f"shape {list(values.shape)}", f"{equal / values.size:.0%} of the elements bit-equal"]
    finite = values[np.isfinite(values)]
    parts += [f"largest difference {number(float(finite.max()))}"] if finite.size else []
    parts += [f"{odd} not finite"] if odd else []
    return ", ".join(parts) + "."


class Drawing(NamedTuple):
    """Shared settings of one tap's panels: name, rank, colour scale, and whether to draw small."""

    tap: str
    rank: int
    scale: Scale
    small: bool

    def axes(self) -> tuple[str, str]:
        """Labels of rows and columns; "" for axes that the array does not have."""
        names = [f"axis {self.rank - 2}", f"axis {self.rank - 1}"]
        known = AXES.get(self.tap.rpartition(".")[2].partition("#")[0])
        if known:
            names = [f"{axis}, {name}" for axis, name in zip(names, known, strict=True)]
        return names[0] if self.rank > 1 else "", names[1] if self.rank else ""

    def side(self, cells: int) -> int:
        """Length in pixels of an axis of so many cells, a whole number per cell if possible."""
        least, most, each = (44, 132, 14) if self.small else (66, 280, 22)
        return max(cells * min(each, most // cells), least) if cells > 1 else each

    def panel(self, values: np.ndarray, lead: list[int], boxed: bool) -> Html:
        """One matrix with its axes; `boxed` draws a box around its largest element."""
        rows, columns = values.shape
        levels = self.scale.levels(pooled(values, COARSE if self.small else FINE))
        height, width = map(self.side, levels.shape)
        left, top = 34, 18 if lead else 4
        y, x = (int(i) for i in np.unravel_index(int(values.argmax()), values.shape))
        index = [*lead, y, x][max(0, 2 - self.rank) :]
        whole = f"[{', '.join(map(str, [*lead, ':', ':']))}]"
        names, cell = self.axes(), (width / columns, height / rows)
        return el(
            "svg",
            el("title", f"largest {_size(float(values.max()))} at {index}"),
            el("text", whole, x=left, y=12, class_="lead") if lead else None,
            el("rect", x=left, y=top, width=width, height=height, class_="frame"),
            drawn(levels, left, top, width, height),
            _box(left + (x + 0.5) * cell[0], top + (y + 0.5) * cell[1], cell) if boxed else None,
            *_ticks(columns, width, lambda x: {"x": left + x, "y": top + height + 13}, "middle"),
            *_ticks(rows, height, lambda y: {"x": left - 5, "y": top + y + 4}, "end"),
            el("text", names[1], x=left + width / 2, y=top + height + 27, class_="axis"),
            _rotated_label(names[0], top + height / 2),
            role="img",
            width=left + width + 16,
            height=top + height + 32,
        )


def _size(value: float) -> str:
    return number(value) if isfinite(value) else "NaN or Inf"


def _box(x: float, y: float, cell: tuple[float, float]) -> Html:
    half = max(4.0, *(side / 2 for side in cell))
    place = {"x": x - half, "y": y - half, "width": 2 * half, "height": 2 * half}
    return el("rect", **{name: f"{at:.1f}" for name, at in place.items()}, class_="worst")


def _rotated_label(name: str, y: float) -> Html | None:
    if not name:
        return None
    return el("text", name, transform=f"translate(9 {y:.1f}) rotate(-90)", class_="axis")


def _ticks(count: int, length: float, place, anchor: str) -> list[Html]:
    """Index labels along an axis, spaced to be readable."""
    most = max(2, int(length // 26))
    step = next(s for s in _steps() if (count - 1) / s <= most - 1)
    return [
        el("text", i, **place((i + 0.5) * length / count), text_anchor=anchor)
        for i in range(0, count, step)
    ]


def _steps():
    decade = 1
    while True:
        yield from (decade, 2 * decade, 5 * decade)
        decade *= 10


def _legend(scale: Scale, odd: bool) -> Html:
    """Legend: equal, the decades, and non-finite values."""
    ramp = np.logspace(scale.low, scale.high, LEVELS)[None]
    width, height = BAR
    bar = drawn(scale.levels(ramp), 0, 0, width, height)
    bar = el("svg", bar, width=width, height=height, class_="bar")
    parts: Sequence[Html | None] = [
        el("span", el("span", class_="cell"), "equal"),
        el("span", f"1e{scale.low:+03d}", bar, f"1e{scale.high:+03d}", " |flax - torch|"),
        el("span", el("span", class_="cell odd"), "NaN or Inf") if odd else None,
        el("span", el("span", class_="cell box"), "the largest"),
    ]
    return el("p", *parts, class_="legend")
