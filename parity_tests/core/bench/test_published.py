"""Layers of published models, made small: proven against their classes, timed, shown."""

from dataclasses import replace

import pytest

from flax_attn.bench import published, race, reader
from flax_attn.bench.task import FORWARD
from flax_attn.command import cli
from flax_attn.parity.cases.case import has_torch

from .conftest import tasks

pytestmark = pytest.mark.usefixtures("promotion")
SMALL = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
LLAMA, LOCAL, SWIN = "Llama 3 8B", "gpt-oss 20B, local", "Swin T"
live = pytest.mark.skipif(not has_torch(), reason="the classes are torch's")


def small(name):
    of = published.MODELS[name]
    if name == SWIN:
        return replace(of, config={**of.config, "hidden_size": 12})
    window = {"sliding_window": 3} if of.window else {}
    return replace(of, config={**of.config, **SMALL, **window})


@pytest.fixture(autouse=True)
def small_models(monkeypatch):
    monkeypatch.setattr(published, "MODELS", {name: small(name) for name in (LLAMA, LOCAL, SWIN)})
    published._proven.cache_clear()
    yield
    published._proven.cache_clear()


@pytest.mark.nightly
@live
def test_the_preset_runs_and_prints(tmp_path, capsys):
    path = tmp_path / "layers.json"
    given = ["--seq", "12", "--rounds", "2", "--seconds", "0.01", "--grad", "--json", str(path)]
    assert cli.main(["bench", "--preset", "layers", *given]) == 0
    assert "time over that of flax_attn: Llama 3 8B, width 20" in capsys.readouterr().out
    rows = {(row.table.split(", width")[0], row.competitor): row for row in reader.read(path).rows}
    timed = {key for key, row in rows.items() if row.status == "timed"}
    for name in (LLAMA, LOCAL, SWIN):
        assert {(name, "flax_attn"), (name, "transformers, eager")} <= timed
    assert {(LLAMA, "transformers, sdpa"), (LLAMA, "flax.nnx")} <= timed and len(timed) == 8
    assert rows[LOCAL, "flax.nnx"].reason == rows[LOCAL, "transformers, sdpa"].reason
    assert rows[LOCAL, "flax.nnx"].reason == "it has no sinks"
    assert rows[SWIN, "flax_attn"].cells["T"] == "49" and "error" in rows[SWIN, "flax_attn"].figures


@pytest.mark.nightly(but=["many tokens"])
@live
@pytest.mark.parametrize("axis, size", [(1, 12), (2, 20)], ids=["many tokens", "their own width"])
def test_a_wrong_layer_is_not_timed(axis, size, monkeypatch):
    """A fault that only one of the two proofs can see."""

    def called(of):
        return lambda layer, x: layer(x) * (1.01 if x.shape[axis] == size else 1.0)

    monkeypatch.setattr(published, "_called", called)
    monkeypatch.setattr(published, "WIDE", 8)
    rows = []
    ours = race.Race(published.competitors()[:1], race.Settings(rounds=1))
    ours.run(published.layer(LLAMA, 12, FORWARD), rows)
    assert rows[0].status == "wrong" and rows[0].reason and not rows[0].seconds


def test_a_narrow_layer_keeps_its_groups():
    of = published.MODELS[LOCAL].narrow
    assert of.config["num_attention_heads"] == 2 and of.config["num_key_value_heads"] == 1
    assert of.window == 3 and of.config["head_dim"] == 6


def test_the_preset_has_the_sizes_that_were_promised(monkeypatch):
    monkeypatch.undo()
    works = tasks("layers", "--grad")
    assert {512, 1024, 2048, 4096} < {w.length for w in works}
    assert {w.model for w in works} == {*published.MODELS} and len(works) == 28
    assert {w.features for w in works} == {4096, 3584, 2880, 2048, 96}
    assert {w.of.window for w in works if w.model == LOCAL} == {128}
    assert all(w.length % 49 == 0 for w in works if w.model == SWIN)
