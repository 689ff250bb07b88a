"""Tables that fit 80 columns: every kind of run, and the marks of winners."""

import re
from dataclasses import replace
from io import StringIO
from itertools import product

import pytest
from rich.console import Console

from flax_attn.bench import brief, decode, functions, result, scale, table
from flax_attn.bench.workload import BOTH, FORWARD, Workload
from flax_attn.command import cli
from flax_attn.command.bench_show import Screen

from .conftest import MACHINE
from .test_bench import competitor, honest

WIDE = Workload(256, 64, 3, 2)


def entries(w, which=FORWARD, **more):
    """Rows of one race by the seconds of each competitor."""
    seconds = more.pop("seconds", {"flax_attn": 1.0, "torch": 2.0})
    row = result.Row(w, which, "", "", status="timed")
    ours = {"flax_attn", "prefix recomputed", "cache read once"}
    return [
        replace(row, competitor=n, family="flax_attn" if n in ours else n, seconds=[x], **more)
        for n, x in seconds.items()
    ]


def results(rows, **more):
    return result.Results("title", "bench", MACHINE, rows, complete=True, **more)


LONG = [f"somebody.nn.MultiheadAttention{i}" for i in range(12)]
PUBLISHED = Workload(32768, 64, 32, layer="Qwen3-30B-A3B, layer 12, sliding", model_width=2048)
STEP = Workload(131072, 64, 32, 8, stored=131072, kv_heads=4, window=1024)
DEVICES = Workload(131072, 64, 32, devices=1)
SLOW = dict.fromkeys(["flax_attn", *LONG], 123.456)


def step_rows():
    names = [competitor.name for competitor in decode.competitors()]
    return entries(STEP, seconds=dict.fromkeys(names, 0.0987))


def device_rows():
    rows = entries(DEVICES, seconds={"alone": 0.0}, temporary=10**10)
    for devices, which, way in product((2, 128), (FORWARD, BOTH), scale.WAYS):
        w = replace(DEVICES, devices=devices)
        rows += entries(w, which, seconds={", ".join(way): 0.0}, temporary=123456789012)
    counts = {"blocks": 123456.0, "mean": 98765.0, "sent": 1e11}
    return [replace(row, status="measured", seconds=[], counts=counts) for row in rows]


RUNS = {
    "attention": lambda: entries(WIDE) + entries(WIDE, BOTH),
    "many": lambda: entries(replace(WIDE, length=65536, batch=128, heads=128), BOTH, seconds=SLOW),
    "layers": lambda: entries(PUBLISHED, BOTH, seconds=SLOW),
    "linear": lambda: entries(replace(WIDE, layer="gated delta rule"), seconds=SLOW),
    "decode": step_rows,
    "scale": device_rows,
    "memory": lambda: [
        replace(row, status="measured", seconds=[], temporary=2**40)
        for row in entries(WIDE, seconds=SLOW)
    ],
}


def printed(rows, *, all_figures=False, colour=False):
    """What the command prints of finished results on 80 columns."""
    system = "standard" if colour else None
    options = {"file": StringIO(), "width": 80, "soft_wrap": True, "color_system": system}
    console = Console(force_terminal=colour, **options)
    screen = Screen(console, all_figures)
    run = results(rows)
    stream = screen.stream(run)
    stream.update()
    screen.print_tables([table.compared(run, run)], run, several=True)
    screen.print_wide(stream.rest())
    screen.print_legend(run)
    for sentence in table.remarks(run):
        screen.print_text(sentence)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", RUNS)
def test_every_kind_of_run_fits_80_columns(kind):
    text = printed(RUNS[kind]())
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert all(name in text for name in {row.competitor for row in RUNS[kind]()})
    assert any(brief.MARK in line for line in lines[:-3]) and "--all-figures" in text


@pytest.mark.parametrize("kind", RUNS)
def test_all_figures_are_the_tables_as_files_have_them(kind):
    text = printed(RUNS[kind](), all_figures=True)
    for shown in table.tables(results(RUNS[kind]())):
        assert shown.title in text and all(name in text for name in shown.header)
    assert brief.MARK not in text and "--all-figures" not in text


def test_few_competitors_are_a_grid_and_many_a_list():
    lines = printed(entries(WIDE) + entries(WIDE, BOTH)).splitlines()
    at = lines.index("   T   B x N  pass      flax_attn     torch")
    assert lines[at + 1] == " 256   2 x 3  fwd            1 s*       2x"
    assert lines[at + 2] == " 256   2 x 3  fwd+bwd        1 s*       2x"
    lines = printed(RUNS["many"]()).splitlines()
    assert "T = 65536, B x N = 128 x 128, pass = fwd+bwd" in lines
    assert len([line for line in lines if line.startswith("  somebody.")]) >= len(LONG)


def test_a_list_begins_with_the_fastest():
    times = {"flax_attn": 2.0, **{name: 4.0 for name in LONG[:-1]}, LONG[-1]: 1.0}
    lines = printed(entries(WIDE, seconds=times)).splitlines()
    at = lines.index("T = 256, B x N = 2 x 3, pass = fwd")
    assert lines[at + 1].split() == [LONG[-1], "1", "s*", "0.5x"]
    assert lines[at + 2].split() == ["flax_attn", "2", "s", "1x"]


def test_winners_tie_where_the_middle_halves_of_their_timings_overlap():
    row = entries(WIDE)[0]

    def timed(name, *seconds):
        return replace(row, competitor=name, seconds=list(seconds))

    fast = timed("fast", 1.0, 2.0, 3.0, 4.0, 5.0)  # quartiles 2 and 4
    assert brief.winners([fast, timed("near", 3.9, 3.9, 5.0)]) == {"fast", "near"}
    assert brief.winners([fast, timed("far", 4.1, 4.1, 5.0)]) == {"fast"}
    assert brief.winners([fast]) == set(), "nobody wins alone"
    assert brief.winners([fast, replace(fast, competitor="wrong", status="wrong")]) == set()
    memory = [replace(row, status="measured", seconds=[], competitor=n) for n in "abc"]
    sizes = (5, 5, 6)
    memory = [replace(row, temporary=size) for row, size in zip(memory, sizes, strict=True)]
    assert brief.winners(memory) == {"a", "b"}


def test_reading_the_cache_once_wins_no_race():
    rows = entries(STEP, seconds={"flax_attn": 2.0, "flax.nnx": 3.0, "cache read once": 1.0})
    (group,) = brief.groups(results(rows))
    best = {entry.name: entry.best for entry in group.races[0].entries}
    assert best == {"flax_attn": True, "flax.nnx": False, "cache read once": False}


def test_a_winner_is_bold_and_a_wrong_competitor_is_called_so():
    rows = entries(WIDE, seconds={"flax_attn": 1.0, "torch": 0.5, "off": 3.0})
    rows[2] = replace(rows[2], status="wrong", seconds=[], reason="the output is off")
    text = printed(rows, colour=True)
    assert re.findall(r"\x1b\[1;32m([^\x1b]*)\x1b\[0m", text)[:1] == ["0.5x*"]
    assert "\x1b" not in printed(rows) and "wrong" in printed(rows).splitlines()[4]


@pytest.mark.nightly
def test_the_command_shows_few_figures_and_writes_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.argv", ["flax-attn", "bench"])
    monkeypatch.setattr(functions, "others", lambda: [competitor(honest, "honest")])
    given = ["bench", "--seq", "6", "--width", "4", "--heads", "3", "--batch", "2", "--rounds", "2"]
    given += ["--no-grad", "--causal", "--against", "jax.nn", "--markdown", str(tmp_path / "b.md")]
    assert cli.main([*given, "--json", str(tmp_path / "b.json")]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= max(80, len(f"wrote {tmp_path / 'b.json'}"))
    assert "time over that of flax_attn" in text and "quartiles  " not in text
    kept = result.read(tmp_path / "b.json")
    page = (tmp_path / "b.md").read_text("utf-8")
    assert "every figure" in page and "quartiles" in page and kept.rows[0].quartiles
    assert cli.main([*given, "--all-figures"]) == 0
    assert "every figure" in capsys.readouterr().out


def test_the_command_of_a_file_does_not_depend_on_what_is_printed(monkeypatch):
    from flax_attn.command import bench_command

    short = ["--all-figures", "--seq", "6"]
    assert bench_command._without_files(short) == ["--seq", "6"]
