"""The forms of one recurrence, tiny: proven against the steps in float64, timed, shown."""

from dataclasses import replace
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from flax_attn.bench import linear, race, reader
from flax_attn.bench.attention import of_jax
from flax_attn.bench.linear import Recurrence
from flax_attn.bench.task import BOTH
from flax_attn.command import cli
from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.judge import allclose

from .conftest import tasks

TINY = Recurrence(70, 4, 3, which=BOTH)
pytestmark = pytest.mark.usefixtures("promotion")


@pytest.mark.nightly
def test_the_preset_runs_and_prints(tmp_path, capsys):
    path = tmp_path / "linear.json"
    given = ["--seq", "70", "--heads", "3", "--width", "4", "--rounds", "2", "--seconds", "0.01"]
    assert cli.main(["bench", "--preset", "linear", *given, "--json", str(path)]) == 0
    told = capsys.readouterr().out
    assert "time over that of flax_attn: gated delta rule, 3 heads of width 4, float32" in told
    rows = reader.read(path).rows
    names = {"flax_attn", "flax_attn, scan", "flax_attn, softmax"}
    names |= {"transformers, chunked"} if has_torch() and find_spec("transformers") else set()
    names |= {"fla, chunked"} if has_torch() and find_spec("fla") else set()
    timed = [row for row in rows if row.status == "timed"]
    assert {row.competitor for row in timed} == names and len(timed) == 2 * len(names)
    assert all(row.reason for row in rows if row.status != "timed")


@pytest.mark.nightly(but=["no gradient of the decay"])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: {**x, "g": x["g"] * 1.01},
        lambda x: {**x, "beta": x["beta"] * 1.01},
        lambda x: {**x, "g": x["g"].at[:, 64:].add(-0.01)},
        lambda x: {**x, "g": jax.lax.stop_gradient(x["g"])},
    ],
    ids=["decay", "strength", "a later chunk", "no gradient of the decay"],
)
def test_a_wrong_form_is_not_timed(change):
    call = linear.recurrence(linear.CHUNK)
    build = of_jax(lambda task: lambda inputs: call(change(inputs)))
    rows = []
    wrong = replace(linear.competitors()[0], build=build)
    race.Race([wrong], race.Settings(rounds=1)).run(TINY, rows)
    assert rows[0].status == "wrong" and "is off by" in rows[0].reason and not rows[0].seconds


def test_inputs_are_those_of_a_model():
    arrays = TINY.inputs()
    assert arrays["g"].shape == arrays["beta"].shape == (1, 70, 3) and arrays["g"].max() < 0
    assert 0 < arrays["beta"].min() and arrays["beta"].max() < 1
    assert allclose((arrays["k"] ** 2).sum(-1), np.ones((1, 70, 3), np.float32))


def test_the_preset_has_the_sizes_that_were_promised():
    works = tasks("linear", "--grad")
    assert {w.length for w in works} == {2**n * 1024 for n in range(6)} and len(works) == 24
    assert {(w.heads, w.width) for w in works} == {(8, 64), (16, 64), (8, 128), (16, 128)}
    (one,) = tasks("linear", "--seq", "7", "--heads", "2", "--width", "4", "--grad")
    assert one == Recurrence(7, 4, 2, which=BOTH)
