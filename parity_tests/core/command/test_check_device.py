"""`flax-attn check-device`: what it leaves if all goes well, if time is over, if a part breaks."""

import json
import time
from argparse import Namespace
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from flax_attn._internal.progress import Progress
from flax_attn.backends import BACKENDS
from flax_attn.bench.attention import Attention
from flax_attn.bench.result import Results, Row
from flax_attn.command import check_device_command as command
from flax_attn.device_check import page, replay, requests
from flax_attn.device_check.part import Part, rows_of
from flax_attn.device_check.random_requests import MASKS, SCORES, draw_request
from flax_attn.parity.cases.collect import Listed
from flax_attn.parity.cases.workers import Failure, LastResult, Workers
from parity_tests.core.backends.refusal import told

MACHINE = {
    "platform": "gpu",
    "device": "NVIDIA H100 80GB HBM3",
    "processor": "x",
    "cores": 16,
    "python": "3.12.3",
    "versions": {"jax": "0.11.2"},
    "peak_flops": {"bfloat16": 7e14},
    "devices": 1,
    "memory": 2**36,
    "load": 0.0,
}


def part(out: Path, name: str, seconds: float = 60.0) -> Part:
    return Part(out, name, time.time() + seconds, small=True)


def checked(out: Path, **options) -> int:
    options = {"minutes": None, "small": True, "only": None, **options, "out": str(out)}
    console = Console()
    with Progress("flax-attn check-device", console) as progress:
        return command.check_device(Namespace(**options), console, progress)


# Time.


def test_parts_without_time_are_listed(tmp_path):
    late = part(tmp_path, "layers", -1.0)
    assert list(late.in_time([5, 6, 7], 3, "things")) == [5]
    assert [row["what"] for row in rows_of(tmp_path, "layers")] == ["2 of 3 things"]
    early = part(tmp_path, "memory")
    assert list(early.in_time([5, 6, 7], 3, "things")) == [5, 6, 7]
    assert rows_of(tmp_path, "memory") == []


def test_shares_of_parts_that_end_early_go_to_the_others(tmp_path):
    parts = command._parts(["layers", "speed", "memory"], tmp_path, time.time() + 100, False)
    lengths = [each.seconds_left for each in parts]
    assert 40 < lengths[0] < 50 and 65 < lengths[1] < 75 and 95 < lengths[2] <= 100


def test_a_part_that_is_late_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "GRACE_SECONDS", 0.0)
    begun = time.monotonic()
    command._run(part(tmp_path, "layers", 0.2))
    assert time.monotonic() - begun < 5
    (row,) = rows_of(tmp_path, "layers")
    assert row["verdict"] == "left out" and "still at work" in row["reason"]


def test_a_part_that_crashes_is_reported_and_its_log_kept(tmp_path):
    part(tmp_path, "machine").write(platform="cpu")
    command._run(part(tmp_path, "nothing of that name"))
    (row,) = rows_of(tmp_path, "nothing of that name")
    assert row["verdict"] == "failed" and "exit code 1" in row["text"]
    assert "KeyError" in (tmp_path / command.LOG).read_text()


def test_a_line_that_was_cut_off_is_no_row(tmp_path):
    (tmp_path / "layers.jsonl").write_text('{"verdict": "equal"}\n{"verd')
    assert rows_of(tmp_path, "layers") == [{"verdict": "equal"}]


# What is asked.


def test_what_is_asked_wrongly_is_refused_before_anything_runs(tmp_path):
    with told(ValueError, "--minutes takes a number above 0", "-1"):
        checked(tmp_path / "a", minutes=-1.0)
    with told(ValueError, "--only has no part 'sped'", "speed"):
        checked(tmp_path / "b", only="sped")
    (tmp_path / "file").write_text("")
    with told(ValueError, "cannot be made a folder"):
        checked(tmp_path / "file")
    with told(ValueError, "is not empty", "a new folder"):
        checked(tmp_path)


@pytest.mark.parametrize(
    ("layers", "requests", "code", "words"),
    [(0, 1, 2, "no layer;"), (1, 1, 2, "1 of 4 layers;"), (2, 0, 2, "no request;"), (2, 1, 0, "")],
)
def test_a_check_that_tried_too_little_is_no_success(
    tmp_path, monkeypatch, capsys, layers, requests, code, words
):
    equal = {"dtype": "float32", "verdict": "equal", "share": 0.1}

    def run(part):
        for i in range(layers if part.name == "layers" else 0):
            part.write(layer=str(i), of=4, all=48, case="0", **equal)
        for i in range(requests if part.name == "requests" else 0):
            part.write(request=i, of=8, backend="reference", words="CAUSAL", **equal)
        part.leave_out("the rest")

    monkeypatch.setattr(command, "_run", run)
    assert checked(tmp_path / "check") == code
    text = " ".join(capsys.readouterr().out.split())
    assert ("Too little was tried: " + words in text) == (code == 2)
    assert (f"{layers} of 48 layers" if layers else "layers nothing was tried") in text


# Right and wrong.


def test_requests_of_a_seed_are_the_same_and_of_every_kind():
    some = [draw_request(i) for i in range(requests.COUNT)]
    assert [x.words for x in some] == [draw_request(i).words for i in range(requests.COUNT)]
    assert all(any(name in x.words for x in some) for name in (*MASKS, *SCORES, "sinks", "dropout"))
    assert {x.dtype for x in some} == {"bfloat16", "float16", "float32"}
    for i in (0, 7):
        first, again = draw_request(i).arrays(), draw_request(i).arrays()
        assert all(np.array_equal(first[name], again[name]) for name in first)


@pytest.mark.nightly
def test_a_backend_that_is_off_is_called_different(monkeypatch):
    """And one that is right equal, in the same row of requests."""
    right = requests.computed

    def off(asked, arrays, backend):
        results = right(asked, arrays, backend)
        return {**results, "v": results["v"] * 1.1} if backend == "blockwise" else results

    monkeypatch.setattr(requests, "computed", off)
    rows = {row["backend"]: row for row in requests._checked(requests.Item(1, True))}
    assert rows.keys() == BACKENDS.keys()
    assert rows["blockwise"]["verdict"] == "different"
    assert "gradient of v is off" in rows["blockwise"]["text"]
    assert rows["reference"]["verdict"] == "equal" and rows["cudnn"]["verdict"] == "refuses"


class Once:
    """Workers that do the work here."""

    def __init__(self, most=1):
        self.at_work = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, work, item):
        assert not self.at_work  # else it would take what others are waiting for
        result = work(item)
        return result.result if isinstance(result, LastResult) else result

    def map(self, work, items):
        for item in items:
            result = self.call(work, item)
            self.at_work = True
            yield result
            self.at_work = False


@pytest.mark.nightly
def test_a_backend_that_breaks_the_device_is_not_blamed_on_the_next(tmp_path, monkeypatch):
    right = requests.computed

    def breaks(asked, arrays, backend):
        if backend == "blockwise":
            raise RuntimeError("an illegal memory access")
        return right(asked, arrays, backend)

    monkeypatch.setattr(requests, "computed", breaks)
    result = requests._checked(requests.Item(0, True))
    assert isinstance(result, LastResult) and result.result[-1]["untried"] == [
        "autodiff",
        "reference",
    ]
    rest = requests._checked(requests.Item(0, True, ("reference",)))
    assert [(row["backend"], row["verdict"]) for row in rest] == [("reference", "equal")]

    monkeypatch.setattr(requests, "Workers", Once)
    monkeypatch.setattr(requests, "FEW", 1)
    requests.run(part(tmp_path, "requests"))
    verdicts = {row["backend"]: row["verdict"] for row in rows_of(tmp_path, "requests")}
    assert verdicts["blockwise"] == "failed" and verdicts["reference"] == "equal"
    assert verdicts.keys() == BACKENDS.keys()
    assert not any("untried" in row for row in rows_of(tmp_path, "requests"))


def test_a_worker_that_returns_its_last_result_is_not_reused():
    with Workers() as workers:
        before = active_children()
        assert workers.call(LastResult, 5) == 5 and active_children() == before, "its memory stays"
        assert workers.call(abs, -2) == 2 and len(workers._idle) == 1


def test_one_case_of_each_layer_comes_first():
    cases = [Listed("p", "m", i, name, "w", f"{name}{i}") for i, name in enumerate("aabbc")]
    assert [case.title for case in replay.in_order(cases)] == ["a0", "b2", "c4", "a1", "b3"]


def test_a_case_that_was_never_recorded_in_a_dtype_is_no_row(tmp_path):
    case = Listed("p", "m", 0, "a", "w", "a[0]")
    for result in (None, Failure("it broke")):
        replay.write(part(tmp_path, "layers"), case, "bfloat16", {"of": 1, "all": 1}, result)
    (row,) = rows_of(tmp_path, "layers")
    assert (row["verdict"], row["text"], row["layer"]) == ("failed", "it broke", "a")


# The page.


def write_all(out: Path) -> None:
    """What a machine may have left."""
    part(out, "machine").write(**MACHINE)
    layers = part(out, "layers")
    case = {"of": 4, "all": 48, "dtype": "float32", "verdict": "equal"}
    layers.write(layer="cross", case="cross[0]", share=0.3, **case)
    layers.write(layer="t5", case="t5[0]", share=0.4, **case)
    layers.leave_out("3 of 5 recorded results")
    some = part(out, "requests")
    row = {"request": 0, "of": 60, "words": "CAUSAL", "dtype": "bfloat16"}
    some.write(**row, backend="blockwise", verdict="equal", share=0.1)
    some.write(**row, backend="splash", verdict="refuses", text="needs a TPU")
    task = Attention(4096, 128, 16, 1, "bfloat16")
    rows = [Row.of(task, name, name) for name in ("flax_attn", "torch")]
    for row, time_of_one in zip(rows, (2e-4, 4e-4), strict=True):
        row.status, row.seconds = "timed", [time_of_one] * 6
    Results("t", "c", MACHINE, rows, complete=True, wanted=1).write(out / "speed.json")
    memory = [replace(row, seconds=[], status="measured") for row in rows]
    for row in memory:
        row.figures = {"temporary": 2**20, "bytes": 1}
    Results("t", "c", MACHINE, memory, missing=["one"], wanted=2).write(out / "memory.json")


def test_the_screen_and_the_report_tell_all_parts(tmp_path):
    write_all(tmp_path)
    assert page.heading(tmp_path).startswith("NVIDIA H100 80GB HBM3, 64 GiB of memory; Python 3.12")
    names = ["layers", "requests", "speed", "decoding", "memory"]
    assert page.summary(tmp_path, names) == [
        ("layers", "2 of 48 layers: 2 equal; largest error 0.40 of its limit"),
        ("requests", "1 of 60 requests: 1 equal, 1 not served; largest error 0.10 of its limit"),
        ("speed", "1 of 1 tasks; T 4096, B x N 1 x 16, fwd: flax_attn 200 us, torch 2x slower"),
        ("decoding", "nothing was tried"),
        ("memory", "1 of 2 tasks; T 4096, B x N 1 x 16, fwd: flax_attn 1 MiB, torch 1x level"),
    ]
    text = page.markdown(tmp_path, names, "Everything that was tried is equal.")
    for words in (
        "**Everything that was tried is equal.**",
        "| float32 | 2 | 0 | 0 | 0 | 0.40 |",
        "| blockwise | bfloat16 | 1 | 0 | 0 | 0 | 0.10 |",
        "| 4096 | 1 x 16 | fwd | flax_attn | 200 us |",
        "* 3 of 5 recorded results: no time was left",
        "* memory: 1 tasks: no time was left",
    ):
        assert words in text
    assert "What is wrong" not in text and page.wrong_lines(tmp_path) == []


def test_the_screen_and_the_report_list_wrong_results(tmp_path):
    write_all(tmp_path)
    row = {"request": 1, "of": 60, "words": "FULL, T 9", "dtype": "bfloat16", "backend": "tokamax"}
    part(tmp_path, "requests").write(**row, verdict="different", share=31.0, text="v is\noff")
    text = page.markdown(tmp_path, [], command.verdict(tmp_path, ["requests"]))
    assert "* requests: FULL, T 9, tokamax, bfloat16 different: v is off" in text
    assert "| tokamax | bfloat16 | 0 | 1 | 0 | 0 | 31.00 |" in text
    assert "Not right on this device: 1 results" in text and len(page.wrong_lines(tmp_path)) == 1


def test_a_wrong_competitor_counts_if_it_is_ours(tmp_path):
    write_all(tmp_path)
    file = tmp_path / "speed.json"
    for family, wrong in (("torch", 0), ("flax_attn", 1)):
        document = json.loads(file.read_text())
        for row in document["rows"]:
            row["status"] = "wrong" if row["family"] == family else "timed"
        file.write_text(json.dumps(document))
        assert len(page.wrong_lines(tmp_path)) == wrong


def test_a_page_of_nothing_says_so(tmp_path):
    assert "of which nothing is known" in page.markdown(tmp_path, [], "")


@pytest.mark.nightly
def test_a_small_check_runs_every_part(tmp_path, capsys, monkeypatch):
    """Nothing differs, every part leaves its file, and the end is a screen."""
    monkeypatch.setenv("COLUMNS", "80")
    assert checked(tmp_path / "check", minutes=6.0) == 0
    text = capsys.readouterr().out
    assert "Everything that was tried is equal." in text and "<details>" not in text
    assert max(map(len, text.splitlines())) <= max(80, len(f"wrote {tmp_path}") + 60)
    files = {path.name for path in (tmp_path / "check").iterdir()}
    files_of_parts = {"layers.jsonl", "requests.jsonl", *(f"{x}.json" for x in page.BENCHES)}
    assert files >= {*files_of_parts, command.DEVICE_FILE}
