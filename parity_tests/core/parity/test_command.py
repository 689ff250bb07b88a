"""The command on cases that raise, exit or crash: each is named and the others are proven.

Also what it prints is a line that a shell takes, and goldens stay where the cases are.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

from flax_attn.command import cli, parity_command
from flax_attn.parity import Case, ParityError, Report, Row, judge
from flax_attn.parity.cases import golden, home
from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.cases.collect import Listed, collect
from flax_attn.parity.recording.sketch import SKETCH, sketch
from flax_attn.weights.safetensors import write_file

from .in_process import forget, known_reports
from .test_cli import THEIRS

MINE = """
import os
import signal
import sys

from flax import nnx


class Half(nnx.Module):
    by = 2

    def __init__(self, width, *, rngs):
        self.before()
        self.inner = nnx.Linear(width, 5, rngs=rngs)

    def before(self):
        pass

    def __call__(self, x):
        return self.inner(x) / self.by


class Third(Half):
    by = 3


class Raising(Half):
    def before(self):
        raise OSError("no such\\ncard")


class Leaving(Half):
    def before(self):
        sys.exit()


class Dying(Half):
    def before(self):
        os._exit(0)


class Crashing(Half):
    def before(self):
        os.kill(os.getpid(), signal.SIGSEGV)
"""
START = """
from flax import nnx
from flax_attn.parity import Case

from .mine import Crashing, Dying, Half, Leaving, Raising, Third


def case(of, **more):
    given = dict(reference="somebody.theirs.Half", x=(3, 4), dtypes=("float64",), **more)
    return Case(of, dict(width=4), **given)
"""
LIST = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
FILES = {
    "__init__": "",
    "theirs": THEIRS,
    "mine": MINE,
}
NAMES = ("Raising", "Leaving", "Dying", "Crashing")
STORM = {
    "a_good": f"{START}\n{LIST} = [case(Half, name='first')]",
    "b_exits": f"import sys\n{LIST} = []\nsys.exit()",
    "c_dies": f"import os\n{LIST} = []\nos._exit(0)",
    "d_syntax": f"{LIST} = [",
    "e_number": f"{LIST} = 3",
    "f_raises": f"{LIST} = []\nraise RuntimeError('no such card')",
    "g_stormy": f"{START}\n{LIST} = [case(of, name=of.__name__) for of in "
    f"({', '.join(NAMES)}, Half)]",
    "h_text": f"{START}\ndef told():\n    raise KeyError('width')\n\n"
    f"{LIST} = [Case(Half, told, reference='somebody.theirs.Half', x=(3, 4))]",
}
WAITS = f"""
import os
import time

open("started", "w").write(str(os.getpid()))
{LIST} = time.sleep(600)
"""
SLOW = f"""{START}
import os
import time


class Slow(Half):
    def before(self):
        open("started", "w").write(str(os.getpid()))
        time.sleep(600)


{LIST} = [case(Slow), case(Half)]
"""
ODD = "it's a \"name\" [of: $(date) `here`] :key: \\\\ ; 'twice'"
live = pytest.mark.skipif(not has_torch(), reason="compares with torch")


@pytest.fixture(autouse=True)
def one_package_a_test():
    """Each test has a package of its own under one name."""
    yield
    forget("somebody")


def package(folder, **files):
    (folder / "somebody").mkdir()
    for name, text in {**FILES, **files}.items():
        (folder / "somebody" / f"{name}.py").write_text(text)


def command(*arguments):
    line = [sys.executable, "-m", "flax_attn", "parity", *arguments]
    return subprocess.run(line, capture_output=True, text=True)


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs a line as it is printed, in a shell that knows the command."""
    script = tmp_path / "bin" / "flax-attn"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m flax_attn "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return lambda line: subprocess.run(["sh", "-c", line], capture_output=True, text=True)


def again(done):
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("  see it again  ")]
    return line.removeprefix("  see it again  ")


@live
@pytest.mark.nightly
def test_cases_that_raise_exit_or_crash_are_named_and_the_others_are_proven(tmp_path, monkeypatch):
    package(tmp_path, **STORM)
    monkeypatch.chdir(tmp_path)
    done = command("somebody")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    told = {
        "somebody.b_exits": "it exited: sys.exit(None)",
        "somebody.c_dies": "it ended its process with exit code 0",
        "somebody.d_syntax": "SyntaxError",
        "somebody.e_number": "CASES must be a list of flax_attn.parity.Case objects",
        "somebody.f_raises": "RuntimeError: no such card",
        "somebody.h_text": "KeyError: 'width'",
        "mine[Raising|x=3x4|somebody.theirs.Half]": "OSError: no such card",
        "mine[Leaving|x=3x4|somebody.theirs.Half]": "it exited: sys.exit(None)",
        "mine[Dying|x=3x4|somebody.theirs.Half]": "it ended its process with exit code 0",
        "mine[Crashing|x=3x4|somebody.theirs.Half]": "its process was killed by SIGSEGV",
    }
    for name, what in told.items():
        (line,) = [line for line in lines if line.startswith(f"{name}: ")]
        assert what in line, line
    assert "mine.py, line" in next(x for x in lines if x.startswith("mine[Leaving"))
    assert "12 cases, 0 different, 10 not proven" in lines[-1], lines[-1]


@live
@pytest.mark.parametrize("kind", ["a package's", "a folder's"])
@pytest.mark.nightly
def test_the_printed_command_runs_again_for_any_name(kind, tmp_path, shell):
    text = f"{START}\n{LIST} = [case(Third, name={ODD!r}), case(Half, name='right')]"
    if kind == "a package's":
        package(tmp_path, cases=text)
        done = command("somebody")
    else:  # a file of tests in no package, as pytest has it
        package(tmp_path)
        (tmp_path / "tests" / "deep").mkdir(parents=True)
        file = tmp_path / "tests" / "deep" / "test_odd.py"
        file.write_text(text.replace("from .mine", "from somebody.mine"))
        run = "import sys, runpy; sys.path.insert(0, '.'); "
        run += f"runpy.run_path({str(file)!r})['{LIST}'][0].check()"
        done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
        done.stdout = done.stderr
    line = again(done)
    assert line.startswith("flax-attn parity " + ("somebody " if kind[2] == "p" else "tests.deep"))
    once_more = shell(f"{line} --html page.html")
    assert once_more.returncode == 1, once_more.stderr
    assert "1 case, 1 different" in once_more.stdout and again(once_more) == line
    assert (tmp_path / "page.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "text",
    [WAITS, pytest.param(SLOW, marks=[live, pytest.mark.nightly])],
    ids=["imports", "proves"],
)
def test_ctrl_c_stops_at_once_and_leaves_no_process(text, tmp_path, monkeypatch):
    """While a worker imports a list of cases, and while it proves one."""
    package(tmp_path, cases=text)
    monkeypatch.chdir(tmp_path)
    # A shell's background jobs ignore SIGINT, and so would all that they start.
    heard = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL)"
    line = [sys.executable, "-m", "flax_attn", "parity", "somebody"]
    line = [sys.executable, "-c", f"{heard}; os.execv(sys.argv[1], sys.argv[1:])", *line]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(line, **pipes, start_new_session=True)
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        assert run.poll() is None, run.communicate()
        time.sleep(0.1)
    worker = int((tmp_path / "started").read_text())
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130 and "stopped; nothing is proven" in out
    assert "Traceback" not in err, err
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


@pytest.mark.nightly
def test_constants_reach_the_comparison_and_the_golden(monkeypatch):
    from flax import nnx

    from flax_attn.parity.cases import case as module

    given = dict(reference="torch.nn.Linear", input=(4, 3), mask=(4, 4))
    case = Case(nnx.Linear, dict(in_features=3, out_features=2), constants=("mask",), **given)
    assert golden._request(case, "float64").constants == frozenset({"mask"})
    assert {*case.inputs} == {"input", "mask"}
    monkeypatch.setattr(module, "compare", lambda *modules, **options: options)
    monkeypatch.setattr(case, "torch_module", lambda: None)
    assert case.report(live=True)["constants"] == ("mask",)


@pytest.mark.nightly
def test_what_is_printed_of_our_own_runs_anywhere(shell):
    case = collect("parity_tests")[0]
    done = shell(f"{case.reproduce} --replay")
    assert case.reproduce == f"flax-attn parity '{case}'"
    assert done.returncode == 0 and "1 case, 0 different" in done.stdout, done.stderr


@live
def test_a_seed_of_its_own_is_printed_too(tmp_path, monkeypatch):
    package(tmp_path, cases=f"{START}\n{LIST} = [case(Half)]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (case,) = collect("somebody")
    assert "--seed" not in case.reproduce
    case.seed = 7
    assert case.reproduce.endswith(" --seed 7")


def judged(value, error=0.0, limit=1.0):
    """A report of one output: how far it is off, in units of what float64 may differ."""
    got = np.full(3, value)
    verdict = judge.same_function(got, got)
    if error:
        verdict = replace(verdict, error=error * verdict.limit, limit=limit * verdict.limit)
    return Report("here[n=1|x=3|torch.nn.Tanh]", (Row("output", "output", "float64", "", verdict),))


VERDICTS = {
    "equal": (judged(1.0), 0, 0),
    "equal as far as this input can tell": (judged(1.0, 5.0, 10.0), 0, 1),
    "nothing is proven": (judged(0.0), 1, 1),
    "DIFFERENT": (judged(1.0, 5.0), 1, 1),
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_the_table_says_what_is_shown_and_strict_takes_no_excuse(verdict, monkeypatch, capsys):
    report, loose, strict = VERDICTS[verdict]
    cases = [Listed("here", "here", 0, "here", "torch.nn.Tanh", report.title)]
    monkeypatch.setenv("COLUMNS", str(parity_command.WIDE))
    for options, code in (((), loose), (("--strict",), strict)):
        known_reports(monkeypatch, cases, [report])
        assert cli.main(["parity", "here", *options]) == code
        text = capsys.readouterr().out
        (row,) = [x for x in text.splitlines() if x.startswith("here ")]
        assert row.rstrip().endswith(f"  {verdict}")
        assert (f"\n{report.title}:" in text) == bool(code)
        assert ("1 different" in text) == (code == 1 and verdict != "nothing is proven")
        assert ("1 case, nothing is proven;" in text) == (verdict == "nothing is proven")


LINEAR = f"""
from flax import nnx
from flax_attn.parity import Case

{LIST} = [
    Case(nnx.Linear, dict(in_features=3, out_features=2), reference="torch.nn.Linear",
        flax_call=lambda m, input: m(input), input=(4, 3), dtypes=("float64",))
]
"""


@live
@pytest.mark.nightly
def test_a_golden_stays_with_the_cases_and_is_replayed_from_there(tmp_path, monkeypatch):
    import flax

    package(tmp_path, cases=LINEAR)
    monkeypatch.chdir(tmp_path)
    done = command("somebody", "--record")
    path = tmp_path / "somebody" / "goldens" / "linear.safetensors"
    assert done.returncode == 0 and f"recorded {path}" in done.stdout, done.stdout + done.stderr
    assert "goldens" not in os.listdir(os.path.dirname(flax.__file__))
    assert [x.name for x in path.parent.iterdir()] == ["linear.safetensors"]
    monkeypatch.syspath_prepend(tmp_path)
    (case,) = collect("somebody")
    assert golden.path_of(case) == path and case.report(live=False).ok
    for name, damage in DAMAGES.items():
        kept = path.read_bytes()
        damage(path)
        with pytest.raises(ParityError) as caught:
            case.report(live=False)
        text = str(caught.value)
        assert str(path) in text and "\n" not in text, (name, text)
        assert "run `flax-attn parity --record linear somebody`" in text
        assert "is damaged" in text or "is no recording" in text
        path.write_bytes(kept)
    DAMAGES["noise inside"](path)
    done = command("somebody", "multi_head", "--replay")
    assert done.returncode == 1 and f"{case}: {path} is damaged" in done.stdout, done.stdout
    assert " 1 not proven" in done.stdout and "multi_head " in done.stdout


DAMAGES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "cut off early": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no recording"),
    "another file": lambda path: write_file(path, {"weight": np.ones(3)}),
    "noise inside": lambda path: path.write_bytes(
        path.read_bytes()[:-160] + bytes(60) + path.read_bytes()[-100:]
    ),
}


def test_goldens_that_cannot_be_placed_or_written_are_refused(tmp_path, monkeypatch):
    from flax import nnx

    given = dict(reference="torch.nn.Linear", input=(4, 3))
    case = Case(nnx.Linear, dict(in_features=3, out_features=2), **given)
    assert case.home.file == __file__
    case.home = home.Home("__main__", "")
    with pytest.raises(ParityError, match=r"stand in no file, .* write their list CASES into"):
        golden.path_of(case)
    case.home = home.Home("somewhere", str(tmp_path / "cases.py"))
    (tmp_path / "goldens").write_text("not a folder")
    monkeypatch.setattr(golden, "_record_case", lambda case, *_: {})
    with pytest.raises(ParityError, match=r"linear.safetensors cannot be written: "):
        golden.record([case])


@pytest.mark.parametrize("size", [5, 500])
def test_what_is_kept_of_a_result_sees_all_of_it(size):
    """The other half of complex numbers, numbers beside fills, where the fills are, integers."""
    x = np.random.RandomState(0).standard_normal(size)
    least = np.finfo(np.float64).min
    beside = x.copy()
    beside[:2], beside[-1] = least, least
    moved, other = beside.copy(), np.roll(beside, 1)
    moved[2] += 1.0
    pairs = [
        (x + 1j * x, x - 1j * x),
        (beside, moved),
        (beside, other),
        (np.arange(size), np.arange(size) % (size - 1)),
    ]
    for one, two in pairs:
        kept = [sketch("output", array, "float64") for array in (one, two, one.copy())]
        assert kept[0].size <= SKETCH and np.isfinite(kept[0]).all()
        assert not judge.same_function(kept[0], kept[1]).ok
        assert judge.exact(kept[0], kept[2]).ok


@pytest.mark.nightly
def test_our_own_goldens_stay_with_the_library():
    for case in collect("parity_tests"):
        path = golden.path_of(case)
        assert path == home.LIBRARY / "flax_attn" / "goldens" / f"{case.variant}.safetensors"
        assert path.exists()
