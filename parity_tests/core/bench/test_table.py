"""Tables at every width: what is shown, what is sure, and each race once."""

import re
from dataclasses import replace
from io import StringIO
from itertools import product

import numpy as np
import pytest
from rich.console import Console

from flax_attn.bench import attention, decode, page, published, result, scale, table
from flax_attn.bench.attention import Attention
from flax_attn.bench.book import Book
from flax_attn.bench.task import BOTH, FORWARD
from flax_attn.command import bench_command, cli
from parity_tests.core.pages import measured

from .conftest import MACHINE
from .test_bench import competitor, honest

WIDE = Attention(256, 64, 3, 2)
LONG = [f"somebody.nn.MultiheadAttention{i}" for i in range(12)]


def rows(task, **seconds):
    """Rows of one race by the timings of each competitor."""
    found = []
    for name, times in seconds.items():
        row = result.Row.of(task, name, "flax_attn" if name == "flax_attn" else "other")
        row.status, row.seconds = "timed", [*times]
        found.append(row)
    return found


def drawn(names, task, seed=0):
    """Timings around a time of each competitor, in turns."""
    draw = np.random.default_rng(seed)
    base = draw.lognormal(0.0, 3.0, len(names))
    return rows(
        task, **{n: x * draw.lognormal(0.0, 0.1, 9) for n, x in zip(names, base, strict=True)}
    )


def results(found, **more):
    return result.Results("title", "bench", MACHINE, found, complete=True, **more)


def counted():
    task, found = scale.Sharded(131072, 64, 32), []
    for which, one in product((FORWARD, BOTH), scale.competitors((2, 128))):
        row = result.Row.of(replace(task, which=which), one.name, one.family)
        row.status = "measured"
        row.note(temporary=1e11 / len(one.name), blocks=123456.0, mean=98765.0, sent=1e11, hops=3)
        found.append(row)
    return found


RUNS = {
    "attention": lambda: (
        drawn(["flax_attn", "torch"], WIDE) + drawn(["flax_attn"], replace(WIDE, which=BOTH))
    ),
    "many": lambda: drawn(["flax_attn", *LONG], Book(65536, 128, 128, 128, which=BOTH)),
    "layers": lambda: drawn(
        ["flax_attn", *LONG], published.layer("Gemma 2 9B, global", 32768, BOTH)
    ),
    "decode": lambda: drawn(
        [c.name for c in decode.competitors()],
        decode.Step(131072, 64, 32, 8, stored=131072, kv_heads=4, window=1024),
    ),
    "scale": counted,
}


def shown(found, width):
    lines = []
    table.Printer(lines.append, width).show(table.tables(results(found)))
    return "\n".join(lines).split("\n")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("kind", RUNS)
def test_every_kind_of_run_is_printed_with_its_interval(kind, width):
    lines = shown(RUNS[kind](), width)
    assert [line for line in lines if len(line) > width] == []
    (heads,) = (line.split() for line in lines if line.startswith("  competitor"))
    assert heads[2:4] == ["ratio", "verdict"]
    assert "interval" in heads or kind == "scale" or width == 60
    text, names = "".join(lines), [row.competitor for row in RUNS[kind]()]
    assert all(word.strip() in text for name in names for word in table._words(name))


@pytest.mark.parametrize("kind", RUNS)
def test_all_columns_are_those_of_files(kind):
    lines = shown(RUNS[kind](), None)
    (found,) = table.tables(results(RUNS[kind]()))
    assert sum(line.split() == " ".join(found.heads).split() for line in lines) == 1
    text = page.markdown(results(RUNS[kind]()))
    (heads,) = (line for line in text.split("\n") if line.startswith("| ") and "verdict" in line)
    assert heads == f"| {' | '.join(found.columns)} |"
    assert len(measured.rows(text, found.title)) == len(found.rows) == len(RUNS[kind]())


@pytest.mark.parametrize("width", [60, 80, None])
@pytest.mark.parametrize("seed", range(8))
def test_races_of_any_size_stand_below_their_headings(width, seed):
    """Printed one by one: times from ns to hours, and names that the first race does not have."""
    draw, lines, run = np.random.default_rng(seed), [], results([])
    printer = table.Printer(lines.append, width)
    for i in range(12):
        names = ["flax_attn", *draw.choice([*LONG, "torch", "jax.nn"], 1 + i % 3, replace=False)]
        times = {name: draw.lognormal(0, 4) * draw.lognormal(0, 1, 7) for name in names}
        run.rows += rows(replace(WIDE, length=2**i), **times)
        printer.show(table.tables(run))
    head, lines = "", "\n".join(lines).split("\n")
    for line in lines:
        assert width is None or len(line) <= width
        head = line if line.startswith("  competitor") else head
        cells = re.search(r"([\d.e+-]+x) ", line)
        if line.startswith("  ") and cells and not line.startswith("    "):
            assert cells.end(1) == head.index("ratio") + len("ratio"), line


def test_several_runs_are_sure_where_each_is():
    ours, theirs = rows(WIDE, flax_attn=[1.0] * 3, b=[2.0] * 3)
    runs = [results([replace(row) for row in (ours, theirs)]) for _ in range(3)]
    found = table.tables(result.together(runs))[0].races[0].lines
    assert [line[3] for line in found] == ["", "slower?"]


def verdicts(**seconds):
    (found,) = table.tables(results(rows(WIDE, **seconds)))
    at = found.heads.index("verdict")
    return {line[0]: line[at] for line in found.races[0].lines}


def test_a_line_is_level_where_rounds_speak_for_both():
    ours = [1.0, 1.1, 0.9, 1.0, 1.2, 1.0, 1.1]
    twice = [2 * x for x in ours]
    assert verdicts(flax_attn=ours, b=twice) == {"flax_attn": "fastest", "b": "slower"}
    assert verdicts(flax_attn=twice, b=ours) == {"flax_attn": "", "b": "fastest"}
    assert verdicts(flax_attn=twice, b=ours, c=ours[::-1]) == {
        "flax_attn": "",
        "b": "faster",
        "c": "faster",
    }
    mixed = [x * y for x, y in zip(ours, [3, 0.9, 3, 3, 0.8, 3, 3], strict=True)]
    assert verdicts(flax_attn=ours, b=mixed) == {"flax_attn": "", "b": "level"}
    assert verdicts(flax_attn=ours[:5], b=twice[:5]) == {"flax_attn": "", "b": "slower?"}
    assert "fastest" not in shown(rows(WIDE, flax_attn=ours), 80), "nobody is, alone"


def test_reading_the_cache_once_is_a_bound():
    times = {"flax_attn": [2.0] * 9, "flax.nnx": [3.0] * 9, result.LIMIT: [1.0] * 9}
    found = verdicts(**times)
    assert found == {"flax_attn": "fastest", "flax.nnx": "slower", result.LIMIT: "bound"}


@pytest.mark.parametrize("rounds", [5, 6, 9, 11, 25])
def test_intervals_hold_the_ratio_of_all_rounds_as_often_as_they_say(rounds):
    """Of 2,000 runs whose true median is 2; fewer than 6 rounds give less than 95 %."""
    draw = np.random.default_rng(rounds)
    ours, noise = draw.lognormal(0.0, 0.5, (2, 2000, rounds))
    held = 0
    for a, b in zip(ours, noise, strict=True):
        mine, theirs = rows(WIDE, flax_attn=a, b=2 * a * b)
        low, high = result.interval(theirs, mine)
        held += low <= 2.0 <= high
    assert held / 2000 >= 0.93 if rounds >= 6 else 0.9 < held / 2000 < 0.97


def test_a_wrong_competitor_is_called_so_and_has_no_ratio():
    found = rows(WIDE, flax_attn=[1.0] * 6, off=[])
    found[1].status, found[1].reason = "wrong", "the output is off"
    lines = shown(found, 80)
    assert [line.split() for line in lines if "off" in line] == [["off", "wrong"]]
    assert table.remarks(results(found)) == ["off: wrong at T 256 fwd: the output is off."]


def test_a_race_is_printed_when_it_is_measured_and_its_heading_once():
    lines, run = [], results(rows(WIDE, flax_attn=[1.0], torch=[2.0]))
    printer = table.Printer(lines.append, 80)
    printer.show(table.tables(run))
    before = len(lines)
    assert lines[0] == "\ntime over that of flax_attn: head width 64, causal, float32"
    printer.show(table.tables(run))
    assert len(lines) == before
    run.rows += rows(replace(WIDE, length=512), flax_attn=[1.0], torch=[3.0])
    printer.show(table.tables(run))
    assert lines[before].startswith("\nT 512") and len(lines) == before + 3
    run.rows += rows(replace(WIDE, width=128), flax_attn=[1.0], torch=[3.0])
    printer.show(table.tables(run))
    assert any("head width 128" in line for line in lines[before + 3 :])


def test_the_fastest_is_bold(monkeypatch):
    system = Console(file=StringIO(), force_terminal=True, color_system="standard", width=80)
    bench_command.print_line(system, "  torch  1 s  0.5x  fastest")
    assert re.findall(r"\x1b\[1;32m([^\x1b]*)\x1b\[0m", system.file.getvalue()) == ["fastest"]


@pytest.mark.nightly
@pytest.mark.parametrize("columns", ["60", "80", "120"])
def test_the_command_fits_the_terminal(columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.argv", ["flax-attn", "bench"])
    monkeypatch.setattr(attention, "others", lambda: [competitor(honest, "honest")])
    given = ["bench", "--seq", "6", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "7"]
    assert cli.main([*given, "--no-grad", "--against", "jax.nn"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(columns)
    assert "quartiles  " not in text and "Ratio: time over" in text


def test_the_command_of_a_file_does_not_depend_on_what_is_printed():
    assert bench_command._without_files(["--all", "--seq", "6"]) == ["--seq", "6"]
