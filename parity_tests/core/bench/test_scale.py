"""Attention over several devices: what is counted, and a command that makes the devices itself."""

import subprocess
import sys

import pytest

from flax_attn import attend
from flax_attn.bench import race, reader, result, scale, table
from flax_attn.bench.scale import Sharded
from parity_tests.core.pages.pages import ROOT

from .conftest import MACHINE, tasks

FOUR = Sharded(64, 4, 4)
SHARD = 64 // 4 * 4 * 4 * 4  # bytes of the keys of one device, in float32
# Keys and values in three hops. Backward all_gather sends their gradients so; a ring sends keys and
# values again, and their gradients from before the first step until they are home, five hops. The
# positions of the keys go round with them, twice three hops of 16 in int32. Of what ulysses sends a
# fourth stays: q, k, v, the output, their gradients, and m and l of each row of four heads.
SENT = {"all_gather": 2 * 6 * SHARD, "ring": (6 + 6 + 10) * SHARD + 6 * 16 * 4}
SENT["ulysses"] = (8 * SHARD + 2 * 16 * 4 * 4) * 3 / 4


@pytest.mark.nightly
def test_the_preset_starts_again_with_devices_and_prints(tmp_path):
    path = tmp_path / "scale.json"
    given = "--preset scale --seq 64 --heads 4 --width 4 --devices 4 --grad --all".split()
    command = [sys.executable, "-m", "flax_attn", "bench", *given, "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "a device of several, 4 heads of width 4" in run.stdout
    rows = reader.read(path).rows
    assert len(rows) == 1 + len(scale.WAYS)
    assert [row.reason for row in rows if row.status != "measured"] == []
    assert all("error" in row.figures and row.amount and not row.seconds for row in rows)
    for row in rows[1:]:
        strategy = row.competitor.partition(",")[0].removeprefix("4 x ")
        assert row.figures["sent"] == SENT[strategy] and row.amount < rows[0].amount
    assert "sent" not in rows[0].figures and rows[-1].figures["sent"] < SENT["all_gather"]


def test_a_wrong_strategy_gets_no_figures(monkeypatch):
    monkeypatch.setattr(scale, "attend", lambda *x, **how: attend(*x, **how)[:, ::-1])
    scale._prove.cache_clear()
    rows = []
    race.Race(scale.competitors([])[:1], race.Settings(timed=False)).run(Sharded(16, 4, 2), rows)
    scale._prove.cache_clear()
    assert rows[0].status == "wrong" and "output is off by" in rows[0].reason
    assert rows[0].amount is None and "blocks" not in rows[0].figures


@pytest.mark.parametrize("way, busiest", [("contiguous", 484), ("zigzag", 260), ("striped", 288)])
def test_blocks_are_those_of_the_page(way, busiest):
    task = Sharded(8192, 64, 3)
    assert scale.blocks(("ring", way), task, 8).max() == 3 * busiest
    whole = scale.blocks(scale.ALONE, task, 1).sum()
    assert scale.blocks(("ulysses", "contiguous"), task, 8).tolist() == [whole / 8] * 8


def test_too_few_devices_are_refused():
    with pytest.raises(ValueError, match="goes over 64 devices, and here are"):
        scale.make_devices(64)


def test_figures_are_shown():
    rows = [result.Row.of(FOUR, name, "flax_attn") for name in ("one device", "4 x ring, zigzag")]
    for row, memory in zip(rows, (8, 2), strict=True):
        row.status = "measured"
        row.note(temporary=memory * 2**20, blocks=4.0, mean=2.0)
    rows[1].note(sent=3.0 * 2**20, hops=3)
    (shown,) = table.tables(result.Results("", "", MACHINE, rows))
    assert shown.heads[:6] == ["competitor", "memory", "ratio", "verdict", "busiest/mean", "sent"]
    least, most = shown.races[0].lines
    assert least[:7] == ["4 x ring, zigzag", "2 MiB", "0.25x", "less", "2x", "3 MiB", "1 MiB"]
    assert most[:4] == ["one device", "8 MiB", "1x", ""] and "T" in shown.races[0].cells


def test_the_preset_has_the_sizes_that_were_promised():
    works = tasks("scale", "--grad")
    assert [w.length for w in works] == [8192, 32768, 131072]
    names = [c.name for c in scale.competitors((2, 4, 8))]
    assert names[0] == "one device" and len(names) == 1 + 3 * len(scale.WAYS)
    assert {s for s, _ in scale.WAYS} == {"all_gather", "ring", "ulysses"}
    assert {x for _, x in scale.WAYS} == {"contiguous", "zigzag", "striped"}
