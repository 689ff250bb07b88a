"""The command without names: its fixed set, what it never claims, its table, files and start."""

import errno
import os
import re
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from flax_attn import CausalAttention
from flax_attn.command import cli, parity_command, proving
from flax_attn.parity import Case, ParityError
from flax_attn.parity.cases import cache, certificate, prove, workers
from flax_attn.parity.cases.collect import Listed, listed, modules
from flax_attn.parity.cases.prove import (
    CLIMB,
    FIXED,
    ORIGINALS,
    Job,
    jobs,
    not_proven,
    short,
)
from flax_attn.parity.cases.strict import CACHE, MODES, WARNINGS, strict
from flax_attn.parity.cases.workers import Failure, Workers, attempt

from .in_process import known_reports
from .test_command import judged

ROOT = Path(__file__).parents[3]
OURS = "parity_tests"
CAUSAL = Listed("parity_tests", "parity_tests.test_causal_attention", 0, "", "", "")
LIST = "CAS" + "ES"  # in pieces, so that this file is none that holds cases
WITNESSES = ("torch_ref.TransformerMultiHeadAttention", "torch.nn.functional.scaled_dot_product")


def place(at=0, variant="linear", reference=WITNESSES[0]):
    return Listed("here", "here", at, variant, reference, f"{variant}[{at}|{reference}]")


def command(*arguments, **options):
    line = [sys.executable, "-m", "flax_attn", *arguments]
    return subprocess.run(line, capture_output=True, text=True, **options)


@pytest.mark.nightly
def test_the_fixed_set_is_of_cases_that_exist_and_holds_the_climb_whole():
    every = jobs([case for name in modules(OURS) for case in listed((OURS, name))], live=True)
    chosen = short(every)
    assert [job.listed.variant for job in chosen] == [*FIXED]  # one job for each name
    assert FIXED[: len(CLIMB)] == CLIMB and len({*FIXED}) == len(FIXED)
    assert {job.listed.variant: job.listed.reference for job in chosen}.items() >= ORIGINALS.items()
    assert all(job.listed.reference.startswith(("torch.", "torch_ref.")) for job in chosen)
    assert all("float64" in job.case.dtypes for job in chosen)


def test_the_front_page_says_how_many_layers_the_fixed_set_has():
    readme = (ROOT / "README.md").read_text("utf-8")
    every = [*(ROOT / "flax_attn/layers").glob("[!_]*.py")]
    assert f"# a minute: {len(FIXED)} of {len(every)} layers, " in readme


def test_the_short_proof_takes_the_first_case_of_each_name_in_the_order_of_the_set():
    places = [place(i, v, w) for v in ("new", *FIXED[::-1]) for w in WITNESSES for i in (0, 1)]
    last = ("transformer_multi_head", "torch.nn.MultiheadAttention")
    places += [place(i, *last) for i in (0, 1)]
    chosen = short(jobs(places, live=True, seed=3))
    assert [job.listed.variant for job in chosen] == [*FIXED]
    assert all(job.short and not job.eager and job.live and job.seed == 3 for job in chosen)
    assert {job.listed.at for job in chosen} == {0}
    assert {job.listed.reference for job in chosen} == {WITNESSES[0], last[1]}


def test_a_short_job_is_one_dtype_and_leaves_the_case_as_it_was():
    whole = Job(CAUSAL, True, True).case
    assert Job(CAUSAL, True, False, short=True).case.dtypes == ("float64",)
    assert len(whole.dtypes) == 3 and Job(CAUSAL, True, True).case.dtypes == whole.dtypes


def test_a_seed_that_is_asked_for_draws_other_numbers():
    plain, other = Job(CAUSAL, True, True).case, Job(CAUSAL, True, True, seed=5).case
    assert (plain.seed, other.seed) == (0, 5) and other.reproduce.endswith(" --seed 5")
    mine, theirs = plain.arrays(), other.arrays()
    assert mine.keys() == theirs.keys()
    assert not any(np.array_equal(mine[name], theirs[name]) for name in mine)


def everything(monkeypatch, reports, more=0):
    """The command without names, on lines of one case each whose reports are known.

    `more` is a number of cases that the fixed set does not have.
    """
    names = [f"v{i}" for i in range(len(reports) + more)]
    monkeypatch.setattr(prove, "FIXED", names[: len(reports)])
    known_reports(monkeypatch, [place(0, name) for name in names], reports)
    monkeypatch.setenv("COLUMNS", "80")


def test_the_short_proof_says_what_it_is(monkeypatch, capsys):
    everything(monkeypatch, [judged(1.0), judged(1.0)], more=3)
    assert cli.main(["parity"]) == 0
    _, first, second, *table, left, foot = capsys.readouterr().out.splitlines()
    lines = [f"{n} of 2, equal: {place(0, f'v{n - 1}').title}" for n in (1, 2)]
    assert [first, second] == lines
    told = "Not tried: 5 more cases of 3 variants, float32 and bfloat16; --all proves them."
    assert left == told
    assert foot.startswith("2 variants, 2 cases, 0 different; torch ")
    assert len([line for line in table if line.rstrip().endswith("equal")]) == 2
    assert not any(word in line for line in table for word in ("--all", "float32", "v2"))


NOTHING = [(), ("--all",), ("here",), ("--replay",), ("--devices", "2"), ("--real",)]
NOTHING += [("--families",)]


@pytest.mark.parametrize("tried", [0, 2])
@pytest.mark.parametrize("options", NOTHING, ids=" ".join)
def test_nothing_proven_is_exit_status_1_and_never_no_difference(
    options, tried, monkeypatch, capsys
):
    everything(monkeypatch, [Failure("it is not recorded")] * tried)
    proofs = [("here", "torch.nn.Tanh", not_proven("here[0]", "it is not there"))] * tried

    def found(*arguments):
        results = arguments[-2]
        results.add(proofs)
        results.about["here"] = proving.PageFacts("Here")

    monkeypatch.setattr(parity_command, "has_torch", lambda: True)
    monkeypatch.setattr(proving, "real", found)
    monkeypatch.setattr(proving, "families", found)
    assert cli.main(["parity", *options]) == 1
    text = capsys.readouterr().out
    assert ", nothing is proven; torch " in text.splitlines()[-1] and "different" not in text


@pytest.mark.parametrize("options", [(), ("--all",), ("--markdown", "t.md"), ("here",)])
def test_a_difference_is_exit_status_1_in_the_short_proof_too(
    options, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    everything(monkeypatch, [judged(1.0), judged(1.0, 5.0)])
    monkeypatch.setattr(proving, "_page_facts", lambda *_: {})
    assert cli.main(["parity", *options]) == 1
    text = capsys.readouterr().out
    assert "1 different" in text and ("Not tried: " in text) == (not options)


def test_a_process_that_has_done_much_is_replaced(monkeypatch):
    me = "__import__('os').getpid()"  # a function of this file's would bring jax to the workers
    with Workers() as some:
        assert some.call(eval, me) == some.call(eval, me) != os.getpid()
        before = some.call(eval, me)
        monkeypatch.setattr(workers, "MAX_ITEMS", 4)
        assert some.call(eval, me) == before != some.call(eval, me) and len(some._started) == 1


def shown(width, *, colour=True, reports=None):
    """The table of one line for each verdict, as a terminal gets it."""
    reports = reports or [judged(1.0), judged(1.0, 5.0), judged(1.0, 5.0, 10.0), judged(0.0)]
    names = ("simplified_self_attention", "grouped_query", "linear", "luong")
    proofs = [(n, w, r) for n, r in zip(names, reports, strict=True) for w in WITNESSES]
    lines = certificate.lines(proofs)
    out = StringIO()
    options = {"force_terminal": colour, "color_system": "standard" if colour else None}
    console = Console(file=out, width=192, soft_wrap=True, **options)
    console.print(certificate.table(lines, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_table_fits_the_terminal_and_nothing_is_left_out(width):
    text = shown(width, colour=False)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    end = text.splitlines()[0].index("params")  # of the names
    names = "".join("".join(line[:end] for line in text.splitlines()).split())
    for word in (*WITNESSES, "simplified_self_attention"):
        assert word in names or width >= 160
    assert text.count("DIFFERENT") == 2


def test_a_line_of_several_cases_shows_the_worst_verdict():
    reports = [judged(1.0), judged(1.0, 5.0, 10.0), judged(0.0), judged(1.0, 5.0)]
    for number, worst in enumerate(reports, start=1):
        (line,) = certificate.lines([("luong", "w", report) for report in reports[:number]])
        assert line.shown_verdict == line.cells()[-1] == worst.verdict


def test_equal_is_green_a_difference_red_and_nothing_else_is_coloured():
    text = shown(160)
    coloured = re.findall("\x1b\\[(3[0-9])m([^\x1b]*)", text)
    assert {(code, word.strip()) for code, word in coloured} == {
        ("32", "equal"),
        ("31", "DIFFERENT"),
        ("31", "nothing is proven"),
    }
    assert "\x1b" not in shown(160, colour=False)


OUTPUTS = {
    ("--html", "nowhere/page.html"): "there is no folder nowhere to write into.",
    ("--json", "folder"): "takes a file to write; 'folder' is a folder.",
    ("--markdown", "file/table.md"): "there is no folder file to write into.",
}


@pytest.mark.parametrize("options", OUTPUTS, ids=" ".join)
def test_files_that_cannot_be_written_are_refused_before_the_work(
    options, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(proving, "proven", lambda *_: pytest.fail("it went to work"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    assert cli.main(["parity", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"flax-attn parity: {options[0]}") and OUTPUTS[options] in line


def test_a_file_that_may_not_be_written_is_refused(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.html"
    page.write_text("")

    def refused(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(cli, "does_not_fit", str)  # which opens files too
    monkeypatch.setattr(Path, "open", refused)
    assert cli.main(["parity", "--html", str(page)]) == 2
    assert capsys.readouterr().err.endswith("page.html cannot be written: permission denied.\n")


@pytest.mark.parametrize("other", ["linear", "--real"])
def test_all_takes_nothing_that_is_proven_whole_anyway(other, capsys):
    assert cli.main(["parity", "--all", other]) == 2
    assert "are proven whole without it" in capsys.readouterr().err


QUICK = {
    "--help": (0, "parity"),
    "--version": (0, "flax-attn 0"),
    "parity --help": (0, "--no-cache"),
    "explain --help": (0, "--mask"),
    "parity CausalAtention": (2, "did you mean CausalAttention"),
    "parity caes.py": (2, "There is no file caes.py"),
}


@pytest.mark.parametrize("line", QUICK)
def test_commands_without_computation_do_not_import_jax(line):
    code = "import sys, atexit; from flax_attn.command.cli import main; "
    code += "atexit.register(lambda: print(*sorted({'jax', 'flax', 'torch'} & {*sys.modules}))); "
    code += "sys.exit(main(sys.argv[1:]))"
    run = subprocess.run(
        [sys.executable, "-c", code, *line.split()], capture_output=True, text=True
    )
    status, told = QUICK[line]
    assert run.returncode == status and told in run.stdout + run.stderr
    assert run.stdout.splitlines()[-1] == ""


NAMES = ("random", "inspect", "socket", "tempfile", "typing", "pickle", "queue", "cli", "jax")


@pytest.mark.nightly
def test_files_here_named_like_modules_change_nothing_and_a_package_here_is_found(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s own {name}')")
    for name in ("torch_ref", "flax_attn", "somebody"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"{LIST} = []")
    more = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    told = "somebody holds no case: "
    script = "import sys; sys.path.pop(0); from flax_attn.command.cli import main; sys.exit(main())"
    line = [sys.executable, "-c", script, "parity", "somebody"]  # as an installed command has it
    run = subprocess.run(line, capture_output=True, text=True, **more)
    assert run.returncode == 2 and told in run.stderr, run.stderr
    (tmp_path / "flax_attn" / "__init__.py").unlink()  # else `python -m` itself would run that one
    (tmp_path / "flax_attn").rmdir()
    run = command("parity", "somebody", **more)
    assert run.returncode == 2 and told in run.stderr, run.stderr


def test_strict_modes_are_those_of_the_suite():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    said = settings["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert said == [WARNINGS, f"ignore:{CACHE}"]
    import jax

    assert {name: getattr(jax.config, name) for name in MODES} == MODES
    with strict(), pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


@pytest.mark.parametrize("ours", [True, False])
def test_a_case_of_ours_is_proven_in_strict_modes_and_no_other(ours, monkeypatch):
    job = Job(CAUSAL, live=False, eager=False)
    monkeypatch.setattr(Case, "report", lambda self, live, eager: warnings.warn("x", stacklevel=1))
    case = job.case
    monkeypatch.setattr(type(case.home), "is_own", lambda *_: ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if ours:
            with pytest.raises(UserWarning):
                proving.prove(job)
        else:
            proving.prove(job)


def test_a_case_passes_if_its_input_can_tell_and_nothing_differs(monkeypatch):
    case = Case(CausalAttention, {}, x=(3, 4))
    reports = [judged(1.0), judged(1.0, 5.0, 10.0), judged(0.0), judged(1.0, 5.0)]
    for report in reports:
        monkeypatch.setattr(Case, "report", lambda self, report=report: report)
        if report.verdict == "equal":
            case.check()
        else:
            with pytest.raises(ParityError) as refused:
                case.check()
            assert refused.value.report is report


def test_a_case_without_a_witness_must_be_of_our_own():
    told = 'Case(Linear) needs reference="package.Class"; only flax_attn\'s own layers have twins.'
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        Case(nnx.Linear, {}, x=(3, 4))
    case = Case(CausalAttention, {}, x=(3, 4))
    assert case.reference == "torch_ref.causal_attention.CausalAttention"


def test_compiled_programs_are_kept_in_the_users_folder_unless_told_otherwise(
    tmp_path, monkeypatch
):
    monkeypatch.delenv(cache.CHOSEN, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    settings = cache.cache_settings()
    where = Path(settings[cache.CHOSEN])
    assert where.is_dir() and where.parent == tmp_path / "flax_attn" / "xla"
    assert cache.cache_settings(wanted=False) == {}
    monkeypatch.setenv(cache.CHOSEN, "elsewhere")
    assert cache.cache_settings() == {}
    monkeypatch.delenv(cache.CHOSEN)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cache.cache_settings() == {}
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder().is_relative_to(tmp_path) or sys.platform == "win32"


def test_the_cache_of_programs_is_bounded_and_drops_the_oldest(tmp_path):
    for i in range(5):
        file = tmp_path / f"machine{i % 2}" / str(i)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(10))
        os.utime(file, (i, i))
    cache.prune(tmp_path, 50)
    assert len([*tmp_path.rglob("[0-9]")]) == 5
    cache.prune(tmp_path, 25)
    assert {path.name for path in tmp_path.rglob("[0-9]")} == {"3", "4"}


def test_settings_reach_the_workers():
    with Workers(settings={"FLAX_ATTN_TOLD": "yes"}) as some:
        assert some.call(os.getenv, "FLAX_ATTN_TOLD") == "yes"
        assert some.call(os.getenv, workers.SAFE) is None
    assert "FLAX_ATTN_TOLD" not in os.environ


def leave(_):
    raise SystemExit(3)


def stumble(number):
    if number == 2:
        os._exit(5)
    return number * 10


def broken_by(number):
    """1 leaves a thread that ends the process while 2 is at work."""
    if number == 1:
        threading.Timer(0.2, os._exit, [6]).start()
    elif number == 2:
        time.sleep(1)
    return os.getpid()


def test_a_crashed_worker_costs_one_result():
    with Workers(2) as workers:
        for _ in range(2):
            found = list(workers.map(stumble, list(range(5))))
            assert found[:2] + found[3:] == [0, 10, 30, 40]
            assert found[2] == Failure("it ended its process with exit code 5")
    result = attempt(leave, None)
    assert isinstance(result, Failure) and "it exited: sys.exit(3)" in result.text


def test_a_crash_is_reported_for_the_job_that_caused_it():
    with Workers() as workers:
        first, second = workers.map(broken_by, [1, 2])
    assert isinstance(first, int) and isinstance(second, int) and first != second


def wait_for_the_last(work):
    number, file = work
    if number == 3:
        file.touch()
    while number == 0 and not file.exists():
        time.sleep(0.05)


def test_results_come_as_they_end(tmp_path):
    work = [(number, tmp_path / "done") for number in range(4)]
    with Workers(2) as workers:
        order = [i for i, _ in workers.as_completed(wait_for_the_last, work)]
    assert order[:2] == [1, 2] and {*order[2:]} == {0, 3}
