"""Faults are located beside equal names of submodules and taps, factors of heads, and sinks."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, compare
from flax_attn.parity.diagnosis import local_error
from flax_attn.parity.sides import match
from flax_attn.parity.sides.run import Call, Run
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

B, T, N, H, D = 2, 5, 3, 4, 6
X = np.random.RandomState(0).standard_normal((B, T, D))
QUICK = {"dtypes": ("float64",), "jit": False}
CAP = 2.5


class Original(torch.nn.Module):
    """Projections named like points, a factor for each head, a bias; perhaps a sink and a cap."""

    def __init__(self, sink=None):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(D, N * H) for _ in range(3))
        self.o = torch.nn.Linear(N * H, D)
        self.logit, self.bias = (torch.nn.Parameter(torch.ones(N, *s)) for s in ((1, 1), (T, T)))
        self.sink, self.at = torch.nn.Parameter(torch.ones(N, 1, 1)), sink

    def forward(self, x):
        parts = (self.query, self.key, self.value)
        q, k, v = (f(x).unflatten(-1, (N, H)).transpose(1, 2) for f in parts)
        q = torch.nn.functional.normalize(q, dim=-1)
        scores = q @ k.mT * self.logit.exp() + self.bias
        if self.at is None:
            weights = torch.softmax(scores + 0 * self.sink, -1)
        else:
            scores = CAP * torch.tanh(scores / CAP)
            both = [self.sink.expand(B, N, T, 1), scores]
            weights = torch.softmax(torch.cat(both[:: 1 - 2 * self.at], -1), -1)
            weights = weights[..., :-1] if self.at else weights[..., 1:]
        return self.o((weights @ v).transpose(1, 2).flatten(-2))


class Port(nnx.Module):
    """A faithful port; each of its class's attributes can be another."""

    on = ("scores",)  # where the factor is: on one alone, or its root on two
    biased = staticmethod(lambda s, bias: s + bias)
    turned = staticmethod(lambda q: q)
    cap = sinks = 0.0
    points = True

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.query, self.key, self.value = (nnx.Linear(D, N * H, rngs=rngs) for _ in range(3))
        self.o = nnx.Linear(N * H, D, rngs=rngs)
        self.logit, self.bias = (nnx.Param(jnp.ones((N, *s))) for s in ((1, 1), (T, T)))
        self.sink = nnx.Param(jnp.ones((N, 1, 1)))

    def tapped(self, name, x):
        return tap(name, x) if self.points else x

    def __call__(self, x):
        parts = (self.query, self.key, self.value)
        q, k, v = (f(x).reshape(*x.shape[:2], N, H) for f in parts)
        q = self.turned(q / jnp.linalg.norm(q, axis=-1, keepdims=True))
        root = jnp.exp(self.logit[...][None] / len(self.on))
        of_heads = root.reshape(1, 1, N, 1)  # as of queries and keys
        q = q * of_heads if "query" in self.on else q
        k = k * of_heads if "key" in self.on else k
        q, k = self.tapped("query", q), self.tapped("key", k)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k)
        scores = scores * root if "scores" in self.on else scores
        scores = self.biased(scores, self.bias[...][None])
        scores = self.cap * jnp.tanh(scores / self.cap) if self.cap else scores
        scores = self.tapped("scores", scores)
        powers = jnp.exp(scores)
        total = powers.sum(-1, keepdims=True) + self.sinks * jnp.exp(self.sink[...])[None]
        weights = self.tapped("weights", powers / total)
        v = self.tapped("value", v)
        return self.o(jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(*x.shape[:2], N * H))


def report_of(sink=None, rules=(), **parts):
    plain = {k: staticmethod(v) if callable(v) else v for k, v in parts.items()}
    port = type("Other", (Port,), plain)()
    return compare(Original(sink), port, X, rules=rules, **QUICK)


def places(report):
    return [place.tap for place in report.divergences]


def compared(report):
    return {row.name for row in report.rows if row.kind == "tap"}


LINEARS = {"query", "key", "value"}


@pytest.mark.nightly
@pytest.mark.parametrize("points", [True, False])
def test_projections_named_like_points_are_compared_as_what_they_are(points):
    report = report_of(points=points)
    assert report.ok and not report.rewritten and "other shapes" not in str(report), report
    assert compared(report) >= LINEARS and ("query#2" in compared(report)) is points
    rule = Rule("value.weight -> value.kernel", "(n h) i -> i (h n)", n=N)
    report = report_of(points=points, rules=[rule])
    assert places(report) == ["value"], report


PLACES = {
    "on queries": ("query",),
    "on keys": ("key",),
    "its root on both": ("query", "key"),
    "on scores": ("scores",),
}
BIASES = {
    "half": lambda s, bias: s + bias / 2,
    "none": lambda s, bias: s + 0 * bias,
    "huge": lambda s, bias: s + 30 * bias,
    "transposed": lambda s, bias: s + bias.mT,
}


@pytest.mark.nightly
@pytest.mark.parametrize("on", PLACES)
def test_a_factor_of_each_head_has_its_own_place(on):
    report = report_of(on=PLACES[on])
    assert report.ok, report
    assert {*report.rewritten} == {f"{x}#2" for x in PLACES[on] if x != "scores"}


@pytest.mark.nightly
@pytest.mark.parametrize(("on", "bias"), [*product(PLACES, BIASES)])
def test_a_factor_of_each_head_stays_excused_where_the_bias_is_wrong(on, bias):
    report = report_of(on=PLACES[on], biased=BIASES[bias])
    assert places(report) == ["scores"], report


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bias", "on"), with_nightly(product([None, *BIASES], ["on scores", "on queries"]), commit=5)
)
def test_a_factor_that_torch_does_not_have_is_a_fault(on, bias):
    factor = np.array([0.5, 2.0, -3.0])[:, None]
    parts = {"biased": BIASES[bias]} if bias else {}
    report = report_of(on=PLACES[on], turned=lambda q: q * factor[None, None], **parts)
    assert places(report)[0] == "query#2", report


@pytest.mark.nightly(but=["last"])
@pytest.mark.parametrize("at", [0, 1], ids=["first", "last"])
def test_a_sink_is_a_column_of_the_scores(at):
    report = report_of(at, cap=CAP, sinks=1.0)
    assert report.ok and not report.rewritten, report
    assert {"scores", "weights", "query#2"} <= compared(report), report


@pytest.mark.parametrize("at", with_nightly([0, 1], commit=[1]), ids=["first", "last"])
def test_a_fault_beside_a_sink_is_placed(at):
    assert places(report_of(at, cap=CAP)) == ["weights"]
    assert places(report_of(at, cap=50.0, sinks=1.0)) == ["scores"]
    report = report_of(at, cap=CAP, sinks=1.0, biased=lambda s, bias: s + bias + 1)
    assert places(report) == ["scores"], report  # no constant in a row goes unseen beside a sink


class Image(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(D, D, 1), torch.nn.BatchNorm2d(D)

    def forward(self, x):
        return self.norm(self.conv(x.reshape(B, 1, -1, D).permute(0, 3, 1, 2)))


def image(before=lambda x: x, epsilon=1e-5):
    """A port with channels last, where torch has them first."""

    class Other(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.conv = nnx.Conv(D, D, (1, 1), rngs=rngs)
            self.norm = nnx.BatchNorm(D, epsilon=epsilon, rngs=rngs)

        def __call__(self, x):
            y = self.norm(self.conv(before(x.reshape(B, 1, -1, D))))
            return jnp.moveaxis(y, -1, 1)

    return Other()


@pytest.mark.nightly
@pytest.mark.parametrize("length", with_nightly([2, 3, 5], commit=[2]))
def test_a_norm_after_a_wrong_step_is_not_named(length):
    """Of 6 channels at 2 or 3 places a mere reshape is no nearer than channels last for first."""
    x = X[:, :length]
    assert compare(Image(), image(), x, **QUICK).ok
    report = compare(Image(), image(lambda y: y[:, :, ::-1]), x, **QUICK)
    assert places(report) == ["between the input and conv"], report
    report = compare(Image(), image(lambda y: y[:, :, ::-1], epsilon=0.1), x, **QUICK)
    assert places(report) == ["between the input and conv", "norm"], report


def test_points_are_not_told_by_their_names():
    x = np.ones((2, 3))
    run = Run(
        taps={"a.query": x, "a.query#2": x, "scores": x, "o": x},
        calls={"a.query": Call("Linear"), "a.query#2": Call("query")},
        inputs={"scores": (x,)},
    )
    assert [run.point(name) for name in run.taps] == ["", "query", "", ""]
    assert Run(taps={"a.scores#3": x}).point("a.scores#3") == "scores"


def test_a_gradient_of_another_shape_is_left_out():
    x = np.random.RandomState(0).standard_normal((2, 3, 4))
    truth = Run(taps={"query": x}, tap_gradients={"query": x[:1]})

    class Names:
        tap = staticmethod(lambda name: name)

    force = local_error.forces(Run(taps={"query": x}), truth, Names)
    assert force["query"].gradient is None


@pytest.mark.nightly
def test_the_verdict_stands_if_the_diagnosis_fails(monkeypatch):
    def fails(*_):
        raise ValueError("no such shape")

    monkeypatch.setattr(local_error, "between", fails)
    report = report_of(biased=BIASES["half"])
    assert not report.ok and "no place was found" in str(report), report
    assert "ValueError: no such shape" in str(report)


def test_equal_shapes_are_never_called_other_shapes():
    a, b, c = (np.random.RandomState(i).standard_normal((2, 3)) for i in range(3))
    found = match.matching_taps(
        Run(taps={"act": a}), Run(taps={"act": b, "act#2": c}), lambda name: name
    )
    assert found == ({}, {})


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(D, D)

    def forward(self, x):
        return torch.softmax(self.up(self.up(x).sin()), -1)


class TwicePort(nnx.Module):
    """Hears the second call of two alone."""

    def __init__(self):
        self.up = nnx.Linear(D, D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        once = x @ self.up.kernel[...] + self.up.bias[...][None, None]
        return jax.nn.softmax(self.up(jnp.sin(once)))


@pytest.mark.nightly
def test_taps_paired_in_float64_are_paired_in_narrow_dtypes():
    report = compare(Twice(), TwicePort(), X, dtypes=("float64", "float32"), eager=False)
    assert report.ok and "up (torch)" in report.unpaired, report
    assert not any(name.endswith("(Flax)") for name in report.unpaired), report


class Attend(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x @ x.mT, -1) @ x


class AttendPort(nnx.Module):
    wrong = 1.0

    def __call__(self, x):
        scores = tap("scores", x @ x.mT)
        return self.wrong * (tap("weights", jax.nn.softmax(scores)) @ x)


class Whole(nnx.Module):
    def __init__(self, wrong):
        self.up, self.mha = nnx.Linear(D, D, rngs=nnx.Rngs(0)), AttendPort()
        self.mha.wrong = wrong

    def __call__(self, x):
        return self.mha(self.up(x))


def renamed(rules, wrong=1.0):
    theirs = torch.nn.ModuleDict({"up": torch.nn.Linear(D, D), "attend": Attend()})
    call = lambda m, x: m["attend"](m["up"](x))  # noqa: E731
    return compare(theirs, Whole(wrong), X, rules=rules, torch_call=call, **QUICK)


@pytest.mark.nightly
def test_a_rule_pairs_modules_that_hold_nothing():
    report = renamed([Rule("attend -> mha")])
    assert report.ok and not report.unpaired, report
    assert {"mha", "mha.scores", "mha.weights"} <= compared(report)
    assert places(renamed([Rule("attend -> mha")], wrong=1.1)) == ["mha"]
    for names in ("atend -> mha", "attend -> mhu", "attend -> up"):
        with pytest.raises(ParityError, match="matches no tensor"):
            renamed([Rule(names)])


def test_a_rule_for_taps_that_pairs_none_is_told():
    for names, told in (
        ("attend.scores -> maha.scores", "Flax has no maha.scores; nearest: mha.scores"),
        ("atend.scores -> matte.scores", "torch has no atend.scores; nearest: attend.scores"),
    ):
        report = renamed([Rule(names)])
        assert any(f"pairs no tap: {told}" in note for note in report.notes), report
    assert "pairs no tap" not in str(renamed([Rule("attend.scores -> mha.scores")]))


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = torch.nn.Linear(D, D), torch.nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(torch.nn.functional.silu(self.up(x)))


class NormedPort(nnx.Module):
    def __init__(self, act, epsilon):
        rngs = nnx.Rngs(0)
        self.up, self.act = nnx.Linear(D, D, rngs=rngs), act
        self.norm = nnx.LayerNorm(D, epsilon=epsilon, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.act(self.up(x)))


@pytest.mark.nightly(but=["0.1"])
@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_a_layer_that_is_given_something_wrong_may_be_wrong_itself(epsilon):
    report = compare(Normed(), NormedPort(jax.nn.relu, epsilon), X, **QUICK)
    own = [] if epsilon == 1e-5 else ["norm"]
    assert places(report) == ["between up and norm", *own], report
    assert places(compare(Normed(), NormedPort(jax.nn.silu, epsilon), X, **QUICK)) == own
