"""The laws of the judge, by hand-made numbers: each limit met exactly passes, a hair more fails."""

import ml_dtypes
import numpy as np
import pytest

from flax_attn.parity import judge

EPS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
FACTOR = {"float32": 2, "bfloat16": 3, "float16": 3}
FLOOR = {"float32": 4, "bfloat16": 2, "float16": 2}
NAN, INF = np.nan, np.inf
SPECIAL = [NAN, INF, -INF, 1.0]


def row(*numbers):
    return np.asarray(numbers, np.float64)


def place(verdict):
    """The worst element and both values there, each a plain Python number."""
    assert verdict.index is not None and all(type(i) is int for i in verdict.index)
    assert type(verdict.got) is float and type(verdict.want) is float
    return verdict.index, verdict.got, verdict.want


def plain(verdict, statement, error, limit, own=None):
    """No place, no note: only numbers, and these are plain floats."""
    assert verdict == judge.Verdict(statement, error, limit, own)
    assert (verdict.index, verdict.got, verdict.want, verdict.note) == (None, None, None, "")
    assert type(verdict.error) is float and type(verdict.limit) is float
    return verdict.ok


# Verdicts.


def test_a_verdict_passes_up_to_its_limit_and_never_on_nan():
    for error, limit, ok in (
        (1.0, 1.0, True),
        (1.5, 1.0, False),
        (0.5, 1.0, True),
        (NAN, 1.0, False),
    ):
        assert judge.Verdict("exact", np.float64(error), limit).ok is ok


def test_the_ratio_is_over_torchs_own_error_where_there_is_one():
    assert judge.Verdict("exact", 3.0, 1.0, other_error=2.0).ratio == 1.5
    assert judge.Verdict("exact", 3.0, 1.0).ratio is None
    assert judge.Verdict("exact", 3.0, 1.0, other_error=0.0).ratio is None


def test_verdicts_are_frozen_and_equal_by_value():
    verdict = judge.Verdict("exact", 0.0, 1.0)
    assert verdict == judge.Verdict("exact", 0.0, 1.0) and hash(verdict)
    with pytest.raises(AttributeError, match="cannot assign"):
        verdict.error = 1.0


# Exact.


def test_exact_is_equality_of_bits():
    assert plain(judge.exact(row(*SPECIAL), row(*SPECIAL)), "exact", 0.0, 0.0)
    assert plain(judge.exact([1, 2], [1, 2]), "exact", 0.0, 0.0)
    assert plain(judge.exact(np.zeros((0, 3)), np.zeros((0, 3))), "exact", 0.0, 0.0)
    assert plain(judge.exact(np.float32(2), np.asarray(2, np.float32)), "exact", 0.0, 0.0)


def test_exact_names_the_first_element_that_differs_and_the_share():
    want = np.arange(12.0).reshape(3, 4)
    got = want.copy()
    got[1, 2], got[2, 0], got[2, 3] = np.nextafter(6.0, 7), 0.0, 90.0
    verdict = judge.exact(got, want)
    assert (verdict.statement, verdict.error, verdict.limit) == ("exact", 0.25, 0.0)
    assert type(verdict.error) is float and not verdict.ok and verdict.other_error is None
    assert place(verdict) == ((1, 2), np.nextafter(6.0, 7), 6.0)


def test_exact_tells_zero_from_minus_zero_and_one_nan_from_another():
    assert place(judge.exact(row(1.0, -0.0), row(1.0, 0.0))) == ((1,), 0.0, 0.0)
    other = np.asarray([0x7FF8000000000001], np.uint64).view(np.float64)
    assert judge.exact(other, row(NAN)).index == (0,)
    assert judge.exact(np.asarray(True), np.asarray(False)).index == ()


def test_exact_reads_elements_in_their_order_however_they_lie_in_memory():
    rows = np.arange(6.0).reshape(2, 3)
    assert judge.exact(rows.T, np.ascontiguousarray(rows.T)).ok
    assert judge.exact(rows[:, ::2], rows[:, ::2].copy()).ok
    assert place(judge.exact(rows.T[1:], np.zeros((2, 2)) + rows.T[1])) == ((1, 0), 2.0, 1.0)


def test_a_failed_fact_is_reported_with_its_sentence():
    verdict = judge.failed_fact("two leaves where one was")
    assert verdict == judge.Verdict("exact", INF, 0.0, note="two leaves where one was")
    assert not verdict.ok


def test_exact_wants_the_same_shape_and_the_same_dtype():
    for got, note in (
        (np.zeros((2, 3)), "float64[2, 3] is not float64[3, 2]"),
        (np.zeros((3, 2), np.float32), "float32[3, 2] is not float64[3, 2]"),
        (np.zeros(6, np.int64), "int64[6] is not float64[3, 2]"),
    ):
        verdict = judge.exact(got, np.zeros((3, 2)))
        assert verdict == judge.Verdict("exact", INF, 0.0, note=note) and not verdict.ok
    assert not judge.exact(np.zeros(0), np.zeros(0, np.float32)).ok


# The error.


def test_the_error_is_the_norm_of_the_difference_over_the_norm_of_the_reference():
    want = np.asarray([[3.0, 0.0], [0.0, 4.0]])
    assert judge.error(want + np.asarray([[0.0, 3.0], [-4.0, 0.0]]), want) == 1.0
    got = want + np.asarray([[-0.5, 0.5], [0.5, -0.5]])
    assert judge.error(got, want) == 0.2 and judge.error(got, want, scale=4.0) == 0.25
    assert judge.error(got, want, 0.0) == INF and judge.error(want, want, 0.0) == 0.0
    assert judge.error([[3, 0], [0, 4]], want) == 0.0
    assert judge.error(np.float32(3), np.float16(4)) == 0.25
    for error in (judge.error(2 * want, want), judge.error(want, want, 2), judge.error(1, 1, 0)):
        assert type(error) is float


def test_the_error_of_narrow_and_unsigned_numbers_is_taken_in_float64():
    assert judge.error(np.asarray([0, 3], np.uint8), np.asarray([1, 0], np.uint8)) == 10**0.5
    assert judge.error(np.asarray([True, True]), np.asarray([True, False])) == 1
    assert judge.error(np.asarray([300.0], np.float16), np.asarray([600.0], np.float16)) == 0.5


def test_the_error_of_a_reference_of_zeros():
    assert judge.error(np.zeros(3), np.zeros(3)) == 0.0
    assert judge.error(row(0.0, 1e-100), np.zeros(2)) == INF
    assert judge.error(np.zeros((0, 3)), np.zeros((0, 3))) == 0.0


def test_the_squares_of_the_tiny_and_the_huge_are_not_lost():
    for size in (2.0**-1040, 2.0**-700, 2.0**700, 2.0**1022, -(2.0**-700), -(2.0**700)):
        assert judge.error(row(2 * size, 0.0), row(size, 0.0)) == 1.0
        assert judge.error(row(size, 2 * size), row(size, 0.0)) == 2.0
        assert judge.error(row(size, 0.0), row(size, 2 * size)) == 2 / 5**0.5
        assert judge.error(row(0.0, size), row(size, 0.0), scale=abs(size)) == 2**0.5
        assert judge.error(row(0.0, size), row(0.0, 0.0)) == INF
        assert judge.error(row(0.0), row(size)) == 1.0


def test_nan_and_infinity_agree_in_their_places_alone():
    assert judge.error(row(*SPECIAL), row(*SPECIAL)) == 0.0
    assert judge.error(row(NAN, INF, -INF, 3.0, 9.0), row(NAN, INF, -INF, 3.0, 4.0)) == 1
    for i, one in enumerate(SPECIAL):
        for k, two in enumerate(SPECIAL):
            got = judge.error(row(2.0, one), row(2.0, two))
            assert got == (0.0 if i == k else INF) and type(got) is float


def test_the_error_of_another_shape_is_infinite():
    assert judge.error(np.ones((2, 3)), np.ones((3, 2))) == INF
    assert judge.error(np.ones((1, 3)), np.ones(3)) == INF
    assert judge.error(np.ones(()), np.ones(1), 2.0) == INF


# The same function.


def test_the_same_function_is_one_part_in_a_million_million():
    two = 2.0**40  # powers of two, so that nothing is rounded
    for sign in (1, -1):
        at = judge.same_function(row(two, sign * 1e-12 * two), row(two, 0.0))
        assert plain(at, "same function", 1e-12, 1e-12)
        more = sign * np.nextafter(1e-12, 1) * two
        over = judge.same_function(row(two, more), row(two, 0.0))
        assert not over.ok and (over.statement, over.limit, over.note) == (
            "same function",
            1e-12,
            "",
        )
        assert place(over) == ((1,), more, 0.0)
    assert judge.same_function(row(3.0), row(4.0)).error == 0.25


def test_the_same_function_with_a_scale_is_measured_against_it():
    want, got = row(1.0, 0.0), row(1.0, 1.0)
    assert judge.same_function(got, want, 1e12).ok and judge.same_function(got, want, scale=1e12).ok
    assert not judge.same_function(got, want, 999999999999.0).ok
    assert not judge.same_function(got, want).ok
    for one in (row(NAN, 1.0), row(INF, 1.0)):  # a scale that is no number passes nothing
        verdict = judge.same_function(one, one, NAN)
        assert not verdict.ok and verdict.index == (0,)


def test_a_reference_of_zeros_proves_nothing_unless_it_is_expected():
    zeros = np.zeros((2, 3))
    verdict = judge.same_function(zeros, zeros)
    nothing = judge.Verdict("same function", INF, 1e-12, note=judge.ZEROS, shows=False)
    assert verdict == nothing and not verdict.ok and not verdict.differs
    other = judge.same_function(zeros + 1, zeros)
    assert other.differs and other.error == INF and other.note == "the reference is all zeros"
    assert judge.same_function(zeros, zeros, zero=True).ok
    assert judge.same_function(zeros, zeros, 1.0).ok and judge.same_function(zeros, zeros, 0.0).ok
    assert not judge.same_function(zeros + 1, zeros, zero=True).ok
    assert judge.same_function(row(0.0, 2.0), row(0.0, 2.0)).ok
    none = judge.same_function(zeros[:0], zeros[:0])
    assert (none.shows, none.note, none.ok, none.differs) == (False, judge.EMPTY, True, False)
    filled = judge.same_function(row(INF, -INF), row(INF, -INF))
    assert (filled.shows, filled.note) == (False, judge.FILLED) and filled.ok
    assert judge.same_function(row(-INF), row(INF)).differs


def test_another_shape_is_named_before_all_else():
    for got in (np.zeros((3, 2)), np.zeros(6), np.zeros(())):
        verdict = judge.same_function(got, np.zeros((2, 3)))
        assert verdict.error == INF and verdict.index is None
        assert verdict.note == f"shape {got.shape} is not (2, 3)"


def test_the_worst_element_is_named_with_both_values():
    want = np.arange(1.0, 13.0).reshape(3, 4)
    got = want.copy()
    got[0, 1], got[2, 1], got[2, 3] = 3.0, 5.0, 16.0
    assert place(judge.same_function(got, want)) == ((2, 1), 5.0, 10.0)
    listed = judge.same_function([1, 2.5], [1, 2])
    assert place(listed) == ((1,), 2.5, 2.0)
    assert place(judge.same_function(np.asarray(3), np.asarray(2))) == ((), 3.0, 2.0)


def test_elements_that_are_not_finite_on_both_sides_are_not_the_worst():
    want = row(NAN, INF, -INF, 1.0, 2.0, 7.0)
    assert place(judge.same_function(want + row(0, 0, 0, 0, 1, 0), want)) == ((4,), 3.0, 2.0)


def test_the_first_nan_or_infinity_on_one_side_only_is_named():
    want = row(INF, 1.0, NAN, 3.0)
    verdict = judge.same_function(row(INF, 90.0, NAN, -INF), want)
    assert verdict.note == "NaN or Inf on one side only" and verdict.error == INF
    assert place(verdict) == ((3,), -INF, 3.0)
    assert judge.same_function(row(INF, 1.0, 2.0, NAN), want).index == (2,)
    assert judge.same_function(row(-INF, 1.0, NAN, NAN), want).index == (0,)


# The same precision.


def test_the_same_precision_is_a_multiple_of_torchs_own_error_and_a_few_eps():
    own, two = 2.0**-6, row(2.0, 0.0)  # powers of two, so that nothing is rounded
    for dtype, eps in EPS.items():
        limit = FACTOR[dtype] * own + FLOOR[dtype] * eps
        for sign in (2, -2):
            at = judge.within_precision(row(2.0, sign * limit), own, two, dtype)
            assert plain(at, "same precision", limit, limit, own)
            more = limit + 2.0**-40
            over = judge.within_precision(row(2.0, sign * more), own, two, dtype)
            assert not over.ok and (over.limit, over.other_error) == (limit, own)
            assert over.index == (1,) and over.error == more
        floor = judge.within_precision(row(1.0), 0.0, row(1.0), dtype)
        assert plain(floor, "same precision", 0.0, FLOOR[dtype] * eps, 0.0)


def test_other_dtypes_have_no_limit():
    for dtype in ("float64", "int8", "float8_e5m2"):
        with pytest.raises(KeyError, match=dtype):
            judge.within_precision(row(1.0), 0.0, row(1.0), dtype)


def test_the_same_precision_measures_torch_against_the_truth_too():
    truth, torchs = row(4.0), row(3.0)
    for scale, own in ((None, 0.25), (8.0, 0.125)):
        for dtype in EPS:
            verdict = judge.same_precision(row(4.0), torchs, truth, dtype, scale)
            assert verdict == judge.within_precision(row(4.0), own, truth, dtype, scale)
            assert verdict.other_error == own and verdict.error == 0.0
            assert judge.same_precision(torchs, torchs, truth, dtype, scale=scale).error == own
    wide = np.asarray([3.0], ml_dtypes.bfloat16)
    assert judge.same_precision(row(3.5), wide, truth, "bfloat16").ratio == 0.5


def test_torch_that_is_far_off_itself_shows_nothing():
    for own in (INF, NAN):
        verdict = judge.within_precision(row(1.0), own, row(1.0), "float16")
        assert (verdict.statement, verdict.error, verdict.limit) == ("same precision", INF, 0.0)
        assert verdict.other_error is own and not verdict.ok and not verdict.differs
        assert verdict.note == "torch itself has other NaN or Inf in float16 than in float64"
    own = np.nextafter(0.1, 1)
    for got, ok in ((1.0, True), (7.0, False)):
        verdict = judge.within_precision(row(got), own, row(1.0), "float16")
        assert verdict.limit == 3 * own + 2 * EPS["float16"] and verdict.ok is ok
        assert not verdict.shows and not verdict.differs and verdict.index is None
        assert verdict.note == "torch's own error in float16 is 1.0e-01, beside which nothing shows"
    assert judge.within_precision(row(1.0), 0.1, row(1.0), "float16").shows
    assert judge.same_precision(row(1.0), row(NAN), row(1.0), "float32").other_error == INF


def test_a_truth_of_zeros_proves_nothing_unless_it_is_expected():
    zeros = np.zeros(3)
    verdict = judge.within_precision(zeros, 0.0625, zeros, "float32")
    assert verdict.note == judge.ZEROS and not verdict.shows and not verdict.ok
    assert verdict.limit == 0.125 + 4 * EPS["float32"] and verdict.statement == "same precision"
    assert judge.within_precision(zeros + 1, 0.0625, zeros, "float32").differs
    assert not judge.same_precision(zeros, zeros, zeros, "float32").ok
    assert judge.same_precision(zeros, zeros, zeros, "float32", zero=True).ok
    assert judge.within_precision(zeros, 0.0, zeros, "float32", zero=True).ok
    assert judge.same_precision(zeros, zeros, zeros, "float32", 2.0).ok
    assert judge.within_precision(zeros, 0.0, zeros, "float32", 2.0).ok


def test_failures_of_precision_keep_torchs_own_error():
    shape = judge.within_precision(np.ones((1, 2)), 0.0625, np.ones(2), "float32")
    assert shape.other_error == 0.0625 and shape.note == "shape (1, 2) is not (2,)" and not shape.ok
    pattern = judge.within_precision(row(1.0, NAN), 0.0625, row(1.0, 2.0), "float32")
    assert pattern.other_error == 0.0625 and pattern.index == (1,) and "one side" in pattern.note
    assert pattern.limit == shape.limit == 0.125 + 4 * EPS["float32"]


# Likeness, tables and gradients.


def test_likeness_is_one_part_in_a_million_of_the_second():
    two = 2.0**20  # powers of two, so that nothing is rounded
    assert judge.allclose(row(two, 1e-6 * two), row(two, 0.0)) is True
    assert judge.allclose(row(two, np.nextafter(1e-6, 1) * two), row(two, 0.0)) is False
    assert judge.allclose(row(1e6), row(1e6 - 1)) is False
    assert judge.allclose(row(1.0, 2.0), row(1.0, 2.0)) and not judge.allclose(row(NAN), row(1.0))
    assert not judge.allclose(np.ones((2, 1)), np.ones((1, 2)))


def test_printed_is_half_of_the_fourth_decimal_and_a_hair():
    assert judge.printed(row(judge.PRINTED), row(0.0)) is True
    assert judge.printed(row(0.0), row(judge.PRINTED)) is True
    assert judge.printed(row(np.nextafter(judge.PRINTED, 1)), row(0.0)) is False
    assert judge.printed(row(1.0, 5.09999e-5), row(1.0, 0.0))
    assert not judge.printed(row(1.0, 5.10001e-5), row(1.0, 0.0))
    assert not judge.printed(row(1.0, 0.0), row(1.0, 5.10001e-5))


def test_printed_wants_shape_and_infinities_in_place():
    assert judge.printed([1, 2], [1, 2]) and judge.printed(np.zeros((0, 2)), np.zeros((0, 2)))
    assert judge.printed(row(*SPECIAL), row(*SPECIAL)) is True
    assert judge.printed(np.ones((1, 2)), np.ones(2)) is False
    assert judge.printed(np.ones((2, 1)), np.ones((1, 2))) is False
    assert judge.printed(row(1.0, INF), row(1.0, -INF)) is False
    assert judge.printed(row(1.0, 1.0), row(1.0, NAN)) is False
    assert judge.printed(np.asarray([0, 2], np.uint8), np.asarray([1, 2], np.uint8)) is False


def test_a_gradient_is_measured_against_itself_or_a_share_of_all():
    gradients = [np.full((3, 3), 1000.0), row(4000.0)]  # norms 3000, 4000: together 5000
    assert judge.gradient_scale(gradients, gradients[0]) == 3000.0
    assert judge.gradient_scale(gradients, row(0.0, 1.0)) == 5.0
    assert judge.gradient_scale(gradients, row(3.0, 4.5)) > 5.0
    assert judge.gradient_scale([row(1.0)], [[3], [4]]) == 5.0
    assert judge.gradient_scale([np.full(4, 32768, np.float16)], row(1.0)) == 65.536
    for scale in (judge.gradient_scale(gradients, row(1.0)), judge.gradient_scale([], [2])):
        assert type(scale) is float


def test_the_whole_gradient_is_the_norm_of_all():
    whole = judge.whole_gradient([np.full((3, 3), 1.0), [[4]]])
    assert whole == 5.0 and type(whole) is float
    narrow = judge.whole_gradient([np.full(4, 60000, np.float16)])
    assert narrow == 120000.0 and judge.whole_gradient([]) == 0.0
    assert judge.whole_gradient([row(INF, 3000.0, NAN), row(-INF, 4000.0)]) == 5000.0
