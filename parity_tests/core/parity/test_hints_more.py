"""Hints that were once wrong: causal masks aligned to the other end, signs, axes, huge numbers."""

import re
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn.parity import ParityError, compare
from flax_attn.taps import tap
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")

R, D = np.random.RandomState, 6
QUICK = {"dtypes": ("float64",), "jit": False, "grads": False}


def tril(length, keys, by=0):
    return np.tril(np.ones((length, keys), bool), by)


class Theirs(torch.nn.Module):
    """One head of attention: a mask by sizes, a fill, a scale, a softmax over an axis."""

    def __init__(self, seen=lambda t, s: np.ones((t, s), bool), scale=1.0, axis=-1):
        super().__init__()
        self.q, self.k = torch.nn.Linear(D, D), torch.nn.Linear(D, D)
        self.seen, self.scale, self.axis = seen, scale, axis

    def forward(self, x, y):
        seen = torch.tensor(self.seen(x.shape[-2], y.shape[-2]))
        scores = self.q(x) @ self.k(y).mT * self.scale
        scores = scores.masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, self.axis) @ y


class Ours(nnx.Module):
    def __init__(self, seen=None, scale=1.0, axis=-1, fill=-jnp.inf, taps=True, later=False):
        self.later = later
        self.q, self.k = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))
        self.seen, self.scale, self.axis, self.fill = seen, scale, axis, fill
        self.tap = tap if taps else lambda _, value: value

    def __call__(self, x, y):
        scores = self.q(x) @ self.k(y).mT * self.scale
        scores = self.tap("scores", scores if self.later else self.masked(scores))
        scores = self.masked(scores) if self.later else scores
        return self.tap("weights", jax.nn.softmax(scores, self.axis)) @ y

    def masked(self, scores):
        seen = True if self.seen is None else self.seen(*scores.shape[-2:])
        return jnp.where(seen, scores, self.fill)


def said(theirs, ours, keys=7, **options):
    x, y = R(1).standard_normal((2, 5, D)), R(2).standard_normal((2, keys, D))
    report = compare(Theirs(**theirs), Ours(**ours), x, y, **QUICK, **options)
    assert not report.ok
    return report.first.hint


def to_first(length, keys):
    return tril(length, keys)


def to_last(length, keys):
    return tril(length, keys, keys - length)


FIRST, LAST = "the first key (top left)", "the last key (bottom right)"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("keys", "taps"), with_nightly(product([6, 7, 11], [True, False]), commit=3)
)
def test_a_causal_mask_aligned_to_the_other_end_is_named(keys, taps):
    both = {LAST: to_last, FIRST: to_first}
    for (one, theirs), (other, ours) in permutations(both.items(), 2):
        told = said(dict(seen=theirs), dict(seen=ours, taps=taps), keys)
        assert f"mask aligned to {other}, torch's to {one}: shifted by {keys - 5}" in told


@pytest.mark.nightly
def test_a_misaligned_causal_mask_is_named_with_fewer_keys():
    told = said(dict(seen=to_first), dict(seen=to_last), 3)
    assert f"aligned to {LAST}, torch's to {FIRST}: shifted by 2" in told


@pytest.mark.nightly
def test_a_padded_causal_mask_aligned_to_the_other_end_is_named():
    def padded(causal):
        return lambda t, s: causal(t, s) & (np.arange(s) != 1)

    told = said(dict(seen=padded(to_first)), dict(seen=padded(to_last)))
    assert f"aligned to {LAST}, torch's to {FIRST}: shifted by 2" in told


def test_a_causal_mask_shifted_by_another_number_is_not_aligned_to_the_other_end():
    assert "aligned" not in said(dict(seen=to_first), dict(seen=lambda t, s: tril(t, s, 1)))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scale", "words"),
    [(-0.5, ": 0.5, torch -0.5"), (-1.0, "-1 left out, a factor"), (0.3, ": -0.3, torch 0.3")],
)
def test_a_scale_with_the_other_sign_is_named(scale, words):
    assert words in said(dict(scale=scale), dict(scale=-scale))


AXES = {"keys": 2, "queries": 1}


@pytest.mark.nightly
@pytest.mark.parametrize(("one", "other"), [("keys", "queries"), ("queries", "keys")])
def test_a_softmax_over_another_axis_is_named(one, other):
    told = said(dict(axis=AXES[one]), dict(axis=AXES[other]))
    assert told == f"a softmax over another axis: {AXES[other]}, torch {AXES[one]}"


@pytest.mark.nightly
def test_scores_are_only_called_unmasked_where_there_is_a_mask():
    masked = dict(seen=to_last, fill=0.0, taps=True)
    assert "unmasked" not in said(dict(axis=0), dict(axis=-1))
    assert "mask" in said(dict(seen=to_last), masked)


def window(keys):
    return lambda t, s: tril(t, s) & ~tril(t, s, -keys)


@pytest.mark.nightly
def test_a_mask_applied_after_the_tap_of_scores_is_named():
    told = said(dict(seen=window(4)), dict(seen=window(3), later=True), 5)
    assert told == "a window 1 narrower back: 3 keys, torch 4, itself included"
    told = said(dict(seen=to_last), dict(seen=to_first, later=True))
    assert told == f"the causal mask aligned to {FIRST}, torch's to {LAST}: shifted by 2"


class Counts(torch.nn.Module):
    """A norm with running statistics, and buffers that a call changes."""

    def __init__(self):
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(D)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("table", torch.ones(D))

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.bn(x) * self.table


class CountsPort(nnx.Module):
    def __init__(self):
        self.bn = nnx.BatchNorm(D, momentum=0.9, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.mean = nnx.Variable(jnp.zeros(D))

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(x).mean(0)
        return self.bn(x)


def test_state_that_is_compared_is_called_neither_left_out_nor_constant():
    report = compare(Counts(), CountsPort(), R(1).standard_normal((4, D)), train=True, **QUICK)
    assert report.ok and {r.name for r in report.rows if r.kind == "state"} >= {"bn.mean", "mean"}
    assert not [note for note in report.notes if "not compared" in note]
    assert "constant, not carried: table, bn.num_batches_tracked\n" in f"{report}\n"


class Uniform(nnx.Module):
    """A faithful port, whose masks nobody hears."""

    def __init__(self):
        self.up, self.rngs = nnx.Linear(D, D, rngs=nnx.Rngs(0)), nnx.Rngs(1)

    def __call__(self, x):
        keep = jax.random.uniform(self.rngs(), x.shape) < 0.9
        return jnp.where(keep, self.up(x) / 0.9, 0.0)


@pytest.mark.nightly
def test_the_error_for_missing_dropout_mentions_other_ways_to_draw():
    theirs = torch.nn.Sequential()
    theirs.up, theirs.drop = torch.nn.Linear(D, D), torch.nn.Dropout(0.1)
    with pytest.raises(ParityError, match=r"not drawn by jax\.random\.bernoulli"):
        compare(theirs, Uniform(), R(1).standard_normal((4, D)), train=True, **QUICK)


class Added(torch.nn.Module):
    """Scores to which a mask has added a huge number."""

    def __init__(self, fill):
        super().__init__()
        self.q, self.k, self.fill = torch.nn.Linear(D, D), torch.nn.Linear(D, D), fill

    def forward(self, x, hide):
        return self.q(x) @ self.k(x).mT + hide[:, None] * self.fill


class AddedPort(nnx.Module):
    def __init__(self, fill, wrong):
        self.q, self.k = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))
        self.fill, self.wrong = fill, wrong

    def __call__(self, x, hide):
        return self.wrong(self.q(x) @ self.k(x).mT) + hide[:, None] * self.fill


HUGE = [-1e4, -1e6, -1.234567e7, -1e9, -1e12, -3.4e38]
BESIDE = {
    "scale": (
        lambda x: x / D**0.5,
        "another scale: 1 over the root of the width times q, where torch has it as it is",
    ),
    "a little": (lambda x: x * (1 + 1e-9), "another scale: the matrix product times 1.000000001"),
    "constant": (lambda x: x + 1.0, "1 + the sum, where torch has it as it is"),
    "a little constant": (lambda x: x + 1e-7, "1e-07 added to the sum"),
    "transposed": (
        lambda x: x.swapaxes(1, 2),
        "q and k exchanged in the matrix product: a transposed result",
    ),
    "sign": (lambda x: -x, "the matrix product with the other sign"),
    "no known one": (lambda x: x + jnp.sin(5 * x), ""),
}


TURNS = [(name, HUGE[i % len(HUGE)]) for i, name in enumerate(BESIDE)]  # each once


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "fill"), with_nightly(product(BESIDE, HUGE), commit=TURNS))
def test_huge_numbers_hide_no_hint_and_make_none(name, fill):
    wrong, words = BESIDE[name]
    hide = np.array([[0.0, 0, 1, 0], [0, 0, 0, 1]])
    x = R(1).standard_normal((2, 4, D))
    report = compare(Added(fill), AddedPort(fill, wrong), x, hide, **QUICK)
    if report.ok:  # too little for the judge, to whom these are numbers like all others
        assert name.startswith("a little") and fill >= -1e6
    else:
        assert re.sub(r" \([\w.]+:\d+\)", "", report.first.hint) == words  # without its line


class Blind(torch.nn.Module):
    """Torch's own attention, which gives zeros for a query that sees nothing."""

    def __init__(self):
        super().__init__()
        self.q, self.o = torch.nn.Linear(D, D), torch.nn.Linear(D, D)

    def forward(self, x, seen):
        attend = torch.nn.functional.scaled_dot_product_attention
        return self.o(attend(self.q(x)[:, None], x[:, None], x[:, None], attn_mask=seen)[:, 0])


class BlindPort(nnx.Module):
    def __init__(self, fill, taps, zeros=False):
        self.q, self.o = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(2))
        self.fill, self.zeros = fill, zeros
        self.tap = tap if taps else lambda _, value: value

    def __call__(self, x, seen):
        scores = jnp.where(seen[:, 0], self.q(x) @ x.mT / D**0.5, self.fill)
        weights = jax.nn.softmax(self.tap("scores", scores))
        weights = jnp.where(
            seen[:, 0].any(-1, keepdims=True), weights, 0.0 if self.zeros else weights
        )
        return self.o(self.tap("weights", weights) @ x)


def blind_row(fill, taps, zeros=False):
    seen = R(5).uniform(size=(2, 1, 4, 4)) > 0.4
    seen[..., 0] = True
    seen[1, 0, 2] = False
    x = R(1).standard_normal((2, 4, D))
    return compare(Blind(), BlindPort(fill, taps, zeros), x, seen, **QUICK)


FILLS = {-1e30: "averages", -1e9: "averages", -1e4: "averages", -jnp.inf: "gives NaN"}


@pytest.mark.nightly(but=["-10000.0-False"])
@pytest.mark.parametrize(
    ("fill", "taps"),
    with_nightly(
        product(FILLS, [True, False]), commit=[(-1e30, True), (-1e4, False), (-jnp.inf, True)]
    ),
)
def test_rows_that_see_nothing_do_what_they_do_in_flaxs_own_run(fill, taps):
    does = FILLS[fill]
    report = blind_row(fill, taps)
    assert not report.ok
    if taps or does == "averages":
        end = {"averages": "an average of the row", "gives NaN": "nothing is filled"}[does]
        assert "rows that see nothing" in report.first.hint and end in report.first.hint
    if taps:
        wrong = next(row for row in report.local if row.name == "weights")
        assert np.isnan(wrong.verdict.got) == (does == "gives NaN")


@pytest.mark.parametrize("fill", [-1e30, -jnp.inf])
def test_rows_that_see_nothing_and_give_zeros_on_both_sides_agree(fill):
    assert blind_row(fill, True, zeros=True).ok


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(D, D) for _ in range(3))

    def forward(self, x, y):
        return self.c(torch.tanh(self.b(torch.sigmoid(self.a(x))) * y))


class ChainPort(nnx.Module):
    """Calls its first layer twice, the first time for nothing."""

    def __init__(self, wrong):
        self.a, self.b, self.c = (nnx.Linear(D, D, rngs=nnx.Rngs(0)) for _ in range(3))
        self.wrong = wrong

    def __call__(self, x, y):
        self.a(x)
        a = self.a(x)
        y = jax.lax.stop_gradient(y) if self.wrong == "y" else y
        b = self.b(jax.nn.sigmoid(halved(a) if self.wrong == "a" else a))
        return self.c(jnp.tanh((halved(b) if self.wrong == "b" else b) * y))


def halved(x):
    return x / 2 + jax.lax.stop_gradient(x) / 2


BACKWARD = {
    "a": ["a.kernel", "a.bias", "input 0"],
    "b": ["b"],
    "y": ["input 1"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("wrong", BACKWARD)
def test_a_call_that_is_not_used_is_not_blamed(wrong):
    x, y = R(1).standard_normal((2, 3, D))
    report = compare(Chain(), ChainPort(wrong), x, y, **{**QUICK, "grads": True})
    failed = {row.name for row in report.failed}
    told = [place.tap for place in report.divergences]
    assert sorted(told) == sorted(BACKWARD[wrong]), report
    assert all(name in failed for name in told if "." in name or "input" in name)
    hint = "a gradient that is stopped" if wrong == "y" else "a gradient times 0.5"
    assert all(place.hint.startswith(hint) for place in report.divergences), report


class Drops(nnx.Module):
    """A linear layer and dropout, that divides what it keeps by the rate it keeps, or not."""

    def __init__(self, rate, divisor=None):
        self.up, self.drop = (
            nnx.Linear(D, 4 * D, rngs=nnx.Rngs(0)),
            nnx.Dropout(rate, rngs=nnx.Rngs(1)),
        )
        self.times = 1.0 if divisor is None else (1 - rate) / divisor

    def __call__(self, x):
        return self.drop(self.up(x)) * self.times


DROPS = {
    "0.2 for 0.1": (0.1, Drops(0.2), "another kept share, 1 less the dropout rate: 0.8, torch 0.9"),
    "0.25 for 0.2": (
        0.2,
        Drops(0.25),
        "another kept share, 1 less the dropout rate: 0.75, torch 0.8",
    ),
    "1 / 3 for 0.1": (
        0.1,
        Drops(1 / 3),
        "another kept share, 1 less the dropout rate: 0.666667, torch 0.9",
    ),
    "not scaled up": (0.1, Drops(0.1, 1.0), "what dropout keeps not scaled up by 1 / 0.9"),
    "scaled otherwise": (
        0.1,
        Drops(0.1, 0.8),
        "another kept share, 1 less the dropout rate: 0.8, torch 0.9",
    ),
}


@pytest.mark.nightly(but=["1 / 3 for 0.1", "not scaled up"])
@pytest.mark.parametrize("name", DROPS)
def test_another_dropout_rate_is_named_where_it_was_heard(name):
    rate, ours, words = DROPS[name]
    theirs = torch.nn.Sequential()
    theirs.up, theirs.drop = torch.nn.Linear(D, 4 * D), torch.nn.Dropout(rate)
    report = compare(theirs, ours, R(1).standard_normal((9, D)), train=True, **QUICK)
    assert not report.ok and report.first.hint == words
