"""The benchmark on tiny shapes: what is proven, what gets no time, what an interrupt leaves."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from flax_attn import attend
from flax_attn._internal.types import Sizes
from flax_attn.bench import attention, page, plot, presets, race, reader, result, table
from flax_attn.bench.attention import Attention
from flax_attn.bench.competitor import Competitor
from flax_attn.bench.options import dtypes, lengths
from flax_attn.bench.program import JaxProgram
from flax_attn.bench.task import BOTH, COTANGENT, FORWARD
from flax_attn.command import cli
from parity_tests.core.bench.conftest import MACHINE, tasks
from parity_tests.core.pages import measured

TINY = Attention(length=6, width=4, heads=3, batch=2, which=BOTH)
AHEAD = replace(TINY, which=FORWARD)
ONCE = race.Settings(rounds=2, seconds=0.01)


def competitor(call, name="somebody"):
    """One that computes `call(q, k, v)`."""

    def make(task):
        return lambda inputs: call(*(inputs[x] for x in "qkv"))

    return Competitor(name, "jax.nn", attention.of_jax(make))


def honest(q, k, v):
    return attend(q, k, v, mask=TINY.rule)


def run(*competitors, task=TINY, settings=ONCE):
    rows = []
    race.Race(competitors, settings).run(task, rows)
    return rows


def bench(*arguments):
    return cli.main(["bench", *map(str, arguments)])


@pytest.mark.parametrize("mask", ["causal", "full", "window"])
@pytest.mark.parametrize("length", [1, 7, 11])
@pytest.mark.parametrize("window", [1, 5, 30])
def test_only_visible_pairs_are_counted(mask, length, window):
    task = Attention(length, mask=mask, window=window if mask == "window" else None)
    visible = task.rule.static(Sizes((), 1, length, length))
    assert task.pairs == visible.sum()


def test_operations_are_counted_as_agreed():
    task = replace(AHEAD, mask="full")
    forward = 2 * task.batch * task.heads * 36 * (task.width + task.width)
    assert task.flops == forward and replace(task, which=BOTH).flops == forward + 2.5 * forward


def test_lists_of_numbers_and_dtypes():
    assert lengths("1k:4k") == (1024, 2048, 4096) and lengths("96,2K,7") == (7, 96, 2048)
    assert lengths("300:1000") == (300, 600) and dtypes("bf16,float32") == ("bfloat16", "float32")


@pytest.mark.parametrize(
    "given, said",
    [
        (["--preset", "books"], "--preset does not take 'books': did you mean book?"),
        (
            ["--preset", "nosuch"],
            "--preset does not take 'nosuch': it takes flash, window, memory, book, decode, "
            "layers, linear, scale.",
        ),
        (["--seq", "1k:"], "--seq takes lengths such as 512,1024 or a range"),
        (["--seq", "4k:1k"], "got '4k:1k'"),
        (["--seq", "12,x"], "--seq takes whole numbers"),
        (["--seq", "0"], "--seq takes whole numbers"),
        (["--heads", "1,2"], "--heads takes one whole number; got '1,2'."),
        (["--dtype", "float8"], "--dtype takes float32, bfloat16, float16; got 'float8'."),
        (["--against", "numpy"], "--against does not take 'numpy': it takes jax.nn, flax.nnx"),
        (["--backend", "quick"], "--backend does not take 'quick': it takes auto, "),
        (
            ["--variant", "multi_hed"],
            "--variant does not take 'multi_hed': did you mean multi_head",
        ),
        (["--preset", "book", "--backend", "all"], "--preset book does not take --backend"),
        (["--variant", "luong", "--full"], "--variant does not take --full; it takes --variant,"),
        (["--preset", "decode", "--grad"], "--preset decode does not take --grad; it takes --seq"),
        (["--preset", "decode", "--width", "8,16"], "--preset decode takes one width; got 2."),
        (["--preset", "layers", "--width", "8"], "--preset layers does not take --width; it takes"),
        (["--preset", "linear", "--variant", "luong"], "--preset linear does not take --variant"),
        (["--preset", "scale", "--dtype", "bf16"], "--preset scale does not take --dtype"),
        (["--preset", "scale", "--devices", "1,2"], "--devices takes numbers from 2 on"),
        (["--devices", "4"], "bench without a preset does not take --devices; it takes"),
        (["--seconds", "-1"], "--seconds takes a number above 0; got '-1'."),
        (["--compare", "nowhere.json"], "nowhere.json cannot be read"),
        (["--json", "no/folder/x.json"], "there is no folder no/folder"),
    ],
)
def test_bad_arguments_of_bench_are_refused_in_one_sentence(given, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        raise SystemExit(bench(*given))
    told = capsys.readouterr().err
    assert told.startswith("flax-attn bench: ") and said in " ".join(told.split())


@pytest.mark.parametrize("whole", [2**25, 0], ids=["all rows", "some rows"])
def test_a_wrong_competitor_is_not_timed(whole, monkeypatch):
    monkeypatch.setattr(attention, "MAX_PROVEN_WEIGHTS", whole)
    attention._plain_results.cache_clear()

    @jax.custom_vjp
    def backward_wrong(q, k, v):
        return honest(q, k, v)

    def back(kept, given):
        dq, dk, dv = jax.vjp(honest, *kept)[1](given)
        return dq, dk, dv * 1.01

    backward_wrong.defvjp(lambda q, k, v: (honest(q, k, v), (q, k, v)), back)
    right, off, turned = run(
        competitor(honest),
        competitor(lambda q, k, v: honest(q * 1.01, k, v)),
        competitor(backward_wrong),
    )
    attention._plain_results.cache_clear()
    assert right.status == "timed" and right.seconds and right.amount and right.reason == ""
    assert {"compile_seconds", "first_seconds", "temporary", "error"} < {*right.figures}
    assert off.status == turned.status == "wrong" and not off.seconds and not turned.seconds
    assert "output is off by" in off.reason and "gradient of v is off by" in turned.reason


def test_of_many_weights_some_rows_and_a_smaller_task_are_proven():
    large = Attention(length=2**15, heads=5, batch=3)
    assert large.small() == replace(large, batch=1, heads=2, length=1024)
    assert {0, large.length - 1} < {*large.rows} and len(large.rows) < 20
    assert list(TINY.rows) == [*range(6)] and TINY.small() == TINY


@pytest.mark.nightly
def test_only_the_smaller_task_is_wrong(monkeypatch):
    """A fault in a row that is not looked at on the real shape."""
    monkeypatch.setattr(attention, "MAX_PROVEN_WEIGHTS", 2 * 3 * 6**2 - 1)
    attention._plain_results.cache_clear()

    def fault(q, k, v):
        o = honest(q, k, v)
        return o if q.shape[0] > 1 else o * 1.01

    (row,) = run(competitor(fault), task=AHEAD)
    attention._plain_results.cache_clear()
    assert row.status == "wrong"


@pytest.mark.nightly
def test_an_error_of_one_competitor_is_reported_and_the_others_run():
    def broken(q, k, v):
        raise RuntimeError("no such kernel.\nlong story")

    failed, fine = run(competitor(broken), competitor(honest), task=AHEAD)
    assert failed.status == "left out" and failed.reason == "RuntimeError: no such kernel"
    assert fine.status == "timed"


def test_competitors_that_need_too_much_time_or_memory_are_left_out():
    slow = race.Race([competitor(honest)], replace(ONCE, call=1.0))
    rows = []
    slow.run(AHEAD, rows)
    slow.rate = {key: 1e9 for key in slow.rate}
    slow.run(AHEAD, rows)
    assert rows[0].status == "timed" and "a call would take about" in rows[1].reason
    (row,) = run(replace(competitor(honest), quadratic=(2**50, 2**50)))
    assert row.status == "left out" and "GiB" in row.reason


def test_memory_alone_is_measured():
    (row,) = run(competitor(honest), settings=replace(ONCE, timed=False))
    assert row.status == "measured" and row.amount == row.figures["temporary"] and not row.seconds
    (row,) = run(competitor(lambda q, k, v: v), settings=replace(ONCE, timed=False))
    assert row.status == "wrong"


def test_calls_can_be_chained():
    calls = []

    def call(inputs):
        jax.debug.callback(lambda: calls.append(1))
        return inputs["x"] + 1

    program = JaxProgram(call, FORWARD)
    placed = program.place({"x": np.zeros(3, np.float32), COTANGENT: np.zeros(3)})
    run = program.chained(placed, 4)
    assert run is not None and not calls
    run()
    jax.effects_barrier()
    assert len(calls) == 4


@pytest.mark.nightly
def test_on_an_accelerator_short_calls_are_chained_and_proven_at_highest_too(monkeypatch):
    heard = []

    def call(q, k, v):
        heard.append(jax.config.jax_default_matmul_precision)
        return honest(q, k, v)

    monkeypatch.setattr(race, "platform", lambda: "gpu")
    monkeypatch.setattr("flax_attn.bench.competitor.platform", lambda: "gpu")
    monkeypatch.setattr(race, "CHAIN_SECONDS", 1e9)
    (row,) = run(competitor(call))
    assert row.status == "timed" and row.seconds and heard[0] == "highest" and None in heard


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_repeated_short_call_reports_the_time_of_one_call(platform, monkeypatch):
    now = [0.0]

    def call(placed):
        now[0] += 2.0

    monkeypatch.setattr(race, "platform", lambda: platform)
    monkeypatch.setattr(race, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    row = result.Row.of(TINY, "ours", "ours")
    program = SimpleNamespace(run=call, wait=lambda made: None)
    race.Entry(row, program, [None], repeat=5).time(0)
    race.Entry(row, program, [None], 4, lambda: [call(None) for _ in range(4)]).time(0)
    assert row.seconds == [2.0, 2.0]


@pytest.mark.nightly
def test_every_backend_runs_or_refuses_by_name(monkeypatch):
    names = attention.names_of_backends()
    rows = run(*attention.flax_attn_competitors(names), task=AHEAD)
    assert [row.competitor for row in rows] == ["flax_attn", *(f"flax_attn:{n}" for n in names[1:])]
    by_name = {row.competitor: row for row in rows}
    assert by_name["flax_attn"].backend == "reference"
    assert by_name["flax_attn:blockwise"].status == "timed"
    assert by_name["flax_attn:cudnn"].status == "left out" and by_name["flax_attn:cudnn"].reason


def test_the_command_writes_reads_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "others", lambda: [competitor(honest, "honest")])
    given = ["--seq", "6", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "2"]
    given += ["--no-grad", "--causal", "--all"]
    assert bench(*given, "--against", "jax.nn", "--out", tmp_path) == 0
    told = capsys.readouterr().out
    assert told.index("time over that of flax_attn") < told.index("quartiles")
    kept = reader.read(tmp_path / "bench.json")
    assert kept.complete and [row.competitor for row in kept.rows] == ["flax_attn", "honest"]
    assert all(row.cells == AHEAD.cells and row.seconds for row in kept.rows)
    again = tmp_path / "again.json"
    kept.write(again)
    assert reader.read(again) == kept
    columns = "| T | B x N | pass | competitor | time | ratio | verdict | interval | memory |"
    assert columns in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "bench.png").exists() == (plot.absent() is None)
    old = tmp_path / "bench.json"
    assert bench(*given, "--against", "none", "--compare", old) == 0
    assert "old over new" in capsys.readouterr().out
    assert bench(*given, "--against", "none", "--batch", "1", "--compare", old) == 0
    assert "was run here too" in capsys.readouterr().out


def timed(competitor="flax_attn", *seconds, task=AHEAD):
    row = result.Row.of(task, competitor, competitor)
    row.status, row.seconds = "timed", [*seconds]
    return row


def test_ratios_of_old_to_new():
    def with_times(*seconds):
        return result.Results("", "", MACHINE, [timed("flax_attn", *seconds)])

    found = table.compared(with_times(1.0, 2.0, 9.0), with_times(6.0))
    assert [line[:2] for line in found.races[0].lines] == [["flax_attn", "3x"]]


def test_a_ratio_is_the_time_of_the_competitor_over_that_of_attend():
    ours, slower = timed("flax_attn", 2.0), timed("slower", 6.0)
    assert result.ratios(slower, result.base_of([slower, ours])) == [3.0]


def test_several_runs_show_the_range_of_their_ratios():
    ours, theirs = timed("flax_attn", 2.0, 4.0), timed("jax.nn", 3.0)

    def run(began: str, peak: float, *seconds: float, **machine) -> result.Results:
        machine = {**MACHINE, "began": began, "peak_flops": {"float32": peak}, **machine}
        rows = [ours, replace(theirs, seconds=list(seconds))]
        return result.Results("title", "bench", machine, rows, complete=True)

    runs = [run("monday", 3e12, 6.0), run("tuesday", 5e12, 9.0), run("friday", 4e12, 7.5, 7.5)]
    whole = result.together(runs)
    assert whole.rows[1].seconds == [6.0, 9.0, 7.5, 7.5] and whole.rows[0].amount == 3.0
    assert table.span(result.ratios(whole.rows[1], whole.rows[0])) == "2x to 3x"
    assert table.span(result.ratios(whole.rows[0], whole.rows[0])) == "1x"
    text = page.markdown(whole)
    begun = "reaches 3 to 5 TFLOP/s in float32 here. 3 runs, begun at monday, tuesday, friday UTC."
    assert begun in text and "runs, begun" not in page.markdown(runs[0])
    mine, other = measured.rows(text, "time over that of flax_attn")
    assert measured.factors(other["ratio"]) == [2.0, 3.0] and mine["time"] == "3 s"
    stopped = replace(runs[0], rows=[ours], complete=False)
    part = result.together([stopped, runs[2]])
    assert not part.complete and result.ratios(part.rows[1], part.rows[0]) == [2.5]
    for other in (run("", 1.0, 1.0, processor="other"), replace(runs[0], command="bench --full")):
        with pytest.raises(
            ValueError, match=r"do not belong together: .* was (other|.*--full), and"
        ):
            result.together([other, runs[1]])


def test_the_command_shows_and_writes_the_range_of_several_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(attention, "others", lambda: [competitor(honest, "honest")])
    given = ["--seq", "6", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "2"]
    given += ["--no-grad", "--causal", "--against", "jax.nn"]
    first, last, md = (tmp_path / name for name in ("first.json", "last.json", "bench.md"))
    monkeypatch.setattr("sys.argv", ["flax-attn", "bench", *given])
    assert bench(*given, "--json", first) == 0
    kept = reader.read(first)
    for row in kept.rows:  # a run in which the other one was slower
        row.seconds = [1.0] if row.competitor == "flax_attn" else [7e6]
    kept.write(first)
    capsys.readouterr()
    assert bench(*given, "--json", last, "--together", first, "--markdown", md) == 0
    assert capsys.readouterr().out.count("x to 7000000x") == 2
    (row,) = (
        row for row in measured.rows(md.read_text(), "time over") if row["competitor"] == "honest"
    )
    assert measured.factors(row["ratio"])[1] == 7e6 and "2 runs, begun at" in md.read_text()
    assert len(reader.read(last).rows[0].seconds) == 2, "its JSON is of this run alone"
    monkeypatch.setattr("sys.argv", ["flax-attn", "bench", "--full"])
    monkeypatch.setattr(race.Race, "run", lambda *_: pytest.fail("it was measured"))
    assert bench(*given, "--together", first) == 2
    assert "do not belong together: command was" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[1]", "{}", json.dumps({"format": result.FORMAT, "rows": [{}]})]
)
def test_only_our_files_are_read(text, tmp_path, capsys):
    path = tmp_path / "old.json"
    path.write_text(text)
    assert bench("--compare", path) == 2
    assert "flax-attn bench" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch, capsys):
    def stop(q, k, v):
        if q.shape[1] == 12:
            raise KeyboardInterrupt
        return honest(q, k, v)

    monkeypatch.setattr(attention, "others", lambda: [competitor(stop, "stopping")])
    path = tmp_path / "kept.json"
    given = ["--seq", "6,12", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "2"]
    assert bench(*given, "--no-grad", "--against", "jax.nn", "--json", path) == 130
    assert "stopped; what was measured before" in capsys.readouterr().out
    rows = reader.read(path).rows
    assert [(r.cells["T"], r.competitor, r.status) for r in rows] == [
        ("6", "flax_attn", "timed"),
        ("6", "stopping", "timed"),
        ("12", "flax_attn", "left out"),
        ("12", "stopping", "left out"),
    ]
    assert rows[2].reason == rows[3].reason == "stopped before it was measured"
    assert not reader.read(path).complete


def test_a_page_keeps_what_people_wrote(tmp_path):
    path = Path(tmp_path, "page.md")
    path.write_text("# Page\n\nwritten by hand\n")
    first, last = marks = page.marks(result.Results("", "", MACHINE), "flash")
    page.write(path, "one\n", marks)
    page.write(path, "other\n", ("<!-- a -->", "<!-- b -->"))
    page.write(path, "two\n", marks)
    assert path.read_text() == (
        f"# Page\n\nwritten by hand\n\n{first}\ntwo\n{last}\n\n<!-- a -->\nother\n<!-- b -->\n"
    )


def test_slow_16_bit_products_on_a_gpu_are_reported():
    row = timed("flax_attn", 1.0, task=replace(AHEAD, dtype="bfloat16"))
    row.backend = "reference"
    on = {**MACHINE, "platform": "gpu"}
    told = table.remarks(result.Results("", "", on, [row], complete=True))
    assert len(told) == 1 and "'reference'" in told[0] and "explain" in told[0]
    assert not table.remarks(result.Results("", "", MACHINE, [row], complete=True))


def test_presets_have_the_sizes_that_were_promised():
    names = "flash window memory book decode layers linear scale"
    assert {*presets.PRESETS} == {"", *names.split()}
    flash = tasks("flash")
    assert {w.width for w in flash} == {64, 128, 256}
    assert {w.mask for w in flash} == {"causal", "full"} and {w.which for w in flash} == {
        FORWARD,
        BOTH,
    }
    assert {512, 16384} < {w.length for w in flash}
    assert {w.window for w in tasks("window")} == {256}
    assert tasks("memory")[-1] == Attention(65536, heads=1, which=BOTH)
    (book,) = tasks("book", "--grad")
    assert (book.batch, book.length, book.features, book.heads) == (8, 1024, 768, 12)
    assert [type(w).__name__ for w in tasks("window", "--variant", "luong", "--seq", "8")] == [
        "Twin"
    ] * 2
