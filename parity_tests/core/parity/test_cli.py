"""The command on somebody else's package: found where one stands, its cases and pages named."""

import subprocess
import sys

import pytest

from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.cases.collect import collect

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
    Case(Half, dict(width=n), witness="somebody.theirs.Half", x=(3, n), dtypes=("float64",))
    for n in (4, 6)
]
"""


@pytest.fixture
def somewhere(tmp_path, monkeypatch):
    package = tmp_path / "somebody"
    (package / "deep").mkdir(parents=True)
    files = {"theirs": THEIRS, "mine": MINE, "cases": LIST, "deep/__init__": "import nothing_here"}
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments):
    line = [sys.executable, "-c", "import sys; from flax_attn.cli import main; sys.exit(main())"]
    return subprocess.run([*line, "parity", *arguments], capture_output=True, text=True)


@pytest.mark.skipif(not has_torch(), reason="compares with torch")
def test_a_package_is_proven_and_what_it_prints_runs_again(somewhere):
    done = command("somebody", "--html", "page.html", "--markdown", "table.md")
    assert done.returncode == 1, done.stderr
    assert "2 cases, 1 different" in done.stdout and "DIFFERENT at output" in done.stdout
    assert "0.66666667 times" in (somewhere / "page.html").read_text("utf-8")
    table = (somewhere / "table.md").read_text("utf-8").splitlines()
    assert table[0].startswith("| layer | equal to | backends | devices | params |")
    assert table[2].startswith("| Half | somebody.theirs.Half | own | - | 2 |")
    again = "flax-attn parity somebody 'mine[width=4|x=3x4|somebody.theirs.Half]'"
    assert again in done.stdout
    done = command("somebody", "mine[width=4|x=3x4|somebody.theirs.Half]")
    assert done.returncode == 1 and "1 case, 1 different" in done.stdout
    assert command("somebody", "mine[width=6|x=3x6|somebody.theirs.Half]").returncode == 0


def test_what_is_not_there_is_told(somewhere):
    for name, told in (("nobody", "did you mean somebody?"), ("zzzz", "multi_head")):
        done = command(name)
        assert done.returncode == 2
        assert f"{name!r} is neither a package" in done.stderr and told in done.stderr


def test_only_modules_with_cases_are_imported(somewhere, monkeypatch):
    monkeypatch.syspath_prepend(somewhere)
    assert [case.variant for case in collect("somebody")] == ["mine", "mine"]
