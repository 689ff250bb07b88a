"""Originals that show no softmax: fused attention in every call, and other normalisers."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import compare, judge
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
F = torch.nn.functional
from torch.nn.functional import scaled_dot_product_attention as held  # noqa: E402

B, T, N, K, H, D = 2, 5, 6, 3, 4, 6
X = np.random.RandomState(0).standard_normal((B, T, D))
QUICK = {"dtypes": ("float64",), "jit": False}
FUTURE = np.triu(np.ones((T, T), bool), 1)
BIAS = np.random.RandomState(1).standard_normal((N, T, T))


class Projected(torch.nn.Module):
    """Projections around `attend(q, k, v)`, heads before positions."""

    def __init__(self, attend, keys=N):
        super().__init__()
        self.attend, self.keys = attend, keys
        self.q, self.k, self.v = (torch.nn.Linear(D, n * H) for n in (N, keys, keys))
        self.o = torch.nn.Linear(N * H, D)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(-2))


def attended(**asked):
    """Torch's fused function, called with these."""

    def attend(q, k, v):
        given = {n: torch.tensor(x).to(q) if x is BIAS else x for n, x in asked.items()}
        return F.scaled_dot_product_attention(q, k, v, **given)

    return attend


class Port(nnx.Module):
    """A faithful port; each of its class's attributes can be another."""

    keys = N
    scale = H**-0.5
    hidden = FUTURE
    bias = np.zeros(())
    repeat = staticmethod(lambda x: jnp.repeat(x, N // x.shape[2], axis=2))
    normal = staticmethod(jax.nn.softmax)
    drop = staticmethod(lambda w: w)

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (
            nnx.Linear(D, n * H, rngs=rngs) for n in (N, self.keys, self.keys)
        )
        self.o = nnx.Linear(N * H, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], -1, H) for f in (self.q, self.k, self.v))
        k, v = self.repeat(k), self.repeat(v)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * self.scale
        scores = scores + jnp.broadcast_to(jnp.asarray(self.bias, x.dtype), scores.shape)
        scores = tap("scores", jnp.where(self.hidden[None, None], -jnp.inf, scores))
        weights = self.drop(tap("weights", self.normal(scores)))
        mixed = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return self.o(tap("context", mixed).reshape(*x.shape[:2], N * H))


def port(**parts):
    plain = {k: staticmethod(v) if callable(v) else v for k, v in parts.items()}
    return type("Other", (Port,), plain)()


def math(attend):
    """The same on torch's plain path."""

    def plain(*args):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return attend(*args)

    return plain


def by_name(q, k, v):
    return held(q, k, v, is_causal=True)


SEEN = np.zeros((T, T), bool)
WAYS = {
    "causal": (attended(is_causal=True), {}),
    "causal, held by name": (by_name, {}),
    "mask": (attended(attn_mask=torch.tensor(~FUTURE)), {}),
    "bias": (attended(attn_mask=BIAS), {"bias": BIAS, "hidden": SEEN}),
    "scale": (attended(scale=0.3), {"scale": 0.3, "hidden": SEEN}),
    "plain": (attended(), {"hidden": SEEN}),
    "groups": (attended(is_causal=True, enable_gqa=True), {"keys": K}),
}


PATHS = {"fused": lambda attend: attend, "math": math}
TURNS = [(way, ("fused", "math")[i % 2]) for i, way in enumerate(WAYS)]  # each way once


@pytest.mark.nightly
@pytest.mark.parametrize(("way", "path"), with_nightly(product(WAYS, PATHS), commit=TURNS))
def test_every_point_of_a_fused_call_is_compared(way, path):
    attend, parts = WAYS[way]
    theirs = Projected(PATHS[path](attend), parts.get("keys", N))
    report = compare(theirs, port(**parts), X, **QUICK)
    assert report.ok and not report.rewritten and not report.unpaired, report
    assert {"scores", "weights", "context"} <= {r.name for r in report.rows if r.kind == "tap"}
    assert not any("masked_fill" in note for note in report.notes)


def tiled(x):
    return jnp.tile(x, (1, 1, N // x.shape[2], 1))


WRONG = {
    "scale": ("causal", {"scale": H**-1.0}, "scores", "scale"),
    "no scale": ("bias", {"scale": 1.0}, "scores", "scale"),
    "the default scale": ("scale", {"scale": H**-0.5}, "scores", "scale"),
    "no causality": ("causal", {"hidden": SEEN}, "scores", "mask missing"),
    "a shifted mask": ("mask", {"hidden": np.triu(FUTURE, 2)}, "scores", "shifted"),
    "an inverted mask": ("mask", {"hidden": ~FUTURE}, "scores", "inverted"),
    "no bias": ("bias", {"bias": np.zeros(())}, "scores", "not added, where torch adds it"),
    "bias with the other sign": ("bias", {"bias": -BIAS}, "scores", "other sign"),
    "keys tiled": ("groups", {"repeat": tiled}, "scores", "tiled"),
    "a softmax in float32": (
        "causal",
        {"normal": lambda s: jax.nn.softmax(s.astype(jnp.float32)).astype(s.dtype)},
        "weights",
        "float32",
    ),
    "weights halved": ("causal", {"drop": lambda w: w / 2}, "context", "half of"),
}


NOW = [
    ("scale", "fused"),
    ("no causality", "math"),
    ("no bias", "fused"),
    ("keys tiled", "math"),
    ("a softmax in float32", "fused"),
    ("weights halved", "math"),
]


@pytest.mark.nightly(but=["no causality-math"])
@pytest.mark.parametrize(("fault", "path"), with_nightly(product(WRONG, PATHS), commit=NOW))
def test_a_fault_beside_a_fused_call_is_placed_and_named(fault, path):
    way, wrong, place, words = WRONG[fault]
    attend, parts = WAYS[way]
    theirs = Projected(PATHS[path](attend), parts.get("keys", N))
    report = compare(theirs, port(**parts | wrong), X, **QUICK)
    first = report.first
    assert first.tap == place and words in (first.hint or first.note), report
    assert f"DIFFERENT at {place} (value)" in str(report)


@jax.custom_vjp
def tripled_backward(x):
    return x


tripled_backward.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


BACKWARD = {
    "weights": {"drop": tripled_backward},
    "scores": {"normal": lambda s: jax.nn.softmax(tripled_backward(s))},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "path"),
    with_nightly(product(BACKWARD, PATHS), commit=[("weights", "fused"), ("scores", "math")]),
)
def test_gradients_of_the_points_are_known(place, path):
    theirs = Projected(PATHS[path](attended(is_causal=True)))
    report = compare(theirs, port(**BACKWARD[place]), X, **QUICK)
    assert (report.first.tap, report.first.kind) == (place, "gradient"), report
    assert [d.tap for d in report.divergences] == [place]


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", [False, True])
def test_dropout_inside_a_fused_call(wrong):
    class Dropped(Port):
        def drop(self, w):
            return self.dropout(w) * (1.1 if wrong else 1.0)

    theirs = Projected(attended(is_causal=True, dropout_p=0.4))
    report = compare(theirs, Dropped(), X, train=True, **QUICK)
    assert report.ok is not wrong, report
    assert not wrong or report.first.tap == "context"


def by_hand(q, k, v):
    scores = (q @ k.mT * H**-0.5).masked_fill(torch.tensor(FUTURE), -torch.inf)
    return torch.softmax(scores, -1) @ v


ATTENDS = {"fused": attended(is_causal=True), "by hand": by_hand}


@pytest.mark.nightly(but=["by hand"])
@pytest.mark.parametrize("attend", ATTENDS)
def test_scores_are_compared_up_to_a_constant_a_row(attend):
    rows = np.arange(float(T))[:, None] * np.ones((N, T, T))
    report = compare(Projected(ATTENDS[attend]), port(bias=rows), X, **QUICK)
    assert report.ok and not report.rewritten, report


@pytest.mark.nightly
@pytest.mark.parametrize("attend", with_nightly(ATTENDS, commit=["fused"]))
def test_scores_are_not_compared_up_to_more_than_a_constant_a_row(attend):
    rows = np.arange(float(T))[:, None] * np.ones((N, T, T))
    report = compare(Projected(ATTENDS[attend]), port(bias=rows, scale=0.4), X, **QUICK)
    assert report.first.tap == "scores", report


@pytest.mark.nightly
def test_torchs_own_attention_module_is_seen_inside():
    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = torch.nn.MultiheadAttention(D, 3, batch_first=True)

        def forward(self, x):
            return self.attn(x, x, x, need_weights=False)[0]

    class Ours(nnx.Module):
        def __init__(self):
            self.attn = nnx.MultiHeadAttention(3, D, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.attn(x)

    report = compare(Whole(), Ours(), X, dtypes=("float32",), eager=False)
    assert {"attn.scores (torch)", "attn.weights (torch)"} <= {*report.unpaired}, report
    assert F.scaled_dot_product_attention is held


def normaliser(name):
    """The same normaliser in torch and in JAX."""
    return {
        "sigmoid": (torch.sigmoid, jax.nn.sigmoid),
        "relu": (lambda s: torch.relu(s) / T, lambda s: jax.nn.relu(s) / T),
        "relu in place": (lambda s: torch.relu_(s), jax.nn.relu),
        "softmax by hand": (soft_by_hand, jax.nn.softmax),
        "sparsemax": (sparsemax, jax_sparsemax),
        "tanh": (torch.tanh, jnp.tanh),
        "softplus": (F.softplus, lambda s: jnp.logaddexp(s, 0.0)),
        "relu over its sum": (
            lambda s: torch.relu(s) / (torch.relu(s).sum(-1, keepdim=True) + 1),
            lambda s: jax.nn.relu(s) / (jax.nn.relu(s).sum(-1, keepdims=True) + 1),
        ),
    }[name]


def soft_by_hand(s):
    powers = (s - s.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def sparsemax(s):
    top = s.sort(dim=-1, descending=True).values
    total = top.cumsum(-1) - 1
    count = torch.arange(1, T + 1, dtype=s.dtype)
    many = (count * top > total).sum(-1, keepdim=True)
    return (s - total.gather(-1, many - 1) / many).clamp(min=0)


def jax_sparsemax(s):
    top = jnp.flip(jnp.sort(s, axis=-1), -1)
    total = jnp.cumsum(top, -1) - 1
    count = jnp.arange(1, T + 1, dtype=s.dtype)[None, None, None]
    many = (count * top > total).sum(-1, keepdims=True)
    taken = jnp.take_along_axis(total, many - 1, -1) / many.astype(s.dtype)
    return jnp.maximum(s - taken, 0.0)


NORMALISERS = ["sigmoid", "relu", "relu in place", "softmax by hand", "sparsemax", "tanh"]
NORMALISERS += ["softplus", "relu over its sum"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(NORMALISERS, commit=["relu in place"]))
def test_other_normalisers_are_points_too(name):
    theirs, ours = normaliser(name)
    original = Projected(lambda q, k, v: theirs(q @ k.mT * H**-0.5) @ v)
    right = {"normal": ours, "hidden": SEEN}
    report = compare(original, port(**right), X, **QUICK)
    assert report.ok and not report.rewritten and not report.unpaired, report
    faults = {
        "scores": {"scale": 0.4},
        "weights": {"normal": lambda s: 1.1 * ours(s)},
        "context": {"drop": lambda w: 0.9 * w},
    }
    for place, wrong in faults.items():
        report = compare(original, port(**right | wrong), X, **QUICK)
        assert report.first.tap == place, report
        assert [d.tap for d in report.divergences] == [place]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", with_nightly(["sigmoid", "relu", "tanh", "softplus"], commit=["sigmoid"])
)
def test_a_constant_counts_where_no_softmax_follows(name):
    theirs, ours = normaliser(name)
    original = Projected(lambda q, k, v: theirs(q @ k.mT * H**-0.5) @ v)
    wrong = port(normal=ours, hidden=SEEN, bias=np.full((N, T, T), 0.5))
    report = compare(original, wrong, X, **QUICK)
    assert report.first.tap == "scores" and judge.allclose(
        np.float64(report.first.got - report.first.want), np.float64(0.5)
    ), report


@pytest.mark.nightly
def test_dropout_behind_another_normaliser():
    dropout = torch.nn.Dropout(0.4)
    original = Projected(lambda q, k, v: dropout(torch.sigmoid(q @ k.mT)) @ v)
    original.dropout = dropout

    class Dropped(Port):
        scale, hidden, normal = 1.0, SEEN, staticmethod(jax.nn.sigmoid)

        def drop(self, w):
            return self.dropout(w)

    report = compare(original, Dropped(), X, train=True, **QUICK)
    assert report.ok and not report.rewritten, report


@pytest.mark.nightly
def test_a_perceptron_is_not_taken_for_attention():
    class Perceptron(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(D, 7), torch.nn.Linear(7, D)

        def forward(self, x):
            w = self.down.weight * 2
            return F.linear(torch.relu(self.up(x)), w) + torch.relu(x @ self.up.weight.T) @ w.T

    class Ours(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.up, self.down = nnx.Linear(D, 7, rngs=rngs), nnx.Linear(7, D, rngs=rngs)

        def __call__(self, x):
            w = 2 * self.down.kernel[...]
            behind = jax.nn.relu(x @ self.up.kernel[...]) @ w
            return jax.nn.relu(self.up(x)) @ w + behind

    class Theirs(Perceptron):
        def __init__(self):
            super().__init__()
            self.down = torch.nn.Linear(7, D, bias=False)

    class Mine(Ours):
        def __init__(self):
            super().__init__()
            self.down = nnx.Linear(7, D, use_bias=False, rngs=nnx.Rngs(0))

    report = compare(Theirs(), Mine(), X, **QUICK)
    assert report.ok and not report.unpaired, report
