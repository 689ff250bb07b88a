"""The command on a package of a user: found in the current folder, with its cases and pages."""

import subprocess
import sys

import pytest

from flax_attn.command import cli, proving
from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.cases.collect import collect

from .in_process import Here, forget

THEIRS = """
import torch


class Half(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, 5)

    def forward(self, x):
        return self.inner(x) / 2
"""
MINE = """
from flax import nnx


class Half(nnx.Module):
    def __init__(self, width, *, rngs):
        self.inner = nnx.Linear(width, 5, rngs=rngs)

    def __call__(self, x):
        return self.inner(x) / (3 if x.shape[-1] == 4 else 2)
"""
NAME = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
LIST = f"""
from flax_attn.parity import Case

from .mine import Half

{NAME} = [
    Case(Half, dict(width=n), reference="somebody.theirs.Half", x=(3, n), dtypes=("float64",))
    for n in (4, 6)
]
"""


needs_torch = pytest.mark.skipif(not has_torch(), reason="compares with torch")


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    package = tmp_path / "somebody"
    (package / "deep").mkdir(parents=True)
    files = {"theirs": THEIRS, "mine": MINE, "cases": LIST, "deep/__init__": "import nothing_here"}
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    forget("somebody")


@pytest.fixture
def main(capsys):
    """The command in this process: its exit status, and what it says on both channels."""

    def run(*arguments):
        status = cli.main(["parity", *arguments])
        return status, *capsys.readouterr()

    return run


def own_process(*arguments):
    """The command in a process of its own."""
    line = [
        sys.executable,
        "-c",
        "import sys; from flax_attn.command.cli import main; sys.exit(main())",
    ]
    done = subprocess.run([*line, "parity", *arguments], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly
@needs_torch
@pytest.mark.parametrize("own", [False, True])
def test_a_package_is_proven_and_what_it_prints_runs_again(own, somewhere, main, monkeypatch):
    """Here, without workers, and as a user has it: in processes of their own."""
    if not own:
        monkeypatch.syspath_prepend(somewhere)
        monkeypatch.setattr(proving, "Workers", Here)
    command = own_process if own else main
    status, out, err = command("somebody", "--html", "page.html", "--markdown", "table.md")
    assert status == 1, err
    assert "2 cases, 1 different" in out and "DIFFERENT at output" in out
    page, table = ((somewhere / x).read_text("utf-8") for x in ("page.html", "table.md"))
    assert "another scale of the quotient (theirs.py:11): 3, torch 2" in page
    assert table.startswith("| layer | equal to | backends | devices | params |")
    assert "\n| Half | somebody.theirs.Half | own | - | 2 |" in table
    again = "flax-attn parity somebody 'mine[width=4|x=3x4|somebody.theirs.Half]'"
    assert again in out
    status, out, _ = command("somebody", "mine[width=4|x=3x4|somebody.theirs.Half]")
    assert status == 1 and "1 case, 1 different" in out
    assert command("somebody", "mine[width=6|x=3x6|somebody.theirs.Half]")[0] == 0


@pytest.mark.nightly
def test_a_worker_proves_a_case(main):
    """Against its record, since no worker need import torch for that."""
    case = next(x for x in collect("parity_tests") if x.variant == "uniform_causal_average")
    status, out, err = main(str(case), "--replay")
    assert status == 0 and "1 variant, 1 case, 0 different; " in out, err


@pytest.mark.nightly
def test_an_unknown_name_is_refused_with_a_suggestion(somewhere, main):
    for name, told in (
        ("nobody", "did you mean somebody?"),
        ("zzzz", "the names are attention_pool, "),
    ):
        status, _, err = main(name)
        assert status == 2 and f"{name!r} is no file, no package" in err and told in err


def test_only_modules_with_cases_are_imported(somewhere, monkeypatch):
    monkeypatch.syspath_prepend(somewhere)
    assert [case.variant for case in collect("somebody")] == ["mine", "mine"]
