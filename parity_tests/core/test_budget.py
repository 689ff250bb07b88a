"""parity_tests/budget.toml: lines, programs, and who may raise a number."""

import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity_tests import rooms

ROOT = Path(__file__).parents[2]
LIBRARY, TESTS = ("flax_attn/", "torch_ref/"), ("parity_tests/", "conftest.py")
if not (ROOT / ".git").exists():
    pytest.skip(
        "the lines are those of tracked files, and this is no checkout", allow_module_level=True
    )


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


def lines() -> dict[str, int]:
    """Of all tracked Python and TOML, by what they are."""
    counts = {"library": 0, "tests": 0, "pages": 0}
    for name in git("ls-files", "*.py", "*.toml").splitlines():
        if (ROOT / name).exists():
            kind = "library" if name.startswith(LIBRARY) else "pages"
            kind = "tests" if name.startswith(TESTS) else kind
            counts[kind] += len((ROOT / name).read_text("utf-8").splitlines())
    return counts


def test_no_lines_above_the_budget():
    allowed = rooms.budget()["lines"]
    over = {kind: n for kind, n in lines().items() if n > allowed[kind]}
    assert not over, f"{over} lines, and parity_tests/budget.toml allows {allowed}."


def test_the_rooms_of_the_budget_are_all():
    """The sum of the rooms is the whole, so that no room hides behind another."""
    allowed = rooms.budget()["programs"]
    assert allowed["all"] == sum(n for room, n in allowed.items() if room != "all")


def raised(before: dict, after: dict) -> list[str]:
    """The numbers that rose from one budget to the next; a new room counts."""
    return [
        f"{table}.{name}"
        for table, numbers in after.items()
        for name, n in numbers.items()
        if n > before.get(table, {}).get(name, 0)
    ]


def test_a_number_rises_in_a_commit_of_its_own():
    name = "parity_tests/budget.toml"
    for commit in git("log", "--format=%H", "-n", "20", "--", name).split():
        parent = subprocess.run(
            ["git", "show", f"{commit}^:{name}"], cwd=ROOT, capture_output=True, text=True
        )
        if parent.returncode == 0:  # else the commit brought the file
            after = tomllib.loads(git("show", f"{commit}:{name}"))
            changed = git("diff", "--name-only", f"{commit}^", commit).split()
            up = raised(tomllib.loads(parent.stdout), after)
            assert not up or changed == [name], f"{commit[:12]} raises {up} beside other changes."


def test_what_counts_as_raised():
    before = {"lines": {"tests": 5}, "programs": {"all": 7, "masks": 7}}
    assert raised(before, {"lines": {"tests": 4}, "programs": {"all": 7}}) == []
    assert raised(before, {"lines": {"tests": 6}, "programs": {"new": 1}}) == [
        "lines.tests",
        "programs.new",
    ]


def plugin(programs: int, **options) -> tuple[rooms.Rooms, SimpleNamespace]:
    """The plugin after a run of one test that compiled so many programs, and the session."""
    given = {"keyword": "", "deselect": None, "lf": False, "maxfail": 0}
    option = SimpleNamespace(**{**given, "markexpr": "not aot and not nightly", **options})
    source = pytest.Config.ArgsSource.TESTPATHS
    plugin = rooms.Rooms(SimpleNamespace(option=option, args_source=source))
    plugin.costs = {"parity_tests/core/masks/test_a.py::test_b": rooms.Cost(1.0, programs, 1)}
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    plugin.pytest_sessionfinish(session)
    return plugin, session


def test_a_whole_run_fails_above_the_budget(monkeypatch):
    monkeypatch.setattr(rooms, "budget", lambda: {"programs": {"all": 100, "masks": 100}})
    for programs, faults in ((100, 0), (102, 0), (103, 1), (120, 1), (121, 2)):
        run, session = plugin(programs)
        assert len(run.faults()) == faults, run.faults()
        assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if faults else 0)
    assert "test_a.py::test_b" in run.faults()[1]


def test_a_part_of_the_tests_is_not_judged(monkeypatch):
    monkeypatch.setattr(rooms, "budget", lambda: {"programs": {"all": 1}})
    for option in ({"keyword": "mine"}, {"markexpr": "nightly"}, {"lf": True}, {"maxfail": 1}):
        run, session = plugin(1000, **option)
        assert not run.faults() and session.exitstatus == 0, option
