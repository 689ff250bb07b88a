"""The page of a report: well formed, complete, self-contained, of a bounded size."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from flax_attn._internal.progress import Progress
from flax_attn.command.proving import _prove_each
from flax_attn.command.results import Results
from flax_attn.parity import Divergence, Report, Row, judge
from flax_attn.parity.cases.collect import Listed
from flax_attn.parity.cases.prove import jobs
from flax_attn.parity.cases.workers import Failure
from flax_attn.parity.show import page, pages
from flax_attn.parity.show.chart import Axis
from flax_attn.parity.show.heat import LEVELS, Scale, drawn, pooled, scale_of
from flax_attn.parity.show.words import in_words, numbered
from parity_tests.core.cases import every_case

VOID = {"meta", "link", "!doctype"}
NASTY = "<script>alert('&')</script>"
NAN, INF = float("nan"), float("inf")
TAPS = [f"layers.{i}.{name}" for i in range(3) for name in ("q_proj", "scores", "weights")]
VERSIONS = {"torch": "2.13.0", "jax": "0.10.2"}
COMMAND = "flax-attn parity 'multi_head[d_in=3|x=2x6x3|torch_ref.MultiHeadAttention]'"


class Reader(HTMLParser):
    """Reads a page and fails where tags do not balance."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.texts, self.tags, self.seen = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.stack, f"left open: {self.stack}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "style" not in self.stack:
            self.texts.append(data)

    @property
    def text(self):
        return "".join(self.texts)

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def verdict(error, index=None, got=None, want=None):
    return judge.Verdict("same function", error, judge.SAME_FUNCTION, None, index, got, want)


def rows_of(errors, kind="tap", mode="eager"):
    return tuple(Row(n, kind, "float64", mode, verdict(e)) for n, e in errors.items())


def equal(title="multi_head[d_in=3|x=2x6x3|torch_ref.MultiHeadAttention]"):
    """An all-equal report, in two modes and three dtypes."""
    rows = [Row("q_proj.kernel", "exact", "", "", judge.Verdict("exact", 0.0, 0.0))]
    for mode in ("eager", "jit"):
        rows += rows_of(dict.fromkeys(TAPS, 3e-16), mode=mode)
        rows += rows_of({"output": 5e-16}, "output", mode)
        rows += rows_of({"q_proj.kernel": 0.0}, "gradient", mode)
    narrow = judge.Verdict("same precision", 1.2e-7, 2.5e-7, other_error=1e-7)
    rows += [Row("output", "output", dtype, "jit", narrow) for dtype in ("float32", "bfloat16")]
    return Report(title, tuple(rows), 4, versions=VERSIONS, reproduce=COMMAND)


def different(title="multi_head[d_in=3|x=2x6x3|torch_ref.Other]", shape=(2, 3, 5, 7)):
    """A report with two places at fault, one of them hidden behind the other."""
    errors = {tap: 2e-16 if i < 4 else 0.25 for i, tap in enumerate(TAPS)}
    local = dict.fromkeys(TAPS, 1e-16) | {TAPS[4]: 0.31, TAPS[8]: INF}
    at = (1, 2, 4, 6)
    places = (
        Divergence(
            TAPS[4], 0.31, judge.SAME_FUNCTION, "same function", at, "another scale", "value", 8, 9
        ),
        Divergence(TAPS[8], INF, judge.SAME_FUNCTION, "same function", None, "", "gradient"),
    )
    rows = rows_of(errors) + rows_of({"output": 0.2}, "output")
    rows += rows_of({"q_proj.kernel": NAN}, "gradient")
    draw = np.random.RandomState(0)
    maps = {TAPS[4]: np.abs(draw.standard_normal(shape)), TAPS[8]: np.full((3, 4), INF)}
    return Report(
        title,
        rows,
        4,
        ("mask",),
        ("rotary (torch)",),
        ("dropout stands in other places",),
        VERSIONS,
        COMMAND,
        rows_of(local, "local") + rows_of({TAPS[8]: 0.4}, "local gradient"),
        places,
        maps,
    )


def odd(value):
    """A report whose errors, elements and maps are `value`."""
    at = verdict(value, (0,), value, -value)
    rows = tuple(Row("output", kind, "float64", "jit", at) for kind in ("tap", "output"))
    place = Divergence("output", value, 0.0, "exact", (0,), "", "value", value, value)
    maps = {"scores": np.full((2, 3), value), "vector": np.full(3, value), "n": np.array(value)}
    return Report("odd", rows, local=(Row("output", "local", "float64", "eager", at),),
                  divergences=(place,), maps=maps)  # fmt: skip


EMPTY = Report("nothing", ())
NO_ELEMENTS = Report(
    "no elements",
    rows_of({"output": 0.1}, "output"),
    maps={"a": np.zeros((0, 3)), "b": np.zeros((2, 0, 3)), "c": np.zeros(0)},
)
UNPLACED = Report("unplaced", rows_of({"output": 0.1, "output[1]": 0.0}, "output"))
REWRITTEN = Report("rewritten", rows_of({"scores": 0.1}) + rows_of({"output": 0.0}, "output"))
ONE_BY_ONE = {
    "equal": equal(),
    "different": different(),
    "nan": odd(NAN),
    "inf": odd(INF),
    "zero": odd(0.0),
    "empty": EMPTY,
    "no elements": NO_ELEMENTS,
    "unplaced": UNPLACED,
    "rewritten": REWRITTEN,
}
of_all_kinds = pytest.mark.parametrize("report", ONE_BY_ONE.values(), ids=ONE_BY_ONE)


@of_all_kinds
@pytest.mark.parametrize("write", [page, lambda report: pages([report])], ids=["page", "pages"])
def test_every_kind_of_report_gives_a_page_that_needs_nothing_else(report, write):
    text = write(report)
    found = Reader(text)
    assert report.title.partition("[")[0] in found.text
    assert not re.search(r"https?:|//|@import|<script|<iframe|<object|<image", text)
    marks = {attrs["id"] for attrs in found.of("path") if "id" in attrs}
    assert {attrs["href"].removeprefix("#") for attrs in found.of("use")} <= marks


def test_many_reports_of_every_kind_at_once():
    found = Reader(pages(ONE_BY_ONE.values()))
    names = {attrs["id"] for attrs in found.of("section")}
    assert {attrs["href"].removeprefix("#") for attrs in found.of("a")} == names
    assert Reader(pages([])).text.count("nothing is proven") == 1


def test_the_verdict_stands_first_in_one_sentence():
    first = [Reader(page(report)).text for report in (equal(), different(), EMPTY, REWRITTEN)]
    assert "Equal: 25 comparisons" in first[0] and "Different" not in first[0]
    assert f"Different at {TAPS[4]} (value), the first of 2 places" in first[1]
    assert "it looks like another scale." in first[1]
    assert "Nothing was compared, so nothing is proven." in first[2]
    assert "Equal" in first[3] and "1 tap computed another way" in first[3]
    for text in first:
        assert text.index("Parity of") < re.search("Equal|Different|Nothing", text).start() < 300


def test_a_page_says_equal_only_where_the_report_does():
    alike = judge.same_function(
        np.ones(2) * (1 + 1e-9), np.ones(2), noisy=[np.ones(2) * (1 + 1e-9)]
    )
    rows = {name: (Row("output", "output", "float64", "eager", v),) for name, v in {
        "shows nothing": judge.same_function(np.zeros(2), np.zeros(2)),
        "by noise": alike,
        "equal": verdict(0.0),
        "off": verdict(1.0),
    }.items()}  # fmt: skip
    told = {name: Report(name, given) for name, given in rows.items()}
    texts = {name: Reader(page(report)).text for name, report in told.items()}
    assert "Nothing is proven: output: both are all zeros." in texts["shows nothing"]
    assert "✕" in texts["shows nothing"] and "✓" not in texts["shows nothing"]
    assert "Equal as far as this input can tell: 1 comparison; output differ" in texts["by noise"]
    many = {
        ("shows nothing", "equal"): "Nothing is proven by 1 of 2 cases; the others are equal.",
        ("shows nothing", "equal", "off"): "Different: 1 of 3 cases; 1 prove nothing.",
        ("by noise", "equal"): "Equal: 2 cases, 1 as far as the input can tell.",
        ("equal",): "Equal: 1 case, all results within their limits.",
    }
    for names, said in many.items():
        assert said in Reader(pages(told[name] for name in names)).text


@pytest.mark.parametrize("write", [page, lambda report: pages([report])], ids=["page", "pages"])
def test_a_failure_shows_every_part_of_its_report(write):
    report = different()
    text = Reader(write(report)).text
    for place in report.divergences:
        assert f"{place.tap}{place.kind}" in text
    assert "at [1, 2, 4, 6]: Flax 8, torch 9" in text
    for told in (COMMAND, "mask", "rotary (torch)", *report.notes, *VERSIONS.values()):
        assert told in text
    assert all(row.name in text for row in (*report.rows, *report.local))


@pytest.mark.nightly
@pytest.mark.parametrize("write", [page, lambda report: pages([report])], ids=["page", "pages"])
def test_a_failure_says_what_it_does_as_the_text_does(write):
    for report in (different(), UNPLACED, NO_ELEMENTS):
        lines = str(report).partition("  what it does:\n")[2].splitlines()
        lines = [line[4:] for line in lines if line.startswith("    ")]
        assert lines and "\n".join(lines) in Reader(write(report)).text
    many = [*(equal() for _ in range(30)), *(different() for _ in range(30))]
    assert Reader(pages(many)).text.count("What it does") == 30
    assert "What it does" not in Reader(write(equal())).text


def test_a_failure_that_could_not_be_placed_names_its_row():
    found = Reader(page(UNPLACED))
    assert "Different at output (value)" in found.text and len(found.of("li")) == 1


@pytest.mark.parametrize("report", [equal(), different()], ids=["equal", "different"])
def test_every_comparison_stands_in_a_table_with_its_worst_element(report):
    text = Reader(page(report)).text.partition("Every comparison")[2]
    counts = [int(count) for count in re.findall(r"(\d+) comparisons?\b", text)]
    assert sum(counts) == len(report.rows) + len(report.local)
    assert "torch's own values" in text or not report.local
    text = Reader(page(odd(0.5))).text.partition("Every comparison")[2]
    assert text.count("at [0]: Flax 0.5, torch -0.5") == len([*odd(0.5).rows, *odd(0.5).local])


def test_the_worst_row_of_a_group_is_nan_if_there_is_one():
    rows = rows_of({"x": 1.0, "y": NAN, "z": INF}, "gradient")
    assert "worst nan" in Reader(page(Report("nan", rows))).text


def test_another_way_to_compute_the_same_is_no_failure():
    found = Reader(page(REWRITTEN))
    assert "1 computed another way" in found.text
    assert not [attrs for _, attrs in found.tags if attrs.get("class") == "off"]


def test_names_and_titles_are_escaped():
    names = (NASTY,)
    report = Report(
        NASTY,
        (Row(NASTY, NASTY, NASTY, NASTY, judge.Verdict(NASTY, 1.0, 0.0, note=NASTY)),
         *rows_of({NASTY: 1.0}, "output"), *rows_of({NASTY: 1.0})),
        1, names, names, names, {NASTY: NASTY}, NASTY, rows_of({NASTY: 1.0}, "local"),
        (Divergence(NASTY, 1.0, 0.0, NASTY, (1,), NASTY, NASTY, 1.0, 2.0),),
        {NASTY: np.ones((2, 2))},
    )  # fmt: skip
    for text in (page(report), pages([report])):
        assert "<script" not in text and Reader(text).text.count(NASTY) > len(names)


def marks_of(text):
    """The marks of each strip by its label, in order, left to right."""
    found = {}
    for label, strip in re.findall(r'title="([^"]+)">[^<]*</span>(<svg.*?</svg>)', text):
        uses = re.findall(r'<use href="#mark-([\w-]+)" x="([\d.]+)%"', strip)
        found.setdefault(label, []).extend((name, float(x)) for name, x in uses)
    return found


def test_the_chart_shows_each_tap_in_order_and_what_differs_in_another_shape():
    text = page(different())
    values = text[text.index("Error by depth") : text.index("Error of gradients")]
    marks = marks_of(values)
    assert list(marks) == [*TAPS, "output"]
    assert [name for name, _ in marks[TAPS[0]]] == ["global", "local"]
    assert [name for name, _ in marks[TAPS[4]]] == ["global-off", "local-off"]
    assert [name for name, _ in marks[TAPS[5]]] == ["global-off", "local"]
    (_, noise), (_, large), (_, infinite) = marks[TAPS[0]][0], marks[TAPS[4]][1], marks[TAPS[8]][1]
    assert noise < large < infinite


def test_a_chart_shows_the_worse_of_two_modes():
    for errors in [(1e-16, 0.5), (0.5, 1e-16), (NAN, 1e-16), (1e-16, NAN)]:
        rows = [rows_of({"output": e}, "output", m) for e, m in zip(errors, "ab", strict=True)]
        assert [name for name, _ in marks_of(page(Report("two", rows[0] + rows[1])))["output"]] == [
            "global-off"
        ]


def test_the_axis_of_the_chart_shows_every_error():
    axis = Axis(-16, 2)
    places = [axis.at(error) for error in (0.0, 1e-16, 1e-3, 100.0, INF)]
    assert sorted(set(places)) == places and axis.at(NAN) == axis.at(INF)
    assert axis.at(5e-324) == axis.at(1e-16) and axis.at(1e300) == axis.at(100.0)


def test_the_limit_is_a_line_between_what_passes_and_what_does_not():
    text = page(different()).partition("Error of gradients")[0]
    (limit,) = {float(x) for x in re.findall(r'<line x1="([\d.]+)%"[^>]*class="limit"', text)}
    for found in marks_of(text).values():
        for name, x in found:
            assert x > limit if name.endswith("-off") else x < limit


def test_a_picture_holds_what_was_drawn():
    levels = np.random.RandomState(0).randint(0, LEVELS + 2, (5, 7)).astype(np.uint8)
    levels[0], levels[1], levels[2, 0] = 0, 3, LEVELS + 1
    text = drawn(levels, 10, 20, 70, 25)
    assert 'transform="translate(10 22.5) scale(10 5)"' in text
    shades = [attrs for tag, attrs in Reader(text).tags if tag == "path"]
    opacities = [float(attrs.get("opacity", 2)) for attrs in shades]  # what is not finite is last
    assert opacities == sorted(set(opacities)) and shades[-1]["class"] == "odd"
    painted = np.zeros_like(levels)
    for level, attrs in zip(np.unique(levels)[1:], shades, strict=True):
        for x, y, count in re.findall(r"M(\d+) (\d+)h(\d+)", attrs["d"]):
            painted[int(y), int(x) : int(x) + int(count)] += level
    np.testing.assert_array_equal(painted, levels)


def test_colours_grow_with_the_difference():
    values = np.array([0.0, 1e-9, 1e-5, 1e-1, INF])
    levels = scale_of(values).levels(values)
    assert levels[0] == 0 and (np.diff(levels.astype(int)) > 0).all()


def test_a_scale_has_room_even_where_all_is_the_same():
    for values in (np.zeros(3), np.ones(3), np.full(3, INF), np.full(3, 5e-324)):
        scale = scale_of(values)
        assert scale.low < scale.high
        assert scale.levels(values).shape == values.shape
    assert scale_of(np.array([2e-3, 0.5])) == Scale(-3, 0)


def test_the_worst_element_survives_the_drawing_of_a_large_map():
    values = np.zeros((301, 5))
    values[299, 3] = 1.0
    small = pooled(values, 128)
    assert small.shape == (101, 5) and small[99, 3] == 1.0 and small.sum() == 1.0


def test_panels_show_the_worst_indices_first_of_all():
    values = np.zeros((9, 5, 3, 4))
    values[8, 4] = 1.0
    text = page(Report("many heads", rows_of({"output": 1.0}, "output"), maps={"scores": values}))
    found = Reader(text)
    assert text.count('class="frame"') == 24 and "[8, 4, :, :]" in found.text
    assert "The 24 worst of 45 panels" in found.text
    assert "axis 2, query" in found.text and "axis 3, key" in found.text
    assert len(re.findall(r'<rect[^>]*class="worst"', text)) == 1


def test_many_reports_stay_small():
    title = "variant_{}[d_in=11,d_out=12,context_length=40|x=2x33x11|torch_ref.Module]".format
    good = [equal(title(i % 41)) for i in range(231)]
    assert len(pages(good)) < 2_000_000
    bad = [different(title(i % 41), (3, 8, 65, 65)) for i in range(40)]
    text = pages([*good, *bad])
    assert len(text) < 4_000_000
    found = Reader(text).text
    assert found.count(f"Different at {TAPS[4]}") == len(bad)


def test_omitted_drawings_are_named():
    maps = {f"layers.{i}.scores": np.ones((2, 3)) for i in range(30)}
    report = Report("deep", rows_of({"output": 1.0}, "output"), maps=maps)
    alone, of_many = page(report), pages([report])
    assert of_many.count('class="frame"') < alone.count('class="frame"') < len(maps)
    assert all(tap in Reader(text).text for tap in maps for text in (alone, of_many))


def test_failing_variants_and_cases_stand_first():
    good = [equal(f"a_good[x={i}|torch_ref.A]") for i in range(3)]
    mixed = [equal("b_mixed[x=1|torch_ref.B]"), different("b_mixed[x=2|torch_ref.B]")]
    text = Reader(pages([*good, *mixed])).text
    assert text.index("b_mixed") < text.index("a_good")
    assert text.index("b_mixed[x=2") < text.index("b_mixed[x=1") < text.index("a_good[x=0")
    assert "Different: 1 of 5 cases." in text


@pytest.mark.parametrize(
    ("count", "told"), [(6, ""), (7, "and 1 place more"), (9, "and 3 places more")]
)
def test_places_beyond_the_first_six_are_counted(count, told):
    places = tuple(Divergence(f"layer.{i}", 1.0, 0.0, "same function", None) for i in range(count))
    rows = (Row("output", "output", "float64", "", judge.failed_fact("another")),)
    lines = [line.strip() for line in str(Report("many", rows, divergences=places)).splitlines()]
    assert [line for line in lines if line.startswith("and ")] == [told] * bool(told)


NAMED = "grouped_query[num_heads=6,num_kv_heads=3|x=2x7x11,mask=7,train|torch_ref.GroupedQuery]"
PAIR = "GroupedQuery against torch_ref.GroupedQuery"
DETAILS = "num_heads=6, num_kv_heads=3; x of shape 2 x 7 x 11, mask of shape 7; in training"


def test_a_case_is_named_in_words_and_its_name_can_be_copied():
    other = replace(equal(NAMED.replace("=6", "=9")), flax_class="GroupedQuery")
    named = replace(equal(NAMED), flax_class="GroupedQuery")
    text = pages([other, named])
    found = Reader(text)
    assert f"{PAIR}, case 2: {DETAILS}" in found.text and f"{PAIR}, case 1: " in found.text
    assert f"<code>{NAMED}</code>" in text
    alone = page(named)
    assert f"<h1>Parity of {PAIR}</h1>" in alone and f'<p class="wrap">{DETAILS}</p>' in alone
    assert f"<code>{NAMED}</code>" in alone and f"<title>{PAIR} - " in alone


def test_a_failing_case_keeps_its_number_though_it_is_shown_first():
    text = Reader(pages([equal(NAMED), different(NAMED)])).text
    assert text.index("case 2: ") < text.index("case 1: ")


def test_a_title_that_is_no_name_of_a_case_is_shown_as_it_is():
    for title in ("my layer", "a[b", "x[0]", "two | bars"):
        assert in_words(title) == (title, "") and numbered(title, "", 3) == title
        assert Reader(page(replace(EMPTY, title=title))).text.count(f"Parity of {title}") == 1


@pytest.mark.parametrize(
    "title, pair, details",
    [
        ("luong[rotary,|q=2x3,s=|torch_ref.L]", "L against torch_ref.L",
         "rotary; q of shape 2 x 3, scalar s"),
        ("luong[L,d=3|q=3|torch.nn.L]", "L against torch.nn.L", "d=3; q of shape 3"),
        ("luong[a|b|q=3|torch.nn.L]", "L against torch.nn.L", "a|b; q of shape 3"),
    ],
)  # fmt: skip
def test_names_are_read_as_cases_write_them(title, pair, details):
    assert in_words(title, "L") == (pair, details)


@pytest.mark.nightly
def test_every_case_of_the_library_has_words():
    for case in every_case()[::7]:
        pair, details = in_words(str(case), case.flax_class.__name__)
        assert pair == f"{case.flax_class.__name__} against {case.proven_equal_to}"
        assert details and all(f"{name} " in f"{details} " for name in case.inputs)


def test_the_command_says_the_class_of_each_report():
    place = Listed(
        "us", "us.test", 0, "luong", "torch.nn.L", "luong[d=3|q=3|torch.nn.L]", of="Luong"
    )
    results = Results()
    workers = SimpleNamespace(
        as_completed=lambda *_: enumerate([(equal(place.title), "-"), Failure("it died")])
    )
    _prove_each(jobs([place, place], live=True), results, workers, Progress("run", Console()))
    for *_, report in results.proofs:
        assert report.flax_class == report.to_dict()["flax_class"] == "Luong"
        assert "Parity of Luong against torch.nn.L" in Reader(page(report)).text
