"""Attention over several devices: what is counted, and a command that makes the devices itself."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from flax_attn import attend
from flax_attn.bench import presets, result, scale
from flax_attn.bench.options import add_to
from flax_attn.bench.workload import FORWARD, Workload
from flax_attn.command.bench_command import _arguments
from parity_tests.core.pages.pages import ROOT

FOUR = Workload(64, 4, 4, devices=4)
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
    given = ["--preset", "scale", "--seq", "64", "--heads", "4", "--width", "4", "--devices", "4"]
    given += ["--grad", "--all-figures"]
    command = [sys.executable, "-m", "flax_attn", "bench", *given, "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "a device of several, T 64, 4 heads of width 4" in run.stdout
    assert "28.5 %" in run.stdout and "52 %" in run.stdout and "53 %" in run.stdout
    rows = result.read(path).rows
    assert len(rows) == 1 + len(scale.WAYS)
    assert [row.reason for row in rows if row.status != "measured"] == []
    assert all(row.proof and row.temporary and not row.seconds for row in rows)
    for row in rows[1:]:
        strategy = row.competitor.partition(",")[0]
        assert row.counts["sent"] == SENT[strategy]
        assert (row.temporary or 0) < (rows[0].temporary or 0)
    assert rows[0].counts["sent"] == 0 < rows[-1].counts["sent"] < SENT["all_gather"]


def test_a_wrong_way_gets_no_figures(monkeypatch):
    monkeypatch.setattr(scale, "attend", lambda *x, **how: attend(*x, **how)[:, ::-1])
    scale.proven.cache_clear()
    rows = []
    scale.CountRace().run(Workload(16, 4, 2, devices=1), FORWARD, rows)
    scale.proven.cache_clear()
    assert rows[0].status == "wrong" and "output is off by" in rows[0].reason
    assert rows[0].temporary is None and not rows[0].counts


@pytest.mark.parametrize("way, busiest", [("contiguous", 484), ("zigzag", 260), ("striped", 288)])
def test_blocks_are_those_of_the_page(way, busiest):
    w = Workload(8192, 64, 3, devices=8)
    assert scale.blocks(("ring", way), w).max() == 3 * busiest
    whole = scale.blocks(scale.ALONE, replace(w, devices=1)).sum()
    assert scale.blocks(("ulysses", "contiguous"), w).tolist() == [whole / 8] * 8


def test_the_options_are_written_as_they_were_given():
    def read(*given):
        parser = argparse.ArgumentParser()
        add_to(parser.add_subparsers(dest="command"))
        return parser.parse_args(["bench", *given])

    options = read("--preset", "scale", "--seq", "1k:4k", "--no-grad", "--causal")
    assert read(*_arguments(options)) == options
    assert "--no-grad" in _arguments(options) and "--full" not in _arguments(options)


def test_accelerators_that_are_too_few_are_told(monkeypatch):
    monkeypatch.setattr(scale, "platform", lambda: "gpu")
    with pytest.raises(ValueError, match="goes over 64 devices, and here are"):
        scale.rerun_on_devices([], 64)


def test_figures_are_written_and_read(tmp_path):
    row = result.Row(FOUR, FORWARD, "ring, zigzag", "flax_attn", status="measured", temporary=8)
    row.counts = {"blocks": 4.0, "mean": 2.0, "sent": 3.0 * 2**20}
    machine = {"peak_flops": {}}
    kept = result.Results("", "", machine, [row], complete=True)
    kept.write(tmp_path / "a.json")
    assert result.read(tmp_path / "a.json") == kept
    told = json.loads((tmp_path / "a.json").read_text())
    del told["rows"][0]["counts"]  # as files are that were written before
    (tmp_path / "b.json").write_text(json.dumps(told))
    assert result.read(tmp_path / "b.json").rows == [replace(row, counts={})]
    (table,) = scale.tables([row])
    assert table.rows[0][6:9] == ["2x", "3 MiB", "1 MiB"] and "T 64" in table.title


def test_the_preset_has_the_sizes_that_were_promised():
    works = presets.presets()["scale"].workloads()
    assert {w.length for w in works} == {8192, 32768, 131072} and len(works) == 12
    assert {w.devices for w in works} == {1, 2, 4, 8}
    assert {s for s, _ in scale.WAYS} == {"all_gather", "ring", "ulysses"}
    assert {x for _, x in scale.WAYS} == {"contiguous", "zigzag", "striped"}
