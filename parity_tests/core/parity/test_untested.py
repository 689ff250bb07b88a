"""Notes of reports without a difference, and steps that get a wrong input.

Weights whose gradients are zero on both sides, and dropout that eval mode leaves out, are named.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from flax_attn import GroupedQueryAttention
from flax_attn.parity import ParityError, compare
from flax_attn.parity.cases.home import Home

torch = pytest.importorskip("torch", reason="the harness compares with torch")

QUICK = {"dtypes": ("float64",), "eager": False}


class Theirs(torch.nn.Module):
    """Gated attention of normed inputs, with dropout between the weights and the values."""

    def __init__(self, rate=0.25):
        super().__init__()
        self.norm, self.gate = torch.nn.LayerNorm(6), torch.nn.Linear(6, 4)
        self.q, self.k = torch.nn.Linear(6, 5), torch.nn.Linear(6, 5)
        self.v, self.drop = torch.nn.Linear(6, 4), torch.nn.Dropout(rate)

    def forward(self, x):
        y = self.norm(x)
        weights = torch.softmax(self.q(y) @ self.k(y).mT * 5**-0.5, -1)
        return self.drop(weights) @ self.v(y) * torch.sigmoid(self.gate(y))


class Ours(nnx.Module):
    def __init__(self, gates="the normed input", rate=None):
        made = {"rngs": nnx.Rngs(0)}
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, use_fast_variance=False, **made)
        self.q, self.k = nnx.Linear(6, 5, **made), nnx.Linear(6, 5, **made)
        self.v, self.gate = nnx.Linear(6, 4, **made), nnx.Linear(6, 4, **made)
        self.drop = (lambda x: x) if rate is None else nnx.Dropout(rate, **made)
        self.gates = gates

    def __call__(self, x):
        y = self.norm(x)
        weights = jax.nn.softmax(self.q(y) @ self.k(y).mT * 5**-0.5, -1)
        gate = jax.nn.sigmoid(self.gate(x if self.gates == "the input" else y))
        return self.drop(weights) @ self.v(y) * gate


def report(theirs, ours, length=3, **options):
    x = np.random.RandomState(1).standard_normal((2, length, 6))
    return compare(theirs, ours, x, **QUICK, **options)


@pytest.mark.nightly
def test_weights_that_an_input_does_not_test_are_named():
    (note,) = [n for n in report(Theirs(0), Ours(), length=1).notes if "does not test" in n]
    assert "q.kernel" in note and "k.bias" in note and "v.kernel" not in note
    assert not any("does not test" in note for note in report(Theirs(0), Ours()).notes)
    (note,) = compare(Theirs(0), Ours(), np.ones((2, 3, 6)) * np.arange(6), **QUICK).notes
    assert "does not test" in note and "q.kernel" in note and "v.kernel" not in note


@pytest.mark.nightly
def test_dropout_that_only_torch_has_is_reported_in_eval_mode():
    told = "torch has dropout (drop) that Flax does not show: it is off in eval mode"
    assert any(note.startswith(told) for note in report(Theirs(), Ours()).notes)
    for theirs, ours in ((Theirs(), Ours(rate=0.25)), (Theirs(0), Ours())):
        assert not any("dropout" in note for note in report(theirs, ours).notes)
    with pytest.raises(ParityError, match="torch draws dropout mask 1, in drop; Flax drew 0"):
        report(Theirs(), Ours(), train=True)


def test_a_step_that_is_given_another_value_is_told_which():
    found = report(Theirs(0), Ours(gates="the input"))
    assert "gate" in found.first.tap
    assert found.first.hint == "no norm at all"


def test_a_case_whose_file_is_gone_is_not_the_librarys():
    assert not Home("__main__", "/nowhere/of/a/kernel/1.py").is_own(GroupedQueryAttention)
