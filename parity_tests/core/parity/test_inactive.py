"""Clamps and branches that a run never reaches are listed in one note."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import compare

torch = pytest.importorskip("torch", reason="the harness compares with torch")

ONCE = {"dtypes": ("float64",), "eager": False}
X = np.random.RandomState(0).standard_normal((3, 6))
NOTE = "never active in this run, so not tested: "


class Clamp(torch.nn.Module):
    def __init__(self, most):
        super().__init__()
        self.most = most

    def forward(self, x):
        return x.clamp(-self.most, self.most)


class Theirs(torch.nn.Module):
    """Clamps twice, once by a submodule and once in place, and branches by a threshold."""

    def __init__(self, inner, outer, threshold):
        super().__init__()
        self.clip, self.outer, self.threshold = Clamp(inner), outer, threshold

    def forward(self, x):
        y = self.clip(x) * 1.0
        y.clamp_(max=self.outer)
        return torch.where(y > self.threshold, 2 * y, y)


class Mine(nnx.Module):
    def __init__(self, inner, outer, threshold):
        self.inner, self.outer, self.threshold = inner, outer, threshold

    def __call__(self, x):
        y = jnp.minimum(jnp.clip(x, -self.inner, self.inner), self.outer)
        return jnp.where(y > self.threshold, 2 * y, y)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ((9.0, 9.0, 9.0), ["clamp in clip", "clamp in the module", "where in the module"]),
        ((1.0, 9.0, 0.0), ["clamp in the module"]),
        ((9.0, 0.5, -9.0), ["clamp in clip", "where in the module"]),
        ((1.0, 0.5, 0.0), []),
    ],
)
def test_one_note_lists_what_was_never_active(settings, names):
    report = compare(Theirs(*settings), Mine(*settings), X, **ONCE)
    assert report.certain, report
    notes = [note for note in report.notes if note.startswith(NOTE)]
    assert notes == ([NOTE + ", ".join(names)] if names else []), report.notes
    assert all(note in str(report) for note in notes)


def test_parts_active_in_one_of_several_calls_are_not_listed():
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.clip = Clamp(1.0)

        def forward(self, x):
            return self.clip(x) + self.clip(x / 100)

    class TwiceToo(nnx.Module):
        def __call__(self, x):
            return jnp.clip(x, -1, 1) + jnp.clip(x / 100, -1, 1)

    report = compare(Twice(), TwiceToo(), X, **ONCE)
    assert not [note for note in report.notes if note.startswith(NOTE)], report
