"""The certificate's pages: its marks, its table, and what is refused before the work."""

import pytest

from flax_attn.parity import Report, Row, judge
from flax_attn.parity.cases import markdown
from flax_attn.parity.cases.certificate import lines
from flax_attn.parity.cases.collect import Listed
from flax_attn.parity.cases.markdown import PageFacts

EMPTY = "# Us\n<!-- certificate -->\n<!-- end of certificate -->\nthe end\n"


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
def page(tmp_path):
    path = tmp_path / "certificate.md"
    path.write_text(EMPTY)
    return path


def test_nothing_outside_the_marks_is_written(page):
    made = table(b=(1e-16, 3e-15), a=(2e-14, 1e-16))
    assert markdown.write(page, made, whole=True) == [page]
    assert page.read_text() == EMPTY.replace("-->\n<", f"-->\n{made}<")
    assert [*markdown.rows(made)] == ["A", "B"]


def test_writing_a_part_keeps_other_rows_and_writing_all_drops_them(page):
    markdown.write(page, table(a=(1e-16, 1e-16), c=(1e-16, 1e-16)), whole=True)
    markdown.write(page, table(b=(2e-16, 1e-16), c=(5e-1, 1e-16)), whole=False)
    rows = markdown.rows(markdown.MARKS.search(page.read_text())["table"])
    assert {name: row[-1] for name, row in rows.items()} == {
        "A": "equal",
        "B": "equal",
        "C": "DIFFERENT",
    }
    markdown.write(page, table(b=(2e-16, 1e-16)), whole=True)
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
    assert cells[:6] == ["a", "torch.nn.A; a_twin.A", "-", "-", "0", "nan"]


def test_what_cannot_be_written_is_refused_before_the_work(page, tmp_path):
    known = [*cases("a", 3), *cases("b", 2)]
    markdown.check(page, cases("a", 3), known)
    with pytest.raises(ValueError, match=r"speaks for all 3 cases .* only 2 of a would be proven"):
        markdown.check(page, cases("a", 2), known)
    assert markdown.has_marks(page) and not markdown.has_marks(tmp_path / "README.md")


def test_a_row_names_every_class_of_its_variant():
    some = [case._replace(of=name) for case, name in zip(cases("a", 3), "XYX", strict=True)]
    assert markdown.layers(some) == {"a": "X, Y"}
