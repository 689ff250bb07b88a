"""Reports as text, and as self-contained HTML pages.

The pages contain no scripts and no external addresses; their policy makes browsers block both.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..cases import certificate
from ..report import DIFFERENT, NOTHING, UNSURE, Divergence, Report, plural
from . import chart as page_chart
from .heat import heat_map
from .html import Html, code, el, join, number, table_of
from .table import summary, tables, where
from .text import effects, unproven
from .text import lines_of as lines_of
from .text import see_again as see_again
from .words import in_words, numbered

MAPS = 12  # maximum number of heat maps for a single report
MANY_MAPS = 3  # maximum number of heat maps per report among many
PLACES = 24  # maximum number of places listed per report
MAX_SHOWN_REPORTS = 24  # above this number, only reports that differ are shown in full
MAX_CHARACTERS = 2_500_000  # maximum size of all reports shown in full on one page
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(report: Report) -> str:
    """One report as HTML: verdict, differences, error by depth, heat maps, every comparison.

    >>> "nothing is proven" in page(Report("a layer", ()))
    True
    """
    pair, details = in_words(report.title, report.flax_class)
    return _document(
        pair,
        el("h1", "Parity of ", pair),
        el("p", details, class_="wrap") if details else None,
        _case_name(report.title) if details else None,
        _verdict(report),
        *_body(report, "h2", MAPS),
        el("h2", "Made by"),
        _versions(report.versions),
    )


def pages(reports: Iterable[Report]) -> str:
    """Many reports as one page: a table of variants, then a section for each, failing ones first.

    Reports that differ are shown in full while there is room, the others by the worst of each kind.
    """
    titled = [(*_variant(report.title), report) for report in reports]
    lines = sorted(certificate.lines(titled), key=lambda line: line.ok)
    whole = _whole([report for line in lines for report in line.reports])
    short = len(whole) < len(titled)
    return _document(
        "Parity",
        el("h1", "Parity of Flax with PyTorch"),
        _verdict_of_many([report for *_, report in titled]),
        _contents(lines) if lines else None,
        el("p", "One case alone is shown with every comparison.", class_="quiet")
        if short
        else None,
        *(_section(line, f"v{i}", whole) for i, line in enumerate(lines)),
        el("h2", "Made by"),
        *(_versions(dict(v)) for v in dict.fromkeys(tuple(r.versions.items()) for *_, r in titled)),
    )


def _document(title: str, *body: Html | None) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", http_equiv="Content-Security-Policy", content=POLICY),
        el("link", rel="icon", href="data:,"),
        el("title", f"{title} - flax-attn parity"),
        el("style", Html(Path(__file__).with_name("page.css").read_text("utf-8"))),
    )
    whole = el("html", head, el("body", page_chart.symbols(), *body), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _verdict(report: Report) -> Html:
    """The verdict in one sentence."""
    first = report.first
    if report.verdict == NOTHING:
        return _answer(False, f"{_sentence(unproven(report))}.")
    if report.ok or first is None:
        return join([_answer(True, _equal(report)), el("p", report.summary(), class_="quiet")])
    many = len(report.divergences)
    before, after = ("", "") if first.kind == "between" else ("at ", f" ({first.kind})")
    place = f"{after}, the first of {many} places" if many > 1 else after
    error = f"{place}: error {number(first.error)} where {number(first.limit)} is allowed"
    hint = f"; it looks like {first.hint}" if first.hint else ""
    return _answer(False, f"Different {before}", code(first.tap), f"{error}{hint}.")


def _equal(report: Report) -> str:
    count = plural(len(report.rows), "comparison")
    inside = plural(len(report.rewritten), "tap")
    also = f"; {inside} computed another way inside" if report.rewritten else ""
    if report.unsure:
        names = ", ".join(report.unsure)
        sentence = f"{names} differ by no more than torch's own rounding changes them"
        return f"Equal as far as this input can tell: {count}; {sentence}{also}."
    return f"Equal: {count}, all results within their limits{also}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _answer(ok: bool, text: str, *more: Html | str) -> Html:
    """A sentence whose first word is the verdict."""
    word, rest = text.split(" ", 1)
    mark = "✓ " if ok else "✕ "
    return el("p", el("b", mark, word), " ", rest, *more, class_="verdict" if ok else "verdict no")


def _body(report: Report, heading: str, maps: int) -> list[Html]:
    """Everything in a report below its verdict."""
    parts = _differs(report, heading)
    parts += _depth(report, heading)
    parts += _maps(report, heading, maps)
    if report.rows:
        parts += [el(heading, "Every comparison"), *tables(report.rows, report.rewritten)]
    if report.local:
        parts += [el(heading, "Each place computed from torch's own values")]
        parts += tables(report.local, ())
    return parts + _facts(report, heading)


def _short(report: Report) -> list[Html]:
    """The findings of a report, without its comparisons."""
    worst = [summary(report.rows, report.rewritten)] if report.rows else []
    return [*_differs(report, "h3"), *worst, *_facts(report, "h3")]


def _differs(report: Report, heading: str) -> list[Html]:
    """The places at fault, their effect on the results, and the command that reproduces it."""
    places = [] if report.ok else [*report.divergences] or [report.first]
    parts = [_place(place) for place in places[:PLACES] if place]
    left = len(places) - PLACES
    parts += [el("li", f"and {plural(left, 'place')} more", class_="quiet")] if left > 0 else []
    elements = [el(heading, "What differs"), el("ol", *parts, class_="places")] if parts else []
    effect = [] if report.ok else effects(report)
    elements += [el(heading, "What it does"), el("pre", "\n".join(effect))] if effect else []
    reproduce_section = (
        [el(heading, "See it again"), el("pre", report.reproduce)] if report.reproduce else []
    )
    return elements + reproduce_section


def _place(place: Divergence) -> Html:
    values = where(place.index, place.got, place.want)
    facts = f"error {number(place.error)}, limit {number(place.limit)} ({place.statement})"
    return el(
        "li",
        el("span", place.tap, class_="tap mono"),
        None if place.kind == "between" else el("span", place.kind, class_="kind"),
        el("p", "Looks like ", place.hint, class_="hint") if place.hint else None,
        el("p", "Note: ", place.note) if place.note else None,
        el("p", place.advice) if place.advice else None,
        el("p", facts, class_="quiet"),
        el("p", "worst ", code(values), class_="quiet") if values else None,
    )


def _depth(report: Report, heading: str) -> list[Html]:
    """The chart of values, and the chart of gradients if one exceeds its limit."""
    parts = []
    charts = [("Error by depth", page_chart.values(report))]
    slopes = page_chart.gradients(report)
    if any(v.differs for d in slopes for v in (d.accumulated, d.made_here) if v is not None):
        charts.append(("Error of gradients", slopes))
    for title, depths in charts:
        if depths:
            parts += [el(heading, title), page_chart.legend(depths), page_chart.chart(depths)]
    return parts


def _maps(report: Report, heading: str, most: int) -> list[Html]:
    if not report.maps:
        return []
    parts = [el(heading, "Where in each tap")]
    for tap, difference in list(report.maps.items())[:most]:
        parts += [el("h3", code(tap)), heat_map(tap, difference)]
    left = list(report.maps)[most:]
    if left:
        parts.append(el("p", "Not drawn here: ", ", ".join(left), ".", class_="quiet wrap"))
    return parts


def _facts(report: Report, heading: str) -> list[Html]:
    """Notes and further facts."""
    facts = [
        ("Computed another way inside, with the same result", report.rewritten),
        ("Constant, not carried", report.constants),
        ("Seen on one side only", report.unpaired),
    ]
    lines = [el("p", f"{what}: ", code(", ".join(names))) for what, names in facts if names]
    lines += [el("p", note, class_="wrap") for note in report.notes]
    if report.params:
        lines.insert(0, el("p", plural(report.params, "weight tensor"), " carried."))
    return [el(heading, "Notes"), *lines] if lines else []


def _versions(versions: dict[str, str]) -> Html:
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return el("p", code(text or "unknown versions"))


def _variant(title: str) -> tuple[str, str]:
    """The variant and the reference in a case's title: `variant[... |reference]`."""
    variant, bracket, rest = title.partition("[")
    reference = rest.removesuffix("]").rpartition("|")[2] if bracket else ""
    return variant.strip(), reference


def _verdict_of_many(reports: Sequence[Report]) -> Html:
    verdicts, cases = [report.verdict for report in reports], plural(len(reports), "case")
    bad, empty, unsure = (verdicts.count(verdict) for verdict in (DIFFERENT, NOTHING, UNSURE))
    if not reports:
        return _answer(False, "Nothing was compared, so nothing is proven.")
    if bad:
        also = f"; {empty:,} prove nothing" if empty else ""
        return _answer(False, f"Different: {bad:,} of {cases}{also}.")
    if empty:
        return _answer(False, f"Nothing is proven by {empty:,} of {cases}; the others are equal.")
    if unsure:
        return _answer(True, f"Equal: {cases}, {unsure:,} as far as the input can tell.")
    return _answer(True, f"Equal: {cases}, all results within their limits.")


def _contents(lines: Sequence[certificate.Line]) -> Html:
    """The table of variants, each with its worst errors and a link to its section."""
    headings, shown = certificate.columns(lines)
    heads, rows = [*headings[:2], "cases", *headings[2:]], []
    for i, (line, row) in enumerate(zip(lines, shown, strict=True)):
        name, reference, *cells = row
        link = join(["✓ " if line.ok else "✕ ", el("a", name, href=f"#v{i}")])
        rows.append(([link, reference, len(line.reports), *cells], not line.ok))
    return table_of(heads, rows, class_="variants")


def _whole(reports: Sequence[Report]) -> dict[int, Html]:
    """The bodies of the reports that are shown in full, by `id(report)`."""
    bodies, left = {}, MAX_CHARACTERS
    for report in sorted(reports, key=lambda report: report.ok):
        if report.ok and len(reports) > MAX_SHOWN_REPORTS:
            break
        body = join(_body(report, "h3", MANY_MAPS))
        left -= len(body)
        if left < 0:
            break
        bodies[id(report)] = body
    return bodies


def _section(line: certificate.Line, name: str, whole: dict[int, Html]) -> Html:
    """The section of one variant and reference: a fold per case, failing ones first."""
    against = [" against ", code(line.proven_equal_to)] if line.proven_equal_to else []
    numbered_reports = sorted(enumerate(line.reports, 1), key=lambda pair: pair[1].ok)
    folds = [_fold(report, number, whole) for number, report in numbered_reports]
    return el("section", el("h2", code(line.variant), *against), *folds, id=name)


def _fold(report: Report, number: int, whole: dict[int, Html]) -> Html:
    """One report among many; open if it differs and is shown in full."""
    body = whole.pop(id(report), None)
    mark = el("span", "✓ " if report.ok else "✕ ", class_=None if report.ok else "off")
    text = numbered(report.title, report.flax_class, number)
    return el(
        "details",
        el("summary", mark, text),
        _case_name(report.title) if text != report.title else None,
        _verdict(report),
        body or join(_short(report)),
        open="open" if body and not report.ok else None,
    )


def _case_name(title: str) -> Html:
    """The name of a case, by which the command line knows it."""
    return el("p", "name: ", code(title), class_="quiet")
