"""A golden whose numbers were changed is refused by its name; it never judges a port."""

import json

import numpy as np
import pytest

from flax_attn import GroupedQueryAttention, Rotary
from flax_attn.parity import Case, ParityError, Recording, judge
from flax_attn.parity.cases import golden
from flax_attn.parity.cases.collect import collect
from flax_attn.parity.recording.sketch import sketch
from flax_attn.parity.recording.store import CHECKSUM, KEY, opened, write
from flax_attn.weights.safetensors import read_described, write_file

VARIANT = "parity_tests.test_uniform_causal_average"


@pytest.fixture
def committed(tmp_path, monkeypatch):
    """The first case of a variant, and a copy of its committed golden, which it reads."""
    case = collect(VARIANT)[0]
    path = tmp_path / "uniform.safetensors"
    path.write_bytes(golden.path_of(case).read_bytes())
    monkeypatch.setattr(golden, "path_of", lambda case: path)
    return case, path


def rewritten(path, change):
    """The file written again after `change(entry)` of its first case, with right checksums."""
    facts, reader = opened(path, "")
    tensors = {name: reader.tensor({"tensor": name}) for name in reader.entries}
    change(facts["cases"])

    def written(writer):
        for name, x in tensors.items():
            writer.tensor(name, x)
        return facts

    write(path, written, packed=True)


def results(cases):
    return next(iter(cases.values()))["results"]["float64"]


def refused(case, why):
    with pytest.raises(ParityError, match=rf"uniform.safetensors is damaged \({why}\): run `flax-"):
        case.report(live=False)


@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_change_of_any_number_is_damage_and_no_verdict(place, bit, committed):
    case, path = committed
    entry, content = read_described(path)[0]["0/float64"], bytearray(path.read_bytes())
    content[entry.start if place == "first" else entry.start + entry.size - 1] ^= bit
    path.write_bytes(content)
    refused(case, "0/float64 is not what was recorded")


@pytest.mark.parametrize("change", ["another description", "tensors in each other's place"])
def test_a_change_of_what_a_number_is_of_is_damage(change, committed):
    case, path = committed
    entries, metadata = read_described(path)
    tensors = {name: entry.read(name) for name, entry in entries.items()}
    if change == "another description":
        facts, _ = opened(path, "")
        results(facts["cases"])["facts"][-1][3] = 1e9
        metadata[KEY] = json.dumps(facts)
    else:
        tensors |= {"0/float64": tensors["1/float64"], "1/float64": tensors["0/float64"]}
    write_file(path, tensors, {key: metadata[key] for key in (KEY, CHECKSUM)})
    refused(case, ".* not what was recorded")


@pytest.mark.parametrize(
    "change",
    [
        lambda cases: cases.update({name: 3 for name in cases}),
        lambda cases: next(iter(cases.values())).pop("sources"),
        lambda cases: results(cases).update(facts=[[1, 2]]),
        lambda cases: results(cases).update(numbers={"tensor": "none"}),
    ],
    ids=["no entry", "no sources", "other facts", "no numbers"],
)
def test_a_description_of_another_kind_is_damage(change, committed):
    case, path = committed
    rewritten(path, change)
    refused(case, ".*")


@pytest.mark.nightly
def test_what_was_recorded_is_replayed(committed):
    case, path = committed
    rewritten(path, lambda cases: None)
    report = case.report(live=False, eager=False)
    assert report.ok and report.rows


def test_a_recorded_value_that_flax_has_no_longer_is_missed(committed):
    case, path = committed

    def renamed(cases):
        facts = results(cases)["facts"]
        next(fact for fact in facts if fact[0] == "gradient")[1] = "gone"

    rewritten(path, renamed)
    report = case.report(live=False, eager=False)
    assert {row.name for row in report.failed} == {"gone"}


def test_a_dtype_that_was_not_recorded_is_told(committed):
    case, _ = committed
    with pytest.raises(ParityError, match="is not recorded in float16: run `flax-attn"):
        golden.replay(case, ("float64", "float16"), eager=False)


def test_a_golden_is_no_recording_of_one_module(committed):
    _, path = committed
    with pytest.raises(ParityError, match=r"holds sketches of cases, which `flax-attn parity` rea"):
        Recording(path)


def test_a_golden_of_an_older_version_is_to_be_recorded_again(committed):
    case, path = committed
    path.rename(path.with_suffix(".npz"))
    with pytest.raises(ParityError, match=r"uniform.npz is of flax_attn 0.3.*: run `flax-attn par"):
        case.report(live=False)


@pytest.mark.parametrize("size", [(3, 4), (20, 20)], ids=str)
@pytest.mark.parametrize("worst", [np.finfo(np.float64).min, np.finfo(np.float64).max])
def test_a_recording_holds_numbers_alone_however_large_the_results(worst, size):
    x = np.random.RandomState(0).standard_normal(size)
    x[::2] = worst
    other = x.copy()
    other[0] = 3.0
    kept, again, off = (sketch("scores", array) for array in (x, x.copy(), other))
    assert np.isfinite(kept).all()
    assert judge.exact(kept, again).ok and not judge.same_function(off, kept).ok


@pytest.mark.nightly
def test_a_case_of_a_notebook_reads_the_librarys_golden():
    asked = {"config": {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}}
    cell = "made = Case(layer, lambda: {**config, 'rotary': r}, name=name, x=(2, 34, 11))"
    given = {"Case": Case, "layer": GroupedQueryAttention, "name": "rotary,layout=half", **asked}
    found = {}
    for layout in ("half", "interleaved"):
        names = {**given, "r": Rotary(layout=layout), "__name__": "__main__"}
        exec(compile(cell, "/nowhere/of/a/kernel/1.py", "exec"), names)
        found[layout] = names["made"].report(live=False, eager=False)
    assert found["half"].ok
    assert not found["interleaved"].ok and found["interleaved"].first.tap in ("query", "scores")
    with pytest.raises(ParityError, match="stand in no file"):
        golden.record([names["made"]])
