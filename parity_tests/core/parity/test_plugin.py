"""The pytest plugin, as other people's suites have it: each test here runs a suite of its own."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from flax_attn.parity.cases.case import has_torch

ROOT = Path(__file__).parents[3]

# Two sums, one right and one not; the pair is found by its import path.
PAIRS = """
import torch
from flax import nnx

class Theirs(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, 2)

    def forward(self, x):
        return self.linear(x) + 1

class Right(nnx.Module):
    more = 1.0

    def __init__(self, width, *, rngs):
        self.linear = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(x) + self.more

class Wrong(Right):
    more = 2.0
"""
LISTED = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
SUITE = f"""
from flax_attn.parity import Case
from pairs import Right, Wrong

quick = dict(dtypes=("float64",), reference="pairs.Theirs")
{LISTED} = [
    Case(Right, dict(width=3), x=(4, 3), **quick),
    Case(Wrong, dict(width=5), x=(4, 5), **quick),
]

def test_parity(case):
    case.check()

def test_seed(case):
    print("seed", case.seed, case.arrays()["x"][0, 0])
"""
FIXTURE = """
import numpy as np
import pytest
from flax import nnx
from pairs import Right, Theirs, Wrong

X = np.arange(12.0).reshape(4, 3)

@pytest.mark.parametrize("port", [Right, Wrong])
def test_port(port, assert_parity):
    assert assert_parity(Theirs(3), port(3, rngs=nnx.Rngs(0)), X, dtypes=["float64"]).ok

def test_that_does_not_fit(assert_parity):
    assert_parity(Theirs(3), nnx.Linear(3, 2, rngs=nnx.Rngs(0)), X)
"""
# Cases that are never run, for what needs no torch.
NAMES = f"""
from flax import nnx
from flax_attn.parity import Case

def case_of(width):
    return Case(nnx.Linear, dict(in_features=width, out_features=2), x=(4, width), reference="a.B")

{LISTED} = [case_of(3), case_of(5)]
"""
PLAIN = """
import sys

def test_nothing_was_imported():
    foreign = {name.split(".")[0] for name in sys.modules}
    assert not foreign & {"jax", "flax", "torch", "numpy"}, foreign
    ours = {name for name in sys.modules if name.startswith("flax_attn")}
    inner = {"_internal", "_internal.lazy", "_internal.renamed", "command", "command.pytest_plugin"}
    assert ours == {"flax_attn", *(f"flax_attn.{name}" for name in inner)}, ours
"""

needs_torch = pytest.mark.skipif(not has_torch(), reason="compares with torch")


PLUGIN = ("-p", "flax_attn.command.pytest_plugin", "-p", "no:cacheprovider", "-v")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder for a suite that knows no other plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place, files):
    for name, text in files.items():
        (place / f"{name}.py").write_text(text)


@pytest.fixture
def alone(place, monkeypatch):
    """Runs the suite of these files in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(place)])
    monkeypatch.setenv("PYTHONPATH", path, prepend=os.pathsep)

    def go(*options, **files):
        write(place, files)
        line = [sys.executable, "-m", "pytest", *PLUGIN, *options]
        done = subprocess.run(line, capture_output=True, text=True)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), [], 0.0)

    return go


@pytest.fixture
def here(place, monkeypatch):
    """Runs the suite of these files in this process, which has imported jax and torch already."""
    monkeypatch.syspath_prepend(place)

    def go(*options, **files):
        write(place, files)
        known, heard = {name: sys.modules.pop(name, None) for name in files}, io.StringIO()
        with redirect_stdout(heard):
            status = pytest.main([*PLUGIN, "-p", "no:faulthandler", *options])
        for name, module in known.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
        return pytest.RunResult(status, heard.getvalue().splitlines(), [], 0.0)

    return go


@pytest.fixture(params=["here", pytest.param("alone", marks=pytest.mark.nightly)])
def run(request):
    """Runs a suite here, and nightly in a process of its own."""
    return request.getfixturevalue(request.param)


@pytest.mark.nightly
@needs_torch
def test_cases_run_and_what_fails_is_reported_at_the_end(run):
    result = run(pairs=PAIRS, test_cases=SUITE)
    result.assert_outcomes(passed=3, failed=1)
    wrong = "pairs[[]width=5|x=4x5|pairs.Theirs[]]"
    result.stdout.fnmatch_lines(
        [
            "test_cases.py::test_parity[[]pairs[[]width=3|x=4x3|pairs.Theirs[]][]] PASSED*",
            f"test_cases.py::test_parity[[]{wrong}[]] FAILED*",
            ">       case.check()",
            "E       *ParityError: *; first: output",
            "*parity reports*",
            f"*test_cases.py::test_parity[[]{wrong}[]]*",
            f"{wrong}: * comparisons, * different",
            "*float64*output*",
            "*see it again *",
        ]
    )
    text = result.stdout.str()
    assert "compare.py" not in text and "case.py" not in text, "a traceback into the harness"
    assert text.count("see it again") == 1


@needs_torch
def test_the_fixture_asserts_and_names_its_test(run):
    result = run("--parity-seed", "7", pairs=PAIRS, test_ports=FIXTURE)
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "parity seed: 7",
            ">       assert_parity(*",
            "E       *ParityError: The torch module does not fit the Flax module:",
            "*parity reports*",
            "test_port[[]Wrong[]]: * comparisons, * different",
            "  see it again  pytest 'test_ports.py::test_port[[]Wrong[]]' --parity-seed 7",
            "*linear.weight*",
        ]
    )
    text = result.stdout.str()
    assert "compare.py" not in text and "_pytest.py" not in text


def test_the_plugin_prints_nothing_for_a_suite_without_cases(alone):
    result = alone(test_plain=PLAIN)
    result.assert_outcomes(passed=1)
    assert "parity" not in result.stdout.str()


def test_the_seed_reaches_cases_and_the_fixture(run):
    seeds = """
def test_case(case):
    assert case.seed == 7

@pytest.fixture
def heard(monkeypatch):
    monkeypatch.setattr(flax_attn.parity, "assert_parity", lambda *pair, **options: options)

def test_fixture(heard, assert_parity):
    assert assert_parity(1, 2, seed=3) == {
        "seed": 7,
        "title": "test_fixture",
        "reproduce": "pytest 'test_seeds.py::test_fixture' --parity-seed 7",
    }
"""
    files = {"test_seeds": "import flax_attn.parity\nimport pytest\n" + NAMES + seeds}
    run("--parity-seed", "7", **files).assert_outcomes(passed=3)


@pytest.mark.nightly
def test_tests_that_parametrize_case_themselves_are_left_alone(run):
    """By a hook, by a mark, with cases of another kind, or with a fixture and no cases."""
    hook = """
def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames and hasattr(metafunc.module, "HOOKED"):
        metafunc.parametrize("case", metafunc.module.CASES, ids=str)
"""
    one = "def test_one(case):\n    assert case\n"
    mark = "import pytest\n@pytest.mark.parametrize('n, case', [(1, 2), (3, 4), (5, 6)])\n"
    other = "import pytest\nCASES = [1, 2]\n@pytest.fixture\ndef case():\n    return CASES\n"
    result = run(
        conftest=hook,
        test_hook=f"{NAMES}HOOKED = True\n{one}",
        test_mark=f"{NAMES}{mark}def test_one(n, case):\n    assert case == n + 1\n",
        test_other=other + one,
        test_unused=NAMES + "def test_one():\n    pass\n",
    )
    result.assert_outcomes(passed=2 + 3 + 1 + 1)


def test_a_stray_entry_in_cases_is_an_error_that_names_it(run):
    result = run(test_mixed=NAMES + "CASES.append(3)\ndef test_one(case):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*CASES in test_mixed.py must hold *; it holds 3."])


@pytest.mark.nightly
def test_without_tracebacks_there_is_no_section(run):
    refused = NAMES + "def test_one(case):\n    case.report(live=False)\n"
    result = run(test_refused=refused)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*parity reports*", "*not recorded*"])
    assert "golden.py" not in result.stdout.str()
    assert "parity reports" not in run("--tb=no", test_refused=refused).stdout.str()
    assert "golden.py" in run("--full-trace", test_refused=refused).stdout.str()
