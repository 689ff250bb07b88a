"""Biases named from their tables, which a constant for each query moves."""

import math
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

from flax_attn._internal.types import Sizes
from flax_attn.identify.fit_bias import Bias, fit_bias
from flax_attn.parity.judge import same_function
from flax_attn.positions.alibi import alibi_slopes
from flax_attn.positions.relative import t5_buckets
from flax_attn.scores import Additive, Alibi, T5Bias
from parity_tests.tables import each

SQUARES = ((7, 7), (11, 11))
# Of few shapes, since each compiles again.
LONGEST, LONGER = (11, 11), (60, 60)


def distances(shape, end=False):
    """Key minus query, `T S`."""
    T, S = shape
    return np.arange(S) - np.arange(T)[:, None] - (S - T if end else 0)


def full(shape):
    return np.ones(shape, bool)


def causal(shape):
    return distances(shape, end=True) <= 0


def measured(rng, biases, visible):
    """As measured: constants for each row, errors of float64, and garbage where hidden."""
    tables = []
    for bias, shown in zip(biases, visible, strict=True):
        table = bias + 3 * rng.standard_normal((*bias.shape[:2], 1))
        table = table + 1e-13 * rng.standard_normal(bias.shape)
        garbage = rng.choice([-np.inf, np.nan, -1e9, 5.0], size=bias.shape)
        tables.append(np.where(shown, table, garbage))
    return tables


def fitted(rng, of_shape, sees, parameters, shapes=SQUARES) -> Any:
    """The bias fitted to `of_shape(shape)`, `N T S`, where `sees(shape)` shows it."""
    visible = [sees(shape) for shape in shapes]
    tables = measured(rng, [of_shape(shape) for shape in shapes], visible)
    return fit_bias(tables, visible, {**others(rng), **parameters})


def others(rng):
    """Parameters that are no tables, but have the shapes of some."""
    sizes = {"query.weight": (12, 12), "gate.weight": (3, 40), "up": (40, 3), "norm.weight": (3,)}
    return {name: rng.standard_normal(size) for name, size in sizes.items()}


def added(score, heads, shape):
    """What a score adds to logits of 0, `N T S`."""
    sizes = Sizes((1,), heads, *shape)
    with jax.enable_x64(True):
        return np.asarray(score.bind(sizes).grid(np.zeros(sizes.shape), sizes))[0]


def assert_adds(bias, of_shape, sees, shape):
    """The score adds the same to three heads as `of_shape`, up to a constant for each row."""
    visible = sees(shape)
    centered = []
    for x in (added(bias.score, 3, shape), of_shape(shape)):
        mean = np.where(visible, x, 0).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
        centered.append(np.where(visible, x - mean, 0))
    verdict = same_function(*centered)
    assert verdict.ok, verdict


@each("sees", [full, causal])
def test_constants_of_rows_are_no_bias(sees):
    rng = np.random.RandomState(0)
    bias = fitted(rng, lambda shape: np.zeros((3, *shape)), sees, {})
    assert bias == Bias("none", None)


def test_a_single_visible_key_shows_no_bias():
    rng = np.random.RandomState(0)
    bias = fitted(rng, lambda s: rng.standard_normal((3, *s)), lambda s: np.eye(*s, dtype=bool), {})
    assert bias == Bias("none", None)


def test_a_key_that_is_alone_in_its_row_is_passed_over():
    rng = np.random.RandomState(0)

    def sees(shape):
        visible = causal(shape)
        visible[0] = np.arange(shape[1]) == shape[1] - 1
        return visible

    bias = fitted(rng, lambda s: -alibi_slopes(3)[:, None, None] * abs(distances(s)), sees, {})
    assert bias == Bias("alibi", Alibi(alibi_slopes(3)))


@each("heads, sees", product([1, 3, 8, 12], [full, causal]))
def test_usual_slopes_are_exactly_those(heads, sees):
    rng = np.random.RandomState(heads)
    slopes = alibi_slopes(heads)

    def of_shape(shape):
        return -slopes[:, None, None] * abs(distances(shape))

    assert fitted(rng, of_shape, sees, {}) == Bias("alibi", Alibi(slopes))


def test_slopes_times_positions_of_keys_are_alibi_under_a_causal_mask():
    rng = np.random.RandomState(0)
    start = 2 ** -(2 ** -(math.log2(8) - 3))
    slopes = np.array([start ** (i + 1) for i in range(8)])

    def of_shape(shape):
        return np.broadcast_to(slopes[:, None, None] * np.arange(shape[1]), (8, *shape))

    assert fitted(rng, of_shape, causal, {}) == Bias("alibi", Alibi(alibi_slopes(8)))
    assert fitted(rng, of_shape, full, {}) is None


@pytest.mark.nightly
@each("seed", range(4))
def test_other_slopes_are_measured(seed):
    rng = np.random.RandomState(seed)
    slopes = rng.standard_normal(3) * (rng.random_sample(3) < 0.7)  # some heads without a bias
    slopes[0] = alibi_slopes(3)[0]

    def of_shape(shape):
        return -slopes[:, None, None] * abs(distances(shape))

    bias = fitted(rng, of_shape, full, {})
    assert (bias.kind, bias.parameter) == ("alibi", None)
    assert_adds(bias, of_shape, full, LONGER)


@pytest.mark.nightly
@each(
    "buckets, max_distance, bidirectional, fitted_distance",
    [
        (32, 128, True, 128),
        (32, 128, False, 128),
        (8, 20, True, 20),
        (12, 20, True, 20),
        (8, 10, False, 10),
        (9, 13, True, 16),
        (12, 10, True, 10),
        (8, 11, True, 10),
        (8, 5, True, 8),
        (12, 13, True, 11),
        (64, 256, False, 128),  # no visible distance leaves its own row
    ],
)
def test_buckets_are_a_parameter(buckets, max_distance, bidirectional, fitted_distance):
    rng = np.random.RandomState(buckets)
    table = rng.standard_normal((buckets, 3))
    settings = {"buckets": buckets, "bidirectional": bidirectional}
    sees = full if bidirectional else causal

    def of_shape(shape):
        rows = t5_buckets(distances(shape), max_distance=max_distance, **settings)
        return table.T[:, rows]

    for transposed in (False, True):
        bias = fitted(rng, of_shape, sees, {"bias.weight": table.T if transposed else table})
        assert (bias.kind, bias.parameter, bias.transposed) == ("t5", "bias.weight", transposed)
        assert (bias.score.buckets, bias.score.bidirectional) == (buckets, bidirectional)
        assert np.array_equal(bias.score.table, table)
        assert bias.score.max_distance == fitted_distance
    assert_adds(bias, of_shape, sees, LONGEST)


@pytest.mark.nightly
def test_a_longer_table_tells_the_longest_distance():
    rng = np.random.RandomState(0)
    table = rng.standard_normal((8, 3))
    for max_distance in (7, 16, 23, 64, 90, 128, 200):

        def of_shape(shape, m=max_distance):
            return table.T[:, t5_buckets(distances(shape), buckets=8, max_distance=m)]

        bias = fitted(rng, of_shape, full, {"w": table}, shapes=((7, 7), (60, 60)))
        assert bias.kind == "t5"
        assert_adds(bias, of_shape, full, LONGER)


@pytest.mark.nightly
@each("sign, reach", product([1, -1], [2, 4, 30]))
def test_clipped_distances_are_rows_of_a_parameter(sign, reach):
    rng = np.random.RandomState(reach)
    table = rng.standard_normal((2 * reach + 1, 3))

    def of_shape(shape):
        return table.T[:, np.clip(sign * distances(shape), -reach, reach) + reach]

    bias = fitted(rng, of_shape, full, {"relative": table})
    assert (bias.kind, bias.parameter, bias.transposed) == ("positions", "relative", False)
    assert np.array_equal(table[list(bias.rows)], bias.score.table)
    assert_adds(bias, of_shape, full, LONGER)


@pytest.mark.nightly
@each("kind, reverse", [("t5", False), ("positions", True)])
def test_distances_of_the_past_are_rows_of_a_parameter(kind, reverse):
    rng = np.random.RandomState(0)
    table = rng.standard_normal((3, 6))

    def of_shape(shape):
        rows = np.clip(-distances(shape), 0, 5)
        return table[:, 5 - rows if reverse else rows]

    bias = fitted(rng, of_shape, causal, {"relative": table})
    assert (bias.kind, bias.parameter, bias.transposed) == (kind, "relative", True)
    assert_adds(bias, of_shape, causal, LONGER)


@pytest.mark.nightly
def test_the_diagonal_of_cross_attention_is_read_from_the_tables():
    rng = np.random.RandomState(0)
    table, shapes = rng.standard_normal((8, 3)), ((5, 7), (6, 11))
    for end in (False, True):

        def alibi(shape, end=end):
            return -alibi_slopes(3)[:, None, None] * abs(distances(shape, end))

        def buckets(shape, end=end):
            return table.T[:, t5_buckets(distances(shape, end), buckets=8, max_distance=20)]

        offset = "end" if end else 0
        bias = fitted(rng, alibi, full, {}, shapes)
        assert bias == Bias("alibi", Alibi(alibi_slopes(3), offset))
        bias = fitted(rng, buckets, full, {"w": table}, shapes)
        assert (bias.kind, bias.score.offset) == ("t5", offset)
        assert_adds(bias, buckets, full, shapes[1])


def test_a_constant_of_one_size_is_added_as_it_is():
    rng = np.random.RandomState(0)
    table = rng.standard_normal((3, 11, 11))
    for sees in (full, causal):
        bias = fitted(rng, lambda shape: table, sees, {}, shapes=(LONGEST,) * 2)
        assert (bias.kind, bias.parameter) == ("positions", None)
        assert_adds(bias, lambda shape: table, sees, LONGEST)
        bias = fitted(rng, lambda shape: table, sees, {"p": table[None]}, shapes=(LONGEST,))
        assert bias == Bias("positions", Additive(table), "p")


def test_what_no_score_says_has_no_name():
    rng = np.random.RandomState(0)
    table, random = rng.standard_normal((8, 3)), rng.standard_normal((3, 11, 11))
    rows = rng.permutation(21) % 8

    def by_position(shape):  # of a table that a longer text would outgrow
        return random[:, : shape[0], : shape[1]]

    def by_logarithm(shape):
        return -alibi_slopes(3)[:, None, None] * np.log1p(abs(distances(shape)))

    def by_other_buckets(shape):
        return table.T[:, rows[distances(shape) + 10]]

    for of_shape in (by_position, by_logarithm, by_other_buckets):
        assert fitted(rng, of_shape, full, {"w": table}) is None
    unequal = measured(rng, [random, 2 * random], [full((11, 11))] * 2)
    assert fit_bias(unequal, [full((11, 11))] * 2, {}) is None


def test_each_visible_value_is_compared():
    rng = np.random.RandomState(0)
    table = rng.standard_normal((8, 2))
    biases = {
        "alibi": lambda d: -alibi_slopes(2)[:, None, None] * abs(d),
        "t5": lambda d: table.T[:, t5_buckets(d, buckets=8, max_distance=16)],
    }
    for kind, of_distance in biases.items():
        tables = [np.array(of_distance(distances(shape))) for shape in SQUARES]
        visible = [full(shape) for shape in SQUARES]
        bias = fit_bias(tables, visible, {"w": table})
        assert bias is not None
        assert bias.kind == kind
        for place in np.ndindex(2, 7, 7):
            changed = tables[0].copy()
            changed[place] += 1e-6
            assert fit_bias([changed, tables[1]], visible, {"w": table}) is None, place


def test_what_is_no_table_is_refused():
    with pytest.raises(ValueError, match="three axes"):
        fit_bias([np.zeros((3, 3))], [full((3, 3))], {})
    with pytest.raises(ValueError, match="three axes"):
        fit_bias([], [], {})
    with pytest.raises(ValueError, match="finite"):
        fit_bias([np.full((1, 3, 3), np.nan)], [full((3, 3))], {})


@pytest.mark.nightly
def test_a_score_is_named_from_what_it_adds():
    table = np.random.RandomState(0).standard_normal((8, 3))
    score = T5Bias(table, buckets=8, max_distance=16)
    shapes = (LONGEST, LONGER)
    biases = [added(score, 3, shape) for shape in shapes]
    assert fit_bias(biases, [full(s) for s in shapes], {"w": table}) == Bias("t5", score, "w")
