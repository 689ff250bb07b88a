"""A golden whose numbers were changed is refused by its name; it never judges a port."""

import json
import zlib

import numpy as np
import pytest

from flax_attn import GroupedQueryAttention, Rotary
from flax_attn.parity import Case, ParityError, judge
from flax_attn.parity.cases import golden
from flax_attn.parity.cases.collect import collect

VARIANT = "parity_tests.test_uniform_causal_average"


@pytest.fixture(scope="module")
def recorded():
    """The cases of one variant and what its committed golden holds of each."""
    cases = collect(VARIANT)[:2]
    stored, meta = golden._load(golden.path_of(cases[0]), "")
    found = {}
    for case in cases:
        entry = meta["cases"][str(case)]
        pieces = {dtype: stored[f"{entry['at']}/{dtype}"] for dtype in entry["results"]}
        found[str(case)] = (entry, pieces)
    return cases, found


@pytest.fixture
def written(recorded, tmp_path, monkeypatch):
    """The same written anew, as a recording writes it."""
    cases, found = recorded
    path = tmp_path / "goldens" / "uniform.npz"
    monkeypatch.setattr(golden, "path_of", lambda case: path)
    monkeypatch.setattr(golden, "_record_case", lambda case: found[str(case)])
    assert golden.record(cases) == path
    return cases, path


def changed(path, change, digest=True):
    """A file written again after `change(arrays, meta)`, with the digest it had or without one."""
    with np.load(path) as file:
        arrays = {name: array.copy() for name, array in file.items()}
    meta = json.loads(zlib.decompress(arrays["meta"].tobytes()))
    change(arrays, meta)
    if not digest:
        meta.pop("digest")
    arrays["meta"] = np.frombuffer(zlib.compress(json.dumps(meta).encode()), np.uint8)
    np.savez_compressed(path, **arrays)


def put(at, value):
    """A change of one of the numbers that are not zero, of the first case in float64."""

    def change(arrays, meta):
        place = np.flatnonzero(arrays["0/float64"])[at]
        arrays["0/float64"][place] = value(arrays["0/float64"][place])

    return change


def swapped(arrays, meta):
    arrays["0/float32"], arrays["0/float64"] = arrays["0/float64"], arrays["0/float32"]


def looser(arrays, meta):
    next(iter(meta["cases"].values()))["results"]["float64"]["facts"][-1][3] = 1e9


CHANGES = {
    "a NaN first": put(0, lambda x: np.nan),
    "an Inf last": put(-1, lambda x: np.inf),
    "a number a little larger": put(10, lambda x: x * 1.001),
    "one bit": put(10, lambda x: np.nextafter(x, 2)),
    "a zero": put(3, lambda x: 0.0),
    "two arrays in each other's place": swapped,
    "another scale of a gradient": looser,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_any_number_is_damage_and_no_verdict(change, written):
    (case, *_), path = written
    changed(path, change)
    with pytest.raises(ParityError, match=r"uniform.npz.* is damaged \(.*\): run `flax-attn"):
        case.report(live=False)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 10, -1])
def test_a_file_without_a_digest_is_read_but_never_a_number_that_is_none(at, value, written):
    (case, *_), path = written
    changed(path, put(at, lambda x: value), digest=False)
    with pytest.raises(ParityError, match=r"uniform.npz.* is damaged \(.*NaN or Inf.*\): run `fl"):
        case.report(live=False)


@pytest.mark.nightly
@pytest.mark.parametrize("digest", [True, False], ids=["with a digest", "without one"])
def test_what_was_recorded_is_replayed(digest, written):
    (case, *_), path = written
    changed(path, lambda arrays, meta: None, digest=digest)
    report = case.report(live=False, eager=False)
    assert report.ok and report.rows


def test_a_recorded_value_that_flax_has_no_longer_is_missed(written):
    (case, *_), path = written

    def renamed(arrays, meta):
        facts = next(iter(meta["cases"].values()))["results"]["float64"]["facts"]
        next(fact for fact in facts if fact[0] == "gradient")[1] = "gone"

    changed(path, renamed, digest=False)
    report = case.report(live=False, eager=False)
    assert {row.name for row in report.failed} == {"gone"}


def test_a_dtype_that_was_not_recorded_is_told(written):
    (case, *_), _ = written
    with pytest.raises(ParityError, match="is not recorded in float16: run `flax-attn"):
        golden.replay(case, ("float64", "float16"), eager=False)


@pytest.mark.parametrize("size", [(3, 4), (20, 20)], ids=str)
@pytest.mark.parametrize("worst", [np.finfo(np.float64).min, np.finfo(np.float64).max])
def test_a_recording_holds_numbers_alone_however_large_the_results(worst, size):
    x = np.random.RandomState(0).standard_normal(size)
    x[::2] = worst
    other = x.copy()
    other[0] = 3.0
    kept, again, off = (golden.sketch("scores", array) for array in (x, x.copy(), other))
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
