"""Hints about single submodules: norms, gates beside them, dropout, and what rounding alone did."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import compare
from flax_attn.parity.report import UNSURE
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

D = 6
X = np.random.RandomState(0).standard_normal((3, 5, D))
QUICK = {"dtypes": ("float64",), "jit": False, "grads": False}


class Norm(torch.nn.Module):
    """RMS norm, or layer norm, with a gain of w or 1 + w, and a gate before or after it."""

    def __init__(self, offset=0.0, gate="", eps=1e-5, centred=False, act="silu", gain=True):
        super().__init__()
        self.eps, self.offset, self.gated, self.centred, self.act = eps, offset, gate, centred, act
        if gain:
            self.weight = torch.nn.Parameter(torch.ones(D))

    def forward(self, x, gate=None):
        opened = None if gate is None else getattr(torch.nn.functional, self.act)(gate)
        x = x * opened if self.gated == "before" else x
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        x = x * (self.weight + self.offset) if hasattr(self, "weight") else x
        return x * opened if self.gated == "after" else x


class NormPort(nnx.Module):
    def __init__(self, offset=0.0, gate="", eps=1e-5, centred=False, act="silu", gain=True):
        self.eps, self.offset, self.gated, self.centred, self.act = eps, offset, gate, centred, act
        self.weight = nnx.Param(jnp.ones(D)) if gain else None

    def __call__(self, x, gate=None):
        opened = None if gate is None else getattr(jax.nn, self.act)(gate)
        x = x * opened if self.gated == "before" else x
        x = x - x.mean(-1, keepdims=True) if self.centred else x
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.eps)
        x = x if self.weight is None else x * (self.weight[...] + self.offset)[None, None]
        return x * opened if self.gated == "after" else x


class Theirs(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gate = torch.nn.Linear(D, D) if options.get("gate") else None
        self.norm, self.out = Norm(**options), torch.nn.Linear(D, 4)

    def forward(self, x):
        given = (x,) if self.gate is None else (x, self.gate(x))
        return self.out(self.norm(*given))


class Ours(nnx.Module):
    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.gate = nnx.Linear(D, D, rngs=rngs) if options.get("gate") else None
        self.norm, self.out = NormPort(**options), nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
        given = (x,) if self.gate is None else (x, self.gate(x))
        return self.out(self.norm(*given))


def said(options, **wrong):
    theirs = options | {"gate": {"": "", None: ""}.get(options.get("gate"), options.get("gate"))}
    report = compare(Theirs(**theirs), Ours(**{**theirs, **wrong}), X / 10, **QUICK)
    assert not report.ok and report.first.tap == "norm"
    return report.first.hint


BEFORE, AFTER = dict(gate="before"), dict(gate="after")
NORMS = {
    "1 + w": ({}, dict(offset=1.0), "as a factor, where torch has the sum"),
    "1 + w, centred": (
        dict(centred=True),
        dict(offset=1.0),
        "as a factor, where torch has the sum",
    ),
    "w": (dict(offset=1.0), dict(offset=0.0), "a gain or a scale of w, where torch's is 1 + w"),
    "w, centred": (
        dict(offset=1.0, centred=True),
        dict(offset=0.0),
        "a gain or a scale of w, where torch's is 1 + w",
    ),
    "epsilon, 1 + w": (dict(offset=1.0), dict(eps=1e-6), "another epsilon: 1e-06, not 1e-05"),
    "epsilon, gate after": (AFTER, dict(eps=1e-6), "another epsilon: 1e-06, not 1e-05"),
    "epsilon, gate before": (BEFORE, dict(eps=1e-6), "another epsilon: 1e-06, not 1e-05"),
    "epsilon, sigmoid": (
        AFTER | dict(act="sigmoid"),
        dict(eps=1e-8),
        "another epsilon: 1e-08, not 1e-05",
    ),
    "epsilon, odd": ({}, dict(eps=3.7e-4), "another epsilon: 0.00037, not 1e-05"),
    "epsilon, odd, gate after": (AFTER, dict(eps=3.7e-4), "another epsilon: 0.00037, not 1e-05"),
    "epsilon, no gain": (dict(gain=False), dict(eps=1e-6), "another epsilon: 1e-06, not 1e-05"),
    "gate after": (
        BEFORE,
        dict(gate="after"),
        "the product (test_hints_modules.py:34) after the pr",
    ),
    "gate before": (AFTER, dict(gate="before"), "after the product (test_hints_modules.py:38), to"),
    "gate missing": (AFTER, dict(gate="missing"), "the silu (functional.py"),
    "sigmoid": (AFTER, dict(act="sigmoid"), "the sigmoid in the place of SiLU"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_named(name):
    options, wrong, words = NORMS[name]
    assert words in said(options, **wrong)


NEAR_NORMS = {
    "more added": ({}, dict(offset=np.arange(D) / 7), "1 + w"),
    "less added": (dict(offset=1.0), dict(offset=np.arange(D) / 7), "of w"),
    "centred": ({}, dict(centred=True), "epsilon"),
    "another gate": (AFTER, dict(act="tanh"), "epsilon"),
    "another gate before": (BEFORE, dict(act="tanh"), "after the gate"),
}


@pytest.mark.nightly(but=["another gate before"])
@pytest.mark.parametrize("name", NEAR_NORMS)
def test_a_similar_norm_gets_no_wrong_hint(name):
    options, wrong, words = NEAR_NORMS[name]
    assert words not in said(options, **wrong)


class Drops(torch.nn.Module):
    """Attention whose weights are dropped, by a module or by a function."""

    def __init__(self, rate, module):
        super().__init__()
        self.q, self.v = torch.nn.Linear(D, 4), torch.nn.Linear(D, 4)
        self.dropout_rate, self.module = rate, module
        self.drop = torch.nn.Dropout(rate) if module else None
        self.inner = Mixes(self)

    def forward(self, x):
        q = self.q(x)
        return self.inner(torch.softmax(q @ q.mT, -1), self.v(x))


class Mixes(torch.nn.Module):
    def __init__(self, owner):
        super().__init__()
        self.owner = [owner]
        self.dropout_rate = owner.dropout_rate

    def forward(self, weights, v):
        owner = self.owner[0]
        if owner.drop is not None:
            return owner.drop(weights) @ v
        return torch.nn.functional.dropout(weights, self.dropout_rate, self.training) @ v


class DropsPort(nnx.Module):
    def __init__(self, rate, factor):
        rngs = nnx.Rngs(0)
        self.q, self.v = nnx.Linear(D, 4, rngs=rngs), nnx.Linear(D, 4, rngs=rngs)
        self.rate, self.factor = rate, factor
        self.inner = MixesPort(rate, factor)

    def __call__(self, x):
        q = self.q(x)
        return self.inner(jax.nn.softmax(q @ q.mT), self.v(x))


class MixesPort(nnx.Module):
    def __init__(self, rate, factor):
        self.rate, self.factor = rate, factor
        self.deterministic = True

    def set_view(self, deterministic=None, **kwargs):
        self.deterministic = bool(deterministic)

    def __call__(self, weights, v):
        keep = jax.random.bernoulli(jax.random.key(3), 1 - self.rate, weights.shape)
        return jnp.where(keep, weights * self.factor, 0.0) @ v


KEPT = [(0.1, 1 / 0.1, True), (0.3, 1 / 0.3, True), (0.3, 1 / 0.4, False), (0.3, 1.0, False)]


@pytest.mark.nightly(but=["kept5-True"])
@pytest.mark.parametrize(
    ("kept", "module"),
    with_nightly(
        product(KEPT, [False, True]), commit=[(KEPT[0], False), (KEPT[1], True), (KEPT[2], True)]
    ),
)
def test_a_keep_rate_inverted_is_named(kept, module):
    rate, factor, named = kept
    theirs, ours = Drops(rate, module), DropsPort(rate, factor)
    report = compare(theirs, ours, X, train=True, **QUICK)
    assert not report.ok
    said = f"another kept share, 1 less the dropout rate: {rate:g}, torch {1 - rate:g}"
    assert (report.first.hint == said) is named, report.first


class Down(torch.nn.Module):
    def __init__(self, near):
        super().__init__()
        self.down = torch.nn.Linear(2 * D, D, bias=False)
        half = np.random.RandomState(1).standard_normal((D, D))
        other = -half * (1 + near * np.random.RandomState(2).standard_normal((D, D)))
        self.down.weight.data = torch.tensor(np.concatenate([half, other], 1))

    def forward(self, x):
        return torch.relu(self.down(x))


class Reordered(nnx.Linear):
    """The same sum in another order, times a factor."""

    factor = 1.0

    def __call__(self, x):
        return self.factor * (x[..., ::-1] @ self.kernel[...][::-1])


class DownPort(nnx.Module):
    def __init__(self, factor=1.0):
        self.down = Reordered(2 * D, D, use_bias=False, rngs=nnx.Rngs(0))
        self.down.factor = factor

    def __call__(self, x):
        return jax.nn.relu(self.down(x))


@pytest.mark.nightly(but=["1.0-1.000000001-False"])
@pytest.mark.parametrize(
    ("near", "factor", "cannot"),
    [(1e-8, 1.0, True), (1e-6, 1.0, True), (1.0, 1 + 1e-9, False), (1e-8, 1.5, False)],
)
def test_a_step_known_only_by_its_rounding_is_named(near, factor, cannot):
    """Terms of size one whose sum is near zero, in two orders: within torch's own noise."""
    x = np.concatenate([X, X], -1)
    report = compare(Down(near), DownPort(factor), x, weights="given", **QUICK)
    assert (report.verdict == UNSURE) is cannot
    if not cannot:
        assert report.first.tap == "down"
        assert "this input cannot tell" not in report.first.hint


SCORE = np.random.RandomState(4).standard_normal((2, 5, 4))


class Scored(torch.nn.Module):
    """Scores that are what is left of queries and keys that nearly cancel."""

    def forward(self, q, k):
        return torch.softmax(q @ k.mT * 1e6, -1) @ k


class ScoredPort(nnx.Module):
    scale = 1e6

    def __call__(self, q, k):
        scores = (q[..., ::-1] @ k[..., ::-1].mT) * self.scale
        return tap("weights", jax.nn.softmax(tap("scores", scores))) @ k


@pytest.mark.nightly(but=["1100000.0"])
@pytest.mark.parametrize("scale", [1e6, 1.1e6])
def test_scores_known_only_by_their_rounding_are_named(scale):
    q = np.concatenate([SCORE, SCORE], -1)
    k = np.concatenate([SCORE, -SCORE * (1 + 1e-6 * SCORE)], -1)
    ours = ScoredPort()
    ours.scale = scale
    report = compare(Scored(), ours, q, k, **QUICK)
    assert (report.verdict == UNSURE) is (scale == 1e6)
    if scale != 1e6:
        assert report.first.tap == "scores"
        assert "this input cannot tell" not in report.first.hint


class Scaled(torch.nn.Module):
    """A norm written by hand, whose numbers have names of their own."""

    def __init__(self, eps, names, centred=False):
        super().__init__()
        self.gain, self.shift, held = names
        self.centred = centred
        setattr(self, self.gain, torch.nn.Parameter(torch.ones(D)))
        if self.shift:
            setattr(self, self.shift, torch.nn.Parameter(torch.zeros(D)))
        if held:
            setattr(self, held, eps)
        self.get = lambda: eps

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.get()) * getattr(self, self.gain)
        return x + getattr(self, self.shift) if self.shift else x


class ScaledPort(nnx.Module):
    def __init__(self, eps, names, centred, offset=0.0):
        self.gain, self.shift, _ = names
        self.eps, self.centred, self.offset = eps, centred, offset
        setattr(self, self.gain, nnx.Param(jnp.ones(D)))
        if self.shift:
            setattr(self, self.shift, nnx.Param(jnp.zeros(D)))

    def __call__(self, x):
        x = x - x.mean(-1, keepdims=True) if self.centred else x
        gain = (getattr(self, self.gain)[...] + self.offset)[None, None]
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.eps) * gain
        return x + getattr(self, self.shift)[None, None] if self.shift else x


class Holder(nnx.Module):
    def __call__(self, x):
        return self.norm(x)


NAMED = [("gamma", "", "eps"), ("scale", "", "epsilon"), ("g", "b", "eps"), ("gamma", "beta", "")]


def by_hand(names, centred, eps, wrong):
    theirs, ours = torch.nn.Sequential(), Holder()
    theirs.norm = Scaled(eps, names, centred)
    ours.norm = ScaledPort(names=names, centred=centred, **wrong)
    report = compare(theirs, ours, X / 10, **QUICK)
    assert not report.ok and report.first.tap == "norm"
    return report.first.hint


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("names", "centred"), with_nightly(product(NAMED, [False, True]), commit=3)
)
def test_a_norm_written_as_a_function_is_named(names, centred):
    for wrong, words in ((1e-6, "1e-06"), (3.7e-4, "0.00037")):
        said = by_hand(names, centred, 1e-5, dict(eps=wrong))
        assert said == f"another epsilon: {words}, not 1e-05"
    said = by_hand(names, centred, 1e-5, dict(eps=1e-5, offset=1.0))
    assert said == f"1 + norm.{names[0]} as a factor, where torch has norm.{names[0]}"


def test_a_norm_with_an_unusual_epsilon_is_named():
    said = by_hand(("gamma", "", "eps"), False, 2.3e-4, dict(eps=1e-5))
    assert said == "another epsilon: 1e-05, not 0.00023"
