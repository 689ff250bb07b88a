"""Correct steps are not blamed: permuted axes, equivalent steps, faults between taps, rules."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, Rule, compare, judge
from flax_attn.parity.sides import match
from flax_attn.parity.sides.run import Run
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

B, T, N, H, D = 2, 5, 3, 4, 6
X = np.random.RandomState(0).standard_normal((B, T, D))
QUICK = {"dtypes": ("float64",), "jit": False}


class Original(torch.nn.Module):
    """Causal attention by heads, and a perceptron behind it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(D, N * H) for _ in range(3))
        self.o, self.up, self.act = torch.nn.Linear(N * H, D), torch.nn.Linear(D, 7), Act()
        self.down = torch.nn.Linear(7, D)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (N, H)).transpose(1, 2) for f in (self.q, self.k, self.v))
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        scores = (q @ k.mT / H**0.5).masked_fill(future, -torch.inf)
        mixed = torch.softmax(scores, -1) @ v
        return self.down(self.act(self.up(self.o(mixed.transpose(1, 2).flatten(-2)))))


class Act(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.gelu(x)


def split(y):
    return y.reshape(*y.shape[:2], N, H)  # B T N H


class Heads(nnx.Linear):
    """A projection whose output has heads and their width as axes, in any order."""

    axes = "btnh"

    def __call__(self, x):
        return jnp.einsum(f"btnh->{self.axes}", split(super().__call__(x)))


class Twice(nnx.Linear):
    """A projection that gives its output twice, side by side."""

    def __call__(self, x):
        return jnp.tile(super().__call__(x), 2)


class Port(nnx.Module):
    """A faithful port; each of its class's attributes can be another."""

    query = staticmethod(lambda q: q)
    key = staticmethod(lambda k: k)
    scale = staticmethod(lambda s: s / H**0.5)
    softmax = staticmethod(jax.nn.softmax)
    contexts = staticmethod(lambda c: c)
    act = staticmethod(lambda y: jax.nn.gelu(y, approximate=False))
    outputs = staticmethod(lambda y: y)
    axes, heads, last = "btnh", "", nnx.Linear

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.q, self.k, self.v = (Heads(D, N * H, rngs=rngs) for _ in range(3))
        self.o, self.up = nnx.Linear(N * H, D, rngs=rngs), nnx.Linear(D, 7, rngs=rngs)
        self.down = self.last(7, D, rngs=rngs)

    def tapped(self, name, x):
        return jnp.einsum(f"{self.axes}->btnh", tap(name, jnp.einsum(f"btnh->{self.axes}", x)))

    def __call__(self, x):
        q, k, v = (jnp.einsum(f"{f.axes}->btnh", f(x)) for f in (self.q, self.k, self.v))
        q, k = self.tapped("query", self.query(q)), self.tapped("key", self.key(k))
        scores = self.scale(jnp.einsum("btnh,bsnh->bnts", q, k))
        future = jnp.triu(jnp.ones((T, T), bool), 1)[None, None]
        weights = tap("weights", self.softmax(tap("scores", jnp.where(future, -jnp.inf, scores))))
        mixed = self.tapped("context", self.contexts(jnp.einsum("bnts,bsnh->btnh", weights, v)))
        y = self.up(self.o(mixed.reshape(*x.shape[:2], N * H)))
        return self.outputs(self.down(self.act(y))[..., :D])


def port(**parts):
    plain = {k: staticmethod(v) if callable(v) and k != "last" else v for k, v in parts.items()}
    return type("Other", (Port,), plain)()


def report_of(theirs=None, rules=(), **parts):
    return compare(theirs or Original(), port(**parts), X, rules=rules, **QUICK)


def places(report):
    return [place.tap for place in report.divergences]


@pytest.mark.nightly
def test_a_scale_moved_to_the_queries_is_accepted():
    report = report_of(query=lambda q: q / H**0.5, scale=lambda s: s)
    assert report.ok and not report.rewritten, report


FACTORS = [lambda q: 1.9 * q, lambda q: 1.9 * q + 0.3, lambda q: 3 * q]


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", with_nightly(FACTORS, commit=3))
def test_a_factor_that_does_not_fit_is_not_applied(wrong):
    """Nearly the root of the width: the number shown is torch's own, the next step innocent."""
    report = report_of(query=wrong)
    assert places(report) == ["query"], report
    assert judge.same_function(np.float64(report.first.got), wrong(report.first.want)).ok
    assert {r.name: r.verdict.ok for r in report.local if r.kind == "local"}["scores"]


@pytest.mark.nightly
@pytest.mark.parametrize("axes", with_nightly(["btnh", "bnth", "nbth", "bthn", "tbnh"], commit=2))
def test_taps_with_permuted_axes_are_compared(axes):
    report = report_of(axes=axes)
    assert report.ok and not report.rewritten, report
    assert {"query", "key", "context"} <= {row.name for row in report.rows if row.kind == "tap"}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "axes"),
    with_nightly(
        product(["query", "key", "context", "scores"], ["bnth", "nbth", "bthn"]), commit=12
    ),
)
def test_a_fault_is_placed_in_any_order_of_axes(axes, place):
    faults = {
        "query": {"query": lambda q: q[:, ::-1]},
        "key": {"key": lambda k: k * 1.5},
        "context": {"contexts": lambda c: -c},
        "scores": {"scale": lambda s: s / 2.1},
    }
    report = report_of(axes=axes, **faults[place])
    assert places(report) == [place], report


@pytest.mark.nightly
@pytest.mark.parametrize("axes", with_nightly(["btnh", "bnth", "nbth", "bthn"], commit=["nbth"]))
def test_a_submodule_with_other_axes_does_not_vanish(axes, monkeypatch):
    monkeypatch.setattr(Heads, "axes", axes)
    report = report_of()
    assert report.ok and not report.unpaired[1:], report  # act alone is torch's
    assert {"q", "k", "v"} <= {row.name for row in report.rows if row.kind == "tap"}
    rule = Rule("v.weight -> v.kernel", "(n h) i -> i (h n)", n=N)
    report = report_of(rules=[rule, Rule("v.bias -> v.bias", "(n h) -> (h n)", n=N)])
    assert places(report) == ["v"], report


@pytest.mark.nightly
def test_what_cannot_be_laid_out_is_listed_with_both_shapes():
    for outputs, ok in ((lambda y: y, True), (lambda y: 2 * y, False)):
        report = report_of(last=Twice, outputs=outputs)
        told = "seen on both sides in other shapes: down (Flax [2, 5, 12], torch [2, 5, 6])"
        assert report.ok is ok and told in report.notes and f"  {told}" in str(report), report
    assert places(report) == ["output"]


def test_permutations_of_axes_are_proposed():
    x = np.arange(2 * 3 * 5 * 4).reshape(6, 5, 4)  # (B N) T H
    want = x.reshape(2, 3, 5, 4).transpose(0, 2, 1, 3).reshape(2, 5, 12)
    assert any(
        np.array_equal(w.value(x), want) for w in match.array_layouts("q", (2, 5, 12), x.shape)
    )
    grouped = x.reshape(2, 3, 1, 5, 4).transpose(0, 3, 1, 2, 4)  # B T K G H
    found = match.array_layouts("q", grouped.shape, x.shape)
    assert any(np.array_equal(w.value(x), grouped) for w in found)
    assert not list(match.array_layouts("q", (2, 5, 11), x.shape))
    assert match.ways((0, 2), (2, 0)) == () and len(match.ways((2, 3), (3, 2))) == 1


KEYS = np.arange(float(T))[None, None, None]
OTHER_WAYS = {
    "a bias of keys inside the softmax": (
        {"scale": lambda s: s / H**0.5 + KEYS, "softmax": lambda s: jax.nn.softmax(s - KEYS)},
        {"scores"},
    ),
    "unscaled scores": (
        {"scale": lambda s: s, "softmax": lambda s: jax.nn.softmax(s / H**0.5)},
        {"scores"},
    ),
    "queries by three, keys by a third": (
        {"query": lambda q: 3 * q, "key": lambda k: k / 3},
        {"query", "key"},
    ),
    "heads in another order": (
        {"query": lambda q: q[:, :, :, ::-1], "key": lambda k: k[:, :, :, ::-1]},
        {"query", "key"},
    ),
}
FAULTS = {
    "context": {"contexts": lambda c: -c},
    "between up and down": {"act": jax.nn.relu},
    "output": {"outputs": lambda y: y + 1},
}


@pytest.mark.nightly
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_an_equivalent_step_is_not_a_fault(way):
    parts, names = OTHER_WAYS[way]
    report = report_of(**parts)
    assert report.ok and {*report.rewritten} == names, report


@pytest.mark.nightly
@pytest.mark.parametrize(("place", "way"), with_nightly(product(FAULTS, OTHER_WAYS), commit=7))
def test_another_way_stays_excused_when_something_else_is_wrong(way, place):
    parts, names = OTHER_WAYS[way]
    report = report_of(**parts, **FAULTS[place])
    assert places(report) == [place], report
    told = f"computed another way inside, with the same result: {', '.join(sorted(names))}"
    assert told in report.notes and not names & {row.name for row in report.local}


@pytest.mark.nightly
def test_a_fault_before_another_way_is_placed():
    parts, _ = OTHER_WAYS["unscaled scores"]
    report = report_of(**parts, query=lambda q: q[:, ::-1])
    assert places(report) == ["query"], report


@pytest.mark.nightly
def test_two_faults_that_feed_one_step_are_both_told():
    report = report_of(query=lambda q: q[:, ::-1], key=lambda k: 2 * k + 1)
    assert places(report) == ["query", "key"], report


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("act", "looks"),
    with_nightly(
        [(jax.nn.relu, "ReLU"), (jax.nn.gelu, "tanh"), (lambda y: jax.nn.gelu(y) * 1.1, "")],
        commit=2,
    ),
)
def test_a_fault_between_two_taps_is_put_there(act, looks):
    report = report_of(act=act)
    first = report.first
    assert (first.tap, first.kind) == ("between up and down", "between"), report
    assert places(report) == ["between up and down"] and looks in first.hint
    advice = "torch also has act there: tap('act', ...) would tell"
    assert first.advice.endswith(advice) and first.advice in str(report)
    assert "DIFFERENT between up and down" in str(report)
    assert "> between up and down" in str(report)
    told = tuple(first.index)
    assert len(told) == 3 and told[-1] < 7  # of what down is given


@pytest.mark.nightly
def test_the_advised_tap_locates_the_fault():
    report = report_of(act=lambda y: tap("act", jax.nn.relu(y)))
    assert (report.first.tap, report.first.kind) == ("act", "value"), report
    assert report_of(act=lambda y: tap("act", jax.nn.gelu(y, approximate=False))).ok


@pytest.mark.nightly
def test_a_fault_behind_agreeing_inputs_is_the_steps_own():
    report = report_of(rules=[Rule("up.weight -> up.kernel", "(a o) i -> i (o a)", a=7)])
    assert report.ok
    wrong = Rule("down.weight -> down.kernel", "(a o) i -> i (o a)", a=2)
    report = report_of(rules=[wrong])
    assert places(report) == ["down"] and report.first.kind == "value", report


@jax.custom_vjp
def tripled_backward(x):
    return x


tripled_backward.defvjp(lambda x: (x, None), lambda _, g: (3 * g,))


@pytest.mark.nightly
@pytest.mark.parametrize("way", with_nightly([None, *OTHER_WAYS], commit=[None, "unscaled scores"]))
def test_gradients_head_the_report_if_no_output_differs(way):
    parts, names = OTHER_WAYS[way] if way else ({}, set())
    report = report_of(**parts, outputs=tripled_backward)
    assert (report.first.tap, report.first.kind) == ("down", "gradient"), report
    assert not names & {*places(report)} and "down (gradient)" in str(report)


class Attend(nnx.Module):
    """Taps scores and weights under a name of its own."""

    scale = H**-0.5

    def __call__(self, q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * self.scale
        future = jnp.triu(jnp.ones((T, T), bool), 1)[None, None]
        weights = tap("weights", jax.nn.softmax(tap("scores", jnp.where(future, -1e30, scores))))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)


class Inside(Port):
    def __init__(self, scale=H**-0.5):
        super().__init__()
        self.attend = Attend()
        self.attend.scale = scale

    def __call__(self, x):
        mixed = self.attend(*(f(x) for f in (self.q, self.k, self.v)))
        y = self.up(self.o(mixed.reshape(*x.shape[:2], N * H)))
        return self.down(self.act(y))


RULES = [Rule("scores -> attend.scores"), Rule("weights -> attend.weights")]


@pytest.mark.nightly
def test_a_rule_pairs_taps_under_another_prefix():
    report = compare(Original(), Inside(), X, rules=RULES, **QUICK)
    assert report.ok and {"attend.scores", "attend.weights"} <= {row.name for row in report.rows}
    assert "act (torch)" in report.unpaired and "scores" not in str(report), report
    report = compare(Original(), Inside(0.3), X, rules=RULES, **QUICK)
    assert places(report) == ["attend.scores"] and "scale" in report.first.hint, report


@pytest.mark.nightly
@pytest.mark.parametrize("names", ["scoers -> attend.scores", "query -> q", "scores.x -> q"])
def test_a_rule_that_matches_nothing_is_still_refused(names):
    with pytest.raises(ParityError, match="matches no tensor"):
        compare(Original(), Inside(), X, rules=[Rule(names)], **QUICK)


def run_of(**taps):
    return Run(taps={name.replace("_", "#"): value for name, value in taps.items()})


def test_nothing_is_paired_by_count_alone():
    a, b, c = (np.random.RandomState(i).standard_normal((2, 3)) for i in range(3))
    long = np.ones((4, 5, 6))

    def told(got, truth):
        return match.matching_taps(got, truth, lambda name: name)[0]

    twice = {"act": "act", "act#2": "act#2"}
    assert told(run_of(act=a, act_2=b), run_of(act=a, act_2=b)) == twice
    assert told(run_of(act=c, act_2=b), run_of(act=a, act_2=b)) == twice  # the first is at fault
    assert told(run_of(act=b, act_2=a), run_of(act=a, act_2=b)) == {"act": "act#2", "act#2": "act"}
    assert told(run_of(act=b), run_of(act=a, act_2=b)) == {"act#2": "act"}
    assert told(run_of(act=c), run_of(act=a, act_2=b)) == {}
    assert told(run_of(act=c), run_of(act=long, act_2=b)) == {"act#2": "act"}  # by its shape
    assert told(run_of(act=a, act_2=b), run_of(act=a)) == {"act": "act"}


class Once(torch.nn.Module):
    """Attends to itself with one projection, as many times as it is told."""

    def __init__(self, times):
        super().__init__()
        self.times, self.o = times, torch.nn.Linear(D, D)

    def forward(self, x):
        for _ in range(self.times):
            x = torch.softmax(x @ x.mT / D**0.5, -1) @ x
        return self.o(x)


class Repeated(nnx.Module):
    def __init__(self, told, shift=0.0):
        self.told, self.o = told, nnx.Linear(D, D, rngs=nnx.Rngs(0))
        self.shift = shift

    def __call__(self, x):
        for i in range(2):
            scores = x @ x.mT / D**0.5
            if i in self.told:
                scores = tap("scores", scores)
            x = jax.nn.softmax(scores) @ x
        return self.o(x + self.shift)


@pytest.mark.nightly
@pytest.mark.parametrize("told", with_nightly([{0, 1}, {0}, {1}], commit=[{1}]))
def test_points_heard_in_other_numbers_are_told_apart_by_their_values(told):
    report = compare(Once(2), Repeated(told), X, **QUICK)
    assert report.ok and not report.rewritten, report
    report = compare(Once(2), Repeated(told, 0.1), X, **QUICK)
    assert all(place.endswith(" and o") for place in places(report)), report
