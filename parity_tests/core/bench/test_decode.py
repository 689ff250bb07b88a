"""Steps of decoding, tiny: proven, timed, shown; who is wrong gets no time."""

from dataclasses import replace

import numpy as np
import pytest

from flax_attn.bench import decode, race, reader
from flax_attn.bench.decode import Step
from flax_attn.command import cli
from flax_attn.parity.cases.case import has_torch

from .conftest import tasks

TINY = Step(12, 4, 8, stored=12)
pytestmark = pytest.mark.usefixtures("promotion")


@pytest.mark.nightly
def test_the_preset_runs_and_prints(tmp_path, capsys):
    path = tmp_path / "steps.json"
    given = "--seq 12 --heads 8 --width 4 --rounds 2 --seconds 0.01 --all".split()
    assert cli.main(["bench", "--preset", "decode", *given, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "time over that of flax_attn: one step of a whole layer" in told
    assert "cache ring of 2" in told and "cache latent" in told and "bound" in told
    rows = reader.read(path).rows
    ours = [row for row in rows if row.competitor == "flax_attn"]
    assert len(ours) == 11 and all(row.seconds and "error" in row.figures for row in ours)
    names = {row.competitor for row in rows if row.status == "timed"}
    assert {"flax.nnx", "prefix recomputed", "cache read once"} <= names
    assert not has_torch() or {"torch, static cache", "torch, growing cache"} <= names
    assert all(row.reason for row in rows if row.status != "timed")


@pytest.mark.nightly
def test_a_wrong_decode_step_is_not_timed():
    def off(w):
        program = decode._flax_attn(w)
        step = program.call
        program.call = lambda fixed, state: (lambda y, new: (y * 1.01, new))(*step(fixed, state))
        return program

    rows = []
    wrong = replace(decode.competitors()[0], build=off)
    race.Race([wrong], race.Settings(rounds=2, sets=1)).run(TINY, rows)
    assert rows[0].status == "wrong" and "output is off by" in rows[0].reason
    assert not rows[0].seconds


def test_bytes_and_lengths_are_counted_as_agreed():
    w = replace(TINY, batch=5, stored=10, kv_heads=2)
    assert w.lengths.tolist() == [2, 4, 6, 8, 10]
    assert w.bytes == 30 * 2 * 2 * 4 * 4
    assert replace(w, window=3).bytes == 14 * 2 * 2 * 4 * 4
    assert replace(w, store="int8").bytes == 30 * 2 * 2 * (4 + 4)


def test_every_step_is_the_same_one():
    program = decode._flax_attn(replace(TINY, stored=7))
    placed = program.place(replace(TINY, stored=7).inputs())
    program.compile(placed)
    first, second = (np.asarray(program.run(placed)) for _ in range(2))
    assert np.array_equal(first, second) and placed[1].length.tolist() == [7]


def test_the_preset_has_the_sizes_that_were_promised():
    works = tasks("decode")
    assert {512, 2048, 8192, 32768} == {w.length for w in works}
    assert {1, 8, 64} == {w.batch for w in works} and {0, 3} == {w.kv_heads for w in works}
    assert {"", "int8", "latent"} == {w.store for w in works}
    assert any(w.window for w in works) and any(w.stored == 1000 for w in works)
