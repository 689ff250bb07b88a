"""The certificate's pages: marks, both forms of the table, and what is refused before the work."""

import pytest

from flax_attn.parity import Report, Row, judge
from flax_attn.parity.cases import markdown
from flax_attn.parity.cases.certificate import lines
from flax_attn.parity.cases.collect import Listed
from flax_attn.parity.cases.markdown import PageFacts

FULL = "<!-- certificate; short form in ../README.md -->\n<!-- end of certificate -->\n"
BRIEF = "# Us\n<!-- short certificate -->\n<!-- end of short certificate -->\nthe end\n"


def row(kind, error):
    verdict = judge.Verdict("same function", error, 1e-12)
    return Row(kind, kind, "float64", "jit", verdict)


def table(**errors):
    """A table of variants, each with an error of its output and of its gradient."""
    reports = [
        (name, "theirs.Own", Report(name, (row("output", a), row("gradient", b))))
        for name, (a, b) in errors.items()
    ]
    about = {name: PageFacts(name.title(), "own") for name in errors}
    return markdown.markdown(lines(reports), about)


def cases(variant, count):
    return [Listed("us", "us.test", at, variant, "w", f"{variant}[{at}]") for at in range(count)]


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "docs").mkdir()
    full, brief = tmp_path / "docs" / "certificate.md", tmp_path / "README.md"
    full.write_text(FULL)
    brief.write_text(BRIEF)
    return full, brief


def test_one_run_writes_both_pages_and_nothing_outside_the_marks(pages):
    full, brief = pages
    made = table(b=(1e-16, 3e-15), a=(2e-14, 1e-16))
    assert markdown.write(full, made, whole=True) == [full, brief]
    assert full.read_text() == FULL.replace("-->\n<", f"-->\n{made}<")
    assert brief.read_text().startswith("# Us\n<") and brief.read_text().endswith("-->\nthe end\n")
    found = markdown.rows(markdown.SHORT_MARKS.search(brief.read_text())["table"])
    assert [*found.values()] == [
        ["A", "theirs.Own", "2.0e-14", "equal"],
        ["B", "theirs.Own", "3.0e-15", "equal"],
    ]


def test_the_short_form_shows_the_layers_that_its_mark_names_in_that_order(pages):
    full, brief = pages
    brief.write_text(BRIEF.replace("certificate -->\n<", "certificate of C, A, Unknown -->\n<", 1))
    made = table(a=(1e-16, 1e-16), b=(1e-16, 1e-16), c=(1e-16, 1e-16))
    assert markdown.write(full, made, whole=True) == [full, brief]
    shown = markdown.SHORT_MARKS.search(brief.read_text())
    assert [*markdown.rows(shown["table"])] == ["C", "A"]
    assert shown["layers"] == "C, A, Unknown"
    assert [*markdown.rows(full.read_text().partition("-->\n")[2])][:3] == ["A", "B", "C"]


def test_a_part_leaves_other_rows_and_the_whole_drops_them(pages):
    full, brief = pages
    markdown.write(full, table(a=(1e-16, 1e-16), c=(1e-16, 1e-16)), whole=True)
    markdown.write(full, table(b=(2e-16, 1e-16), c=(5e-1, 1e-16)), whole=False)
    for page, marks in ((full, markdown.FULL_MARKS), (brief, markdown.SHORT_MARKS)):
        found = markdown.rows(marks.search(page.read_text())["table"])
        assert {name: row[-1] for name, row in found.items()} == {
            "A": "equal",
            "B": "equal",
            "C": "DIFFERENT",
        }
    markdown.write(full, table(b=(2e-16, 1e-16)), whole=True)
    for page in pages:
        assert "| B |" in page.read_text() and "| A |" not in page.read_text()


def test_a_page_without_marks_holds_the_table_alone(tmp_path):
    path, made = tmp_path / "table.md", table(a=(1e-16, 1e-16))
    for _ in range(2):
        assert markdown.write(path, made, whole=False) == [path]
        assert path.read_text() == made
    markdown.check(path, cases("a", 1), cases("a", 2))


def test_torchs_own_classes_stand_first_and_a_nan_is_the_worst():
    reports = [
        ("a", witness, Report("a", (row("output", error), row("gradient", 1e-3))))
        for witness, error in [("a_twin.A", 1e-16), ("torch.nn.A", float("nan"))]
    ]
    made = markdown.markdown(lines(reports), {})
    (cells,) = markdown.rows(made).values()
    assert cells[:5] == ["a", "torch.nn.A; a_twin.A", "-", "-", "0"]
    (brief,) = markdown.rows(markdown.short(made)).values()
    assert brief == ["a", "torch.nn.A; a_twin.A", "nan", "DIFFERENT"]


def test_what_cannot_be_written_is_refused_before_the_work(pages):
    full, brief = pages
    known = [*cases("a", 3), *cases("b", 2)]
    markdown.check(full, cases("a", 3), known)
    with pytest.raises(ValueError, match=r"speaks for all 3 cases .* only 2 of a would be proven"):
        markdown.check(full, cases("a", 2), known)
    with pytest.raises(ValueError, match=r"README.md holds only the short form.*'; short form in"):
        markdown.check(brief, known, known)
    brief.write_text("nothing here")
    with pytest.raises(ValueError, match=r"says that .*README.md holds its short form, but"):
        markdown.check(full, known, known)
    assert markdown.has_marks(full) and not markdown.has_marks(brief)


def test_a_row_names_every_class_of_its_variant():
    some = [case._replace(of=name) for case, name in zip(cases("a", 3), "XYX", strict=True)]
    assert markdown.layers(some) == {"a": "X, Y"}
