"""Ctrl-C: what was proven or measured before is printed and written, the rest is named."""

import json
import os
import signal
import subprocess
import sys

import pytest

from flax_attn.bench import attention, race, reader
from flax_attn.command import cli, parity_command, proving
from flax_attn.parity.cases import markdown
from flax_attn.parity.cases.collect import Listed
from parity_tests import real
from parity_tests.core.bench.conftest import known_machine  # noqa: F401
from parity_tests.core.parity.in_process import known_reports
from parity_tests.core.parity.test_command import judged

NAMES = ("alpha", "alpha", "beta", "beta", "gamma")
signal.signal(signal.SIGINT, signal.default_int_handler)  # also under `nohup pytest &`
PAGE = "<!-- certificate -->\n{}<!-- end of certificate -->\n"


def place(at, variant):
    title = f"{variant}[d_in={at}|x=2x3|torch_ref.{variant.title()}]"
    facts = (variant, f"torch_ref.{variant.title()}", title, "", variant.title())
    return Listed("parity_tests", "parity_tests.test_x", at, *facts)


def signalled(reports):
    """The reports, and then a real Ctrl-C to this process."""
    yield from reports
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the signal was not heard")


@pytest.fixture
def stopped(monkeypatch):
    """The command on five cases of three variants, that gets Ctrl-C after some of them."""

    def run(*options, after=3):
        cases = [place(at, name) for at, name in enumerate(NAMES)]
        known_reports(monkeypatch, cases, signalled([judged(1.0)] * after))
        return cli.main(["parity", *options])

    monkeypatch.setattr(parity_command, "has_torch", lambda: True)
    monkeypatch.setattr(proving, "_page_facts", lambda *_: pytest.fail("it went on"))
    return run


def test_what_is_proven_is_shown_and_what_is_missing_named(stopped, capsys):
    assert stopped("x") == 130
    text = capsys.readouterr().out
    shown = [line.split()[0] for line in text.splitlines() if line.rstrip().endswith("equal")]
    assert shown == ["alpha", "beta"]
    last = text.splitlines()[-1]
    assert last.startswith("interrupted: 3 of 5 cases were proven; missing: ")
    assert last.endswith("beta (1 case), gamma (1 case)")


def test_a_second_ctrl_c_changes_nothing(stopped, monkeypatch, capsys):
    monkeypatch.setattr(
        parity_command, "_write_files", lambda *_: [os.kill(os.getpid(), signal.SIGINT) or "last"]
    )
    assert stopped("x") == 130 and capsys.readouterr().out.endswith("last\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_json_and_html_hold_the_missing_cases_as_not_proven(stopped, tmp_path):
    files = tmp_path / "all.json", tmp_path / "all.html"
    assert stopped("x", "--json", str(files[0]), "--html", str(files[1])) == 130
    entries = json.loads(files[0].read_text())
    assert [entry["ok"] for entry in entries] == [True] * 3 + [False] * 2
    missing = [entry for entry in entries if not entry["ok"]]
    assert [entry["title"] for entry in missing] == [
        place(3, "beta").title,
        place(4, "gamma").title,
    ]
    assert all("interrupted" in entry["notes"][0] for entry in missing)
    page = files[1].read_text("utf-8")
    assert "Nothing</b> is proven by 2 of 5 cases" in page and "interrupted before" in page


def rows_on(path):
    return markdown.rows(markdown.MARKS.search(path.read_text())["table"])


def row(name, reference, backends="auto", error="1.0e-9"):
    cells = (name, reference, backends, "2 x 4", "1", error, "-", "-", "-", "-", "equal")
    return dict(zip(markdown.HEADINGS, cells, strict=True))


def page_of(*rows):
    return markdown._markdown.table(markdown.HEADINGS, [[*cells.values()] for cells in rows])


def test_a_page_loses_no_row_and_only_whole_ones_change(stopped, tmp_path, capsys):
    path = tmp_path / "page.md"
    before = [row(name, f"torch_ref.{name}") for name in ("Alpha", "Beta", "Other")]
    path.write_text(PAGE.format(page_of(*before)))
    for options in (["x"], ["--all"]):
        assert stopped(*options, "--markdown", str(path)) == 130
        found = rows_on(path)
        assert [*found] == ["Alpha", "Beta", "Other"]
        assert found["Beta"] == [*before[1].values()] and found["Other"] == [*before[2].values()]
        assert found["Alpha"][2:4] == ["auto", "2 x 4"] and found["Alpha"][5] != "1.0e-9"
        assert "others are as before" in " ".join(capsys.readouterr().out.split())


def test_a_row_that_named_more_references_stays(stopped, tmp_path):
    path = tmp_path / "page.md"
    before = row("Alpha", "torch.nn.Alpha; torch_ref.Alpha")
    path.write_text(PAGE.format(page_of(before)))
    assert stopped("x", "--markdown", str(path)) == 130
    assert rows_on(path)["Alpha"] == [*before.values()]


def test_a_page_without_marks_keeps_its_rows_or_its_text(stopped, tmp_path, capsys):
    path = tmp_path / "table.md"
    path.write_text(page_of(row("Other", "torch_ref.Other")))
    assert stopped("x", "--markdown", str(path)) == 130
    assert [*markdown.rows(path.read_text())] == ["Alpha", "Other"]
    path.write_text("my notes\n")
    assert stopped("x", "--markdown", str(path)) == 130
    assert path.read_text() == "my notes\n" and "is as before" in capsys.readouterr().out
    path.unlink()
    assert stopped("x", "--markdown", str(path)) == 130
    assert [*markdown.rows(path.read_text())] == ["Alpha"]


@pytest.mark.parametrize("options", [("x",), ()])
def test_before_the_first_proof_nothing_is_written(options, stopped, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flax_attn.parity.cases.prove.FIXED", NAMES[::2])
    path = tmp_path / "all.json"
    assert stopped(*options, "--json", str(path), after=0) == 130
    assert "stopped; nothing is proven" in capsys.readouterr().out and not path.exists()


def test_the_fixed_set_is_interrupted_too(stopped, monkeypatch, capsys):
    monkeypatch.setattr("flax_attn.parity.cases.prove.FIXED", ("alpha", "beta", "gamma"))
    assert stopped(after=2) == 130
    text = capsys.readouterr().out
    assert "2 of 3 cases were proven; missing: gamma (1 case)" in text and "Not tried" not in text


def test_other_kinds_of_runs_are_interrupted_too(stopped, monkeypatch, capsys):
    monkeypatch.setattr(proving, "_machine", lambda *_: proving.Machine("cpu", "cpu", 1))
    proof = ("alpha", "torch_ref.Alpha", judged(1.0))
    monkeypatch.setattr(real, "rows", lambda _: signalled([proof]))
    assert cli.main(["parity", "--real"]) == 130
    assert f"interrupted: 1 of {real.TOTAL} cases" in capsys.readouterr().out
    assert stopped("x", "--devices", "2", after=1) == 130
    assert "interrupted: 1 of 5 cases" in capsys.readouterr().out


def test_bench_names_what_it_did_not_measure(tmp_path, monkeypatch, capsys, known_machine):  # noqa: F811
    done = race.Race.run

    def run(self, task, rows, notify=None):
        if task.length == 12:
            os.kill(os.getpid(), signal.SIGINT)
        done(self, task, rows)

    monkeypatch.setattr(race.Race, "run", run)
    monkeypatch.setattr(attention, "others", list)
    path = tmp_path / "kept.json"
    sizes = ["--seq", "6,12,24", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "2"]
    assert cli.main(["bench", *sizes, "--no-grad", "--causal", "--json", str(path)]) == 130
    text = capsys.readouterr().out
    kept = reader.read(path)
    assert [row.cells["T"] for row in kept.rows] == ["6"] and not kept.complete
    assert [line.split(",")[0] for line in kept.missing] == ["T 12", "T 24"]
    one = "T 12, B x N 2 x 3, fwd, head width 4, causal, float32"
    assert f"Not finished: {one}; T 24" in " ".join(text.split())


CHILD = """
import os, signal, sys
from flax_attn.command import cli, proving
from flax_attn.parity.cases.workers import Workers
first = Workers.as_completed
def as_completed(self, work, items):
    for result in first(self, work, items):
        yield result
        if work is proving.prove:
            os.kill(os.getpid(), signal.SIGINT)
Workers.as_completed = as_completed
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_process_with_workers_ends_with_what_it_has(tmp_path):
    """A worker is at work when the signal comes; it proves against recorded results."""
    (tmp_path / "child.py").write_text(
        f"if __name__ == '__main__':\n{CHILD}".replace("\n", "\n    ")
    )
    line = [sys.executable, str(tmp_path / "child.py"), "parity", "uniform_causal_average"]
    run = subprocess.run([*line, "--replay", "--no-cache"], capture_output=True, text=True)
    assert run.returncode == 130, run.stderr
    text = " ".join(run.stdout.split())
    assert "interrupted: 1 of " in text and "missing: uniform_causal_average (" in text
