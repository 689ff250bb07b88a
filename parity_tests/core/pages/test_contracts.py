"""docs/contracts.md: every function and test that it names is there, and runs when it says."""

import ast
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from flax_attn._internal.markdown import cells
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise.plan import make_plan
from parity_tests.core.pages import bits

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "contracts.md"
CORE = ROOT / "parity_tests" / "core"
SUBJECTS = (
    *("see nothing", "Hidden", "Log-sum-exp", "Dtypes", "Dropout", "order", "Caches", "Meshes"),
    *("Derivatives", "Equality", "Files", "Versions"),
)


class Promise(NamedTuple):
    """A row of the page."""

    sentence: str
    function: str
    test: str
    runs: str


def promises() -> list[Promise]:
    tables = PAGE.read_text("utf-8").split("| promise | kept by | test | runs |\n")[1:]
    rows = [row for text in tables for row in cells("|\n" + text.partition("\n\n")[0])[1:]]
    return [Promise(*(cell.strip("`") for cell in row[:3]), row[3]) for row in rows]


PROMISES = promises()


def named(tree: ast.AST, above: str = "") -> dict[str, ast.AST]:
    """Functions and classes by their dotted names."""
    made = {}
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            made[above + node.name] = node
            made |= named(node, f"{above}{node.name}.")
    return made


def parsed(path: Path) -> dict[str, ast.AST]:
    return named(ast.parse(path.read_text("utf-8")))


@pytest.fixture(scope="module")
def night():
    """The script."""
    loader = importlib.machinery.SourceFileLoader("night", str(ROOT / ".ci" / "nightly"))
    spec = importlib.util.spec_from_loader("night", loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "night", script)  # for its dataclass
        loader.exec_module(script)
        yield script


def test_every_subject_has_promises():
    headings = [line[3:] for line in PAGE.read_text("utf-8").splitlines() if line[:3] == "## "]
    assert all(any(subject in heading for heading in headings) for subject in SUBJECTS)
    assert len(PROMISES) >= 45 and len({x.sentence for x in PROMISES}) == len(PROMISES)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda x: x.sentence[:40])
def test_what_keeps_a_promise_and_what_tests_it_are_there(promise, night):
    path, _, function = promise.function.partition(":")
    assert function in parsed(ROOT / "flax_attn" / path), promise.function
    path, _, test = promise.test.partition("::")
    assert test in parsed(CORE / path), promise.test
    assert promise.sentence.endswith(".") and len(promise.sentence) < 160
    if promise.runs == "each commit":
        assert not is_nightly(CORE / path, test), promise.test
        return
    name, _, date = promise.runs[1:].partition("`, ")
    runs = night.read()
    assert any(item.startswith(name) for item in runs), name
    assert date == night.date_of(name, runs)


def is_nightly(path: Path, test: str) -> bool:
    """Whether all of a test runs at night only; a table may leave some rows to the night."""
    node = parsed(path)[test]
    marks = [ast.unparse(x) for x in getattr(node, "decorator_list", ())]
    whole = "pytestmark = pytest.mark.nightly" in path.read_text("utf-8")
    return whole or "pytest.mark.nightly" in marks


def test_a_night_writes_its_dates_into_both_pages(night, tmp_path, monkeypatch):
    name = next(x.runs[1:].partition("`, ")[0] for x in PROMISES if x.runs != "each commit")
    for attribute in ("PAGE", "CONTRACTS"):
        copy = tmp_path / attribute
        copy.write_text(getattr(night, attribute).read_text("utf-8"), "utf-8")
        monkeypatch.setattr(night, attribute, copy)
    green, red = (
        night.Run("2031-01-02", "0123", 3.0, "green"),
        night.Run("2031-01-03", "", 3.0, "red: x"),
    )
    for runs, text in (
        ({f"{name} a": night.Run()}, "never"),
        ({f"{name} a": green}, "2031-01-02"),
        ({f"{name} a": green, f"{name} b": night.Run()}, "1 of 2, 2031-01-02"),
        ({f"{name} a": green, f"{name} b": red}, "red on 2031-01-03"),
    ):
        night.show(runs)
        assert f"`{name}`, {text} |" in (tmp_path / "CONTRACTS").read_text("utf-8")
        assert night.oldest(runs) in (tmp_path / "PAGE").read_text("utf-8")


@pytest.fixture
def tonight(night, tmp_path, monkeypatch):
    """A night over commands that end as they are called, from a ledger of lines."""

    def begin(lines, minutes=1.0, **commands):
        monkeypatch.setattr(night, "WORK", tmp_path)
        monkeypatch.setattr(night, "LEDGER", tmp_path / "night.tsv")
        monkeypatch.setattr(night, "environment", lambda name: tmp_path)
        night.write(lines)
        items = {name: night.Item(name, command) for name, command in commands.items()}
        return night.Night(minutes, "a seed", items)

    return begin


def test_red_comes_first_then_promises_that_are_due_then_the_stalest(night, tonight, monkeypatch):
    green = night.Run("2030-01-01", "0123", 1.0, "green")
    lines = {"old": green, "gone": green, "new": green._replace(date="2030-01-02")}
    lines |= {"red": night.Run("2030-01-03", "0123", 1.0, "red: it")}
    monkeypatch.setattr(night, "promised", lambda: ("a promise", "new"))
    commands = dict.fromkeys(("old", "new", "red", "fresh", "a promise", "of a record"), "true")
    begun = tonight(lines, 2.0, **commands)
    begun.items["of a record"] = night.Item("of a record", reads=night.WORK / "no record")
    order = []
    while batch := begun.next():
        order += [item.name for item in batch]
    assert order == ["red", "a promise", "fresh", "old", "new"]


def test_a_night_ends_with_its_minutes_and_writes_its_ledger(night, tonight):
    before = night.Run("2030-01-01", "0123", 0.1, "green")
    lines = {
        **dict.fromkeys(("fast", "bad", "slow"), before),
        "long": before._replace(seconds=59.0),
    }
    commands = {"fast": "true", "bad": "echo it broke; false", "slow": "sleep 60", "long": "true"}
    tonight(lines, 0.03, **commands).lane(whole=False)
    runs = night.read()
    ends = [runs[name].outcome for name in ("fast", "bad", "slow")]
    assert ends == ["green", "red: it broke", "cut"]
    assert runs["long"] == lines["long"]  # which would not have ended in time


def test_the_table_of_bits_is_whole():
    head, *rows = cells(bits.MARKS.search(PAGE.read_text("utf-8"))["table"])
    assert head[2:] == [*bits.LAYERS]
    wanted = (*bits.LAWS, bits.PROCESS, *bits.OTHERS)
    assert [row[:2] for row in rows] == [[what, dtype] for what in wanted for dtype in bits.DTYPES]
    assert list(bits.faults(rows, rows)) == []
    wrong = [[*row[:2], "9 %, 9.0", *row[3:]] for row in rows]
    assert len(list(bits.faults(wrong, rows))) >= 8


def test_the_same_bits_whatever_other_rows_hold():
    layer, x = bits.made("grouped heads", "float32")
    assert bits.cell([bits.other_rows(layer, x[:, :300])], "float32") == bits.SAME
    assert bits.cell([bits.again(layer, x[:, :300])], "float32") == bits.SAME


def test_loops_are_compared_that_are_several(monkeypatch):
    """Else the row "in 1, 2 or 4 loops" would compare one loop with itself."""
    plans = []

    def planned(*args, **options):
        plans.append(make_plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr(blockwise, "make_plan", planned)
    layer, x = bits.made("grouped heads", "float32")
    assert bits.cell(list(bits.loops(layer, x)), "float32") == bits.SAME
    assert [plan.lanes for plan in plans] == [1, 2, 4]
