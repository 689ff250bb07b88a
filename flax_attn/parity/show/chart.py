"""Chart of error by depth: one strip per tap in torch's call order, on a logarithmic axis."""

from collections.abc import Iterable
from math import ceil, floor, isfinite, log10, nan
from typing import NamedTuple

from ..judge import Verdict
from ..report import Report, Row, badness
from .html import Html, el, number

EDGE, END = 9.0, 2.0  # percent: margin on either side of a strip, and position of 0 and inf
# Percent between the centres of two labels, so that they do not overlap on a phone.
MIN_LABEL_DISTANCE = 15.0
SHAPES = {
    "global": ("M0-6A6 6 0 1 1 0 6A6 6 0 1 1 0-6Z", "accumulated error, within the limit"),
    "local": ("M0-4L4 0L0 4L-4 0Z", "local error, within the limit"),
    "global-off": ("M-6.5-6.5H6.5V6.5H-6.5Z", "accumulated error, over the limit"),
    "local-off": (
        "M-4.5-2.5L-2.5-4.5L0-2L2.5-4.5L4.5-2.5L2 0L4.5 2.5L2.5 4.5L0 2L-2.5 4.5L-4.5 2.5L-2 0Z",
        "local error, over the limit",
    ),
}


class Depth(NamedTuple):
    """A place with its two errors: accumulated, and local (computed from torch's own values)."""

    name: str
    accumulated: Verdict | None
    made_here: Verdict | None


class Axis(NamedTuple):
    """Axis of decades, from `10**low` to `10**high`."""

    low: int
    high: int

    def at(self, error: float) -> float:
        """Position of an error in percent: 0 at the left edge, inf and NaN at the right."""
        if not isfinite(error):
            return 100 - END
        if error <= 0:
            return END
        share = (log10(error) - self.low) / (self.high - self.low)
        return EDGE + (100 - 2 * EDGE) * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[int]:
        """Exponents to label, at most six."""
        step = max(1, ceil((self.high - self.low) / 5))
        return list(range(self.low, self.high + 1, step))


def values(report: Report) -> list[Depth]:
    """Taps and outputs in torch's call order, in the first dtype that has taps."""
    rows = [row for row in report.rows if row.kind in ("tap", "output")]
    return _depths(rows, [row for row in report.local if row.kind == "local"])


def gradients(report: Report) -> list[Depth]:
    """Gradients of inputs and parameters and, if something differs, of taps."""
    rows = [row for row in report.rows if row.kind == "gradient"]
    return _depths(rows, [row for row in report.local if row.kind == "local gradient"])


def _depths(rows: list[Row], local: list[Row]) -> list[Depth]:
    dtype = next((row.dtype for row in rows if row.kind != "output"), "")
    dtype = dtype or next((row.dtype for row in rows), "")
    results, local_errors = _worst(row for row in rows if row.dtype == dtype), _worst(local)
    return [
        Depth(n, results.get(n), local_errors.get(n))
        for n in _merged(list(results), list(local_errors))
    ]


def _worst(rows: Iterable[Row]) -> dict[str, Verdict]:
    """The worst verdict for each name, over all modes."""
    worst: dict[str, Verdict] = {}
    for row in rows:
        before = worst.get(row.name)
        if before is None or badness(row.verdict.error) > badness(before.error):
            worst[row.name] = row.verdict
    return worst


def _merged(names: list[str], more: list[str]) -> list[str]:
    """Merges two ordered lists: new names of `more` follow their predecessor in `more`."""
    merged, at = list(names), 0
    for name in more:
        if name in merged:
            at = merged.index(name) + 1
        else:
            merged.insert(at, name)
            at += 1
    return merged


def symbols() -> Html:
    """Definitions of all mark shapes, needed once per page."""
    paths = [el("path", id=f"mark-{name}", d=d) for name, (d, _) in SHAPES.items()]
    return el("svg", el("defs", *paths), width=0, height=0, class_="symbols", aria_hidden="true")


def legend(depths: list[Depth]) -> Html:
    """Legend of the marks that occur in a chart."""
    kinds = {_name(kind, verdict) for depth in depths for kind, verdict in _marks(depth).items()}
    keys = [el("span", _key(name), SHAPES[name][1]) for name in SHAPES if name in kinds]
    return el("p", *keys, class_="legend")


def chart(depths: list[Depth]) -> Html:
    """The strips on one axis; places over their limit have another colour and shape."""
    verdicts = [v for d in depths for v in (d.accumulated, d.made_here) if v is not None]
    limit = next((v.limit for v in verdicts if v.limit > 0), nan)
    axis = _axis([v.error for v in verdicts], limit)
    return el(
        "div",
        _scale(axis, limit, any(depth.made_here is not None for depth in depths)),
        *(_strip(depth, axis, limit) for depth in depths),
        class_="depth",
        role="group",
        aria_label="norm-relative error by depth",
    )


def _axis(errors: Iterable[float], limit: float) -> Axis:
    """The axis of whole decades that covers every error and the limit."""
    exponents = [log10(x) for x in [*errors, limit] if isfinite(x) and x > 0]
    return Axis(floor(min(exponents, default=-17)), ceil(max([*exponents, -9])))


def _scale(axis: Axis, limit: float, local: bool) -> Html:
    """The header: decade labels, the limit, and the meaning of the numbers on the right."""
    limit_position = axis.at(limit) if isfinite(limit) else nan
    ticks = [(axis.at(10.0**i), f"1e{i}", None) for i in axis.ticks()]
    ticks = [tick for tick in ticks if not abs(tick[0] - limit_position) < MIN_LABEL_DISTANCE]
    ticks += [(END, "0", None), (100 - END, "inf", None)]
    ticks += (
        [(limit_position, f"limit {number(limit)}", "limit")] if isfinite(limit_position) else []
    )
    texts = [el("text", text, x=f"{x:.1f}%", y=13, class_=kind) for x, text, kind in ticks]
    return el(
        "div",
        el("span", "error over norm", class_="quiet"),
        el("svg", *texts, class_="strip", aria_hidden="true"),
        el("span", "local" if local else "accumulated", class_="value"),
        class_="row scale",
    )


def _strip(depth: Depth, axis: Axis, limit: float) -> Html:
    marks = _marks(depth)
    labels = [f"{SHAPES[kind][1].partition(',')[0]} {number(v.error)}" for kind, v in marks.items()]
    lines = [_mark_line(axis.at(10.0**i), None) for i in axis.ticks()]
    lines += [_mark_line(axis.at(limit), "limit")] if isfinite(limit) else []
    shown = depth.made_here or depth.accumulated
    bad = depth.made_here is not None and depth.made_here.differs
    return el(
        "div",
        el("span", depth.name, class_="label", title=depth.name),
        el(
            "svg",
            el("title", f"{depth.name}: {', '.join(labels)}"),
            *lines,
            *(_mark(kind, v, axis) for kind, v in marks.items()),
            class_="strip",
            role="img",
        ),
        el("span", number(shown.error) if shown else "", class_="value"),
        class_="row bad" if bad else "row",
    )


def _mark_line(x: float, kind: str | None) -> Html:
    return el("line", x1=f"{x:.1f}%", x2=f"{x:.1f}%", y1=0, y2="100%", class_=kind)


def _marks(depth: Depth) -> dict[str, Verdict]:
    both = {"global": depth.accumulated, "local": depth.made_here}
    return {kind: verdict for kind, verdict in both.items() if verdict is not None}


def _name(kind: str, verdict: Verdict) -> str:
    return f"{kind}-off" if verdict.differs else kind


def _mark(kind: str, verdict: Verdict, axis: Axis) -> Html:
    name = _name(kind, verdict)
    at = f"{axis.at(verdict.error):.1f}%"
    return el("use", href=f"#mark-{name}", x=at, y=11, class_=name)


def _key(name: str) -> Html:
    mark = el("use", href=f"#mark-{name}", x=8, y=8, class_=name)
    return el("svg", mark, width=16, height=16, class_="key", aria_hidden="true")
