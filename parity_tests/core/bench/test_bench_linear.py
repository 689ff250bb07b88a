"""The forms of one recurrence, tiny: proven against the steps in float64, timed, shown."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from flax_attn.bench import linear, presets, race, result
from flax_attn.bench.settings import Settings
from flax_attn.bench.workload import BOTH, DELTA, Workload
from flax_attn.command import cli
from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.judge import allclose

TINY = Workload(70, 4, 3, layer=DELTA)
pytestmark = pytest.mark.usefixtures("promotion")


@pytest.mark.nightly
def test_the_preset_runs_and_prints(tmp_path, capsys):
    path = tmp_path / "linear.json"
    given = ["--seq", "70", "--heads", "3", "--width", "4", "--rounds", "2", "--seconds", "0.01"]
    assert cli.main(["bench", "--preset", "linear", *given, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "time over that of flax_attn: gated delta rule, 3 heads of width 4, float32" in told
    rows = result.read(path).rows
    names = {"flax_attn", "flax_attn, scan", "flax_attn, softmax"}
    names |= {"transformers, chunked"} if has_torch() and find_spec("transformers") else set()
    names |= {"fla, chunked"} if has_torch() and find_spec("fla") else set()
    timed = [row for row in rows if row.status == "timed"]
    assert {row.competitor for row in timed} == names and len(timed) == 2 * len(names)
    assert all(row.reason for row in rows if row.status != "timed")


def form(change):
    """The chunked form after a change to what it is given."""
    call = linear._recurrence(linear.CHUNK)
    return partial(linear._jax, lambda held: call(change(*held)))


@pytest.mark.nightly(but=["no gradient of the decay"])
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, g, beta: (q, k, v, g * 1.01, beta),
        lambda q, k, v, g, beta: (q, k, v, g, beta * 1.01),
        lambda q, k, v, g, beta: (q, k, v, g.at[:, 64:].add(-0.01), beta),
        lambda q, k, v, g, beta: (q, k, v, jax.lax.stop_gradient(g), beta),
    ],
    ids=["decay", "strength", "a later chunk", "no gradient of the decay"],
)
def test_a_wrong_form_gets_no_time(change):
    build = form(change)
    wrong = replace(linear.competitors()[0], build=build, prove=partial(linear._prove, build))
    rows = []
    race.Race([wrong], Settings(rounds=1)).run(TINY, BOTH, rows)
    assert rows[0].status == "wrong" and "is off by" in rows[0].reason and not rows[0].seconds


def test_inputs_are_those_of_a_model():
    arrays = TINY.arrays()
    assert arrays["g"].shape == arrays["beta"].shape == (1, 70, 3) and arrays["g"].max() < 0
    assert 0 < arrays["beta"].min() and arrays["beta"].max() < 1
    assert allclose((arrays["k"] ** 2).sum(-1), np.ones((1, 70, 3), np.float32))


def test_the_preset_has_the_sizes_that_were_promised():
    works = presets.presets()["linear"].workloads()
    assert {w.length for w in works} == {2**n * 1024 for n in range(6)} and len(works) == 24
    assert {(w.heads, w.width) for w in works} == {(8, 64), (16, 64), (8, 128), (16, 128)}
    (one,) = presets.presets()["linear"].workloads(lengths=[7], heads=2, widths=[4])
    assert one == Workload(7, 4, 2, layer=DELTA)
