"""Running statistics: torch averages unbiased variances, nnx biased ones, call by call."""

from importlib import import_module

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import Recording, compare, record

torch = pytest.importorskip("torch", reason="the harness compares with torch")
BIASED = import_module("flax_attn.parity.rows.state").BIASED

ONCE = {"dtypes": ("float64",), "eager": False, "train": True}
C = 4
X = np.random.RandomState(0).standard_normal((3, C, 5))


class Theirs(torch.nn.Module):
    """Normalises each of `parts` of its input with the same module, one after another."""

    def __init__(self, parts, momentum=0.3):
        super().__init__()
        self.parts, self.norm = parts, torch.nn.BatchNorm1d(C, momentum=momentum)

    def forward(self, x):
        return torch.cat([self.norm(x[..., part]) for part in self.parts], -1)


class Mine(nnx.Module):
    def __init__(self, parts, momentum=0.7):
        self.parts = tuple(parts)
        self.norm = nnx.BatchNorm(C, momentum=momentum, use_fast_variance=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        of = [self.norm(x[..., part].swapaxes(1, 2)).swapaxes(1, 2) for part in self.parts]
        return jnp.concatenate(of, -1)


WHOLE, HALVES = [slice(None)], [slice(0, 2), slice(2, 5)]
CALLS = {
    "once": WHOLE,
    "twice with the same input": 2 * WHOLE,
    "twice with other numbers of elements": HALVES,
    "three times": [*HALVES, slice(1, 5)],
}


@pytest.mark.nightly
@pytest.mark.parametrize("calls", CALLS)
def test_the_factor_of_a_variance_is_allowed_for_each_call(calls):
    report = compare(Theirs(CALLS[calls]), Mine(CALLS[calls]), X, **ONCE)
    assert report.certain, str(report)
    assert BIASED.format("norm.var") in report.notes, report


@pytest.mark.nightly
def test_a_norm_alone_and_a_comparison_without_taps():
    norm = nnx.BatchNorm(C, momentum=0.7, use_fast_variance=False, rngs=nnx.Rngs(0))
    report = compare(torch.nn.BatchNorm1d(C, momentum=0.3), norm, X[..., 0], **ONCE)
    assert report.certain, str(report)
    report = compare(Theirs(HALVES), Mine(HALVES), X, taps=False, **ONCE)
    assert report.certain, str(report)


@pytest.mark.nightly(but=["once"])
@pytest.mark.parametrize("calls", ["once", "three times"])
def test_a_recording_of_an_earlier_version_allows_the_factor(calls, tmp_path, monkeypatch):
    """It has no `bessel`."""
    side = import_module("flax_attn.parity.sides.torch.side")
    monkeypatch.setattr(side.Recorder, "_note_bessel", lambda *_: None)
    file = tmp_path / "norm.safetensors"
    record(Theirs(CALLS[calls]), (X,), file, dtypes=("float64",), train=True)
    report = compare(Recording(file), Mine(CALLS[calls]), eager=False)
    assert report.certain, str(report)


@pytest.mark.nightly(but=["once"])
@pytest.mark.parametrize("calls", CALLS)
def test_another_momentum_or_number_of_calls_is_named(calls):
    report = compare(Theirs(CALLS[calls]), Mine(CALLS[calls], momentum=0.6), X, **ONCE)
    assert {"norm.mean", "norm.var"} <= {row.name for row in report.failed}, report
    slices = CALLS[calls]

    class Again(Mine):
        def __call__(self, x):
            self.norm(x.swapaxes(1, 2))
            return super().__call__(x)

    report = compare(Theirs(slices), Again(slices), X, **ONCE)
    assert "norm.var" in {row.name for row in report.failed}, report
