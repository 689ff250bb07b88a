"""Hints name a mistake whose values they have computed, and no similar mistake."""

from itertools import product

import numpy as np
import pytest

from flax_attn.parity import compare
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
pairs = pytest.importorskip("parity_tests.core.parity.hint_pairs")
Options, T = pairs.Options, pairs.T

X = np.random.RandomState(0).standard_normal((pairs.B, pairs.T, pairs.D))
QUICK = {"dtypes": ("float64",), "jit": False, "grads": False}


def hint_of(theirs, **wrong):
    report = compare(*pairs.pair(theirs, **wrong), X, **QUICK)
    assert not report.ok
    return report.first.hint


SEPARATE, FUSED = Options(), Options(order="3 n h")
TURNED = Options(base=1e4)
SHARED = Options(kv_heads=2)
RIGHT = {
    "separate": SEPARATE,
    "fused": FUSED,
    "turned": TURNED,
    "shared": SHARED,
    "gated": Options(gate="n 2 h"),
    "in part": Options(base=1e4, width=4),
    "window": Options(back=3),
    "averages": Options(empty="average"),
    "zeros": Options(empty="zeros"),
    "narrow": Options(base=1e4, narrow="tables"),
    "torch's own attention": Options(fused=True),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "taps"), with_nightly(product(RIGHT, [False, True]), commit=11))
def test_a_right_port_gets_no_hint(name, taps):
    report = compare(*pairs.pair(RIGHT[name], taps=taps), X, **QUICK)
    assert report.ok, report


WRONG = {
    "[H, 3, D]": (FUSED, dict(order="n 3 h"), "qkv reshaped as [2, 7, 4, 3, 6], another order"),
    "[H, D, 3]": (FUSED, dict(order="n h 3"), "qkv reshaped as [2, 7, 4, 6, 3], another order"),
    "[3, H, D]": (
        Options(order="n 3 h"),
        dict(order="3 n h"),
        "qkv reshaped as [2, 7, 3, 4, 6], another order",
    ),
    "[H, 3, D], turned": (
        Options(order="3 n h", base=1e4),
        dict(order="n 3 h"),
        "qkv reshaped as [2, 7, 4, 3, 6], another order",
    ),
    "gate": (Options(gate="n 2 h"), dict(gate="2 n h"), "q reshaped as [2, 7, 2, 4, 6], another"),
    "gate, the other way": (
        Options(gate="2 n h"),
        dict(gate="n 2 h"),
        "q reshaped as [2, 7, 4, 2, 6], another order",
    ),
    "buffer": (
        Options(base=1e4, narrow="frequencies"),
        dict(narrow=""),
        "frequencies computed in float32 in torch, a buffer made outside the call",
    ),
    "buffer, another base": (
        Options(base=5e5, narrow="frequencies"),
        dict(narrow=""),
        "frequencies computed in float32 in torch",
    ),
    "buffer of Flax": (TURNED, dict(narrow="frequencies"), "frequencies computed in float32 in Fl"),
    "tables": (
        Options(base=1e4, narrow="tables"),
        dict(narrow=""),
        "cosines and sines computed in float32 in torch",
    ),
    "base": (
        TURNED,
        dict(base=27000.0),
        "another base of the angles, 27000, where torch's is 1000",
    ),
    "base, odd": (
        TURNED,
        dict(base=777.77),
        "another base of the angles, 777.77, where torch's is",
    ),
    "base, in part": (
        Options(base=5e5, width=4),
        dict(base=1e4),
        "another base of the angles, 10000, where torch's is 500000",
    ),
    "window wide": (
        Options(back=3),
        dict(back=4),
        "a window 1 wider back: 5 keys, torch 4, itself included",
    ),
    "window narrow": (Options(back=3), dict(back=2), "a window 1 narrower back: 3 keys, torch 4"),
    "window wide ahead": (
        Options(back=2, ahead=2),
        dict(ahead=3),
        "a window 1 wider ahead: 6 keys, torch 5",
    ),
    "window two wide": (Options(back=2), dict(back=4), "a window 2 wider back: 5 keys, torch 3"),
    "torch averages": (
        Options(empty="average"),
        dict(empty="zeros"),
        "rows that see nothing: torch averages",
    ),
    "Flax averages": (
        Options(empty="zeros"),
        dict(empty="average"),
        "rows that see nothing: filled with 1 / 7, an average of the row, torch",
    ),
    "tiled": (SHARED, dict(tiled=True), "tiled, not repeated 2 times"),
    "repeated": (Options(kv_heads=2, tiled=True), dict(tiled=False), "each element repeated"),
    "not scaled": (SEPARATE, dict(scale=1.0), "not scaled"),
    "another scale": (SEPARATE, dict(scale=0.3), "another scale of the product"),
}


NAMED = [  # one of each kind of mistake
    ("[H, 3, D]", True),
    ("gate", True),
    ("buffer", True),
    ("tables", False),
    ("base", True),
    ("window wide", False),
    ("Flax averages", True),
    ("tiled", True),
    ("another scale", True),
]


@pytest.mark.nightly(but=["Flax averages-True", "another scale-True"])
@pytest.mark.parametrize(
    ("name", "taps"), with_nightly(product(WRONG, [False, True]), commit=NAMED)
)
def test_a_mistake_is_named(name, taps):
    theirs, wrong, words = WRONG[name]
    assert words in hint_of(theirs, taps=taps, **wrong)


NEAR = {  # with words that would be untrue
    "components reversed": (FUSED, dict(flip=True), "cut as"),
    "a base that is hardly another": (TURNED, dict(base=10000.01), "float32"),
    "slower by a half": (TURNED, dict(times=0.5), "another base"),
    "another width": (Options(base=1e4, width=4), dict(width=6), "another base"),
    "one place more": (Options(back=3), dict(also=(6, 0)), "a window"),
    "the first key": (Options(empty="average"), dict(empty="first"), "rows that see nothing"),
    "another scale": (SHARED, dict(scale=0.3), "tiled"),
    "a fused one with another scale": (FUSED, dict(scale=0.3), "cut as"),
    "a narrow one with another base": (
        Options(base=1e4, narrow="frequencies"),
        dict(base=5e5),
        "computed in float32 in torch",
    ),
}


UNTRUE = [(name, True) for name in ("components reversed", "slower by a half", "one place more")]


@pytest.mark.nightly(but=["slower by a half-True"])
@pytest.mark.parametrize(
    ("name", "taps"), with_nightly(product(NEAR, [False, True]), commit=UNTRUE)
)
def test_a_similar_mistake_gets_no_wrong_hint(name, taps):
    theirs, wrong, words = NEAR[name]
    assert words not in hint_of(theirs, taps=taps, **wrong)
