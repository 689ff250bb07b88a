"""The laws of fills and of huge numbers: neither hides what stands beside it."""

import numpy as np

from flax_attn.parity import judge
from flax_attn.parity.groups import fills, groups

INF, NAN = np.inf, np.nan
F32, F64 = (float(np.finfo(d).max) for d in ("float32", "float64"))
FILLS = (-INF, -F64, -0.2 * F64, -F32, -1e9, -1e10, -1e30)


def row(*numbers):
    return np.asarray(numbers, np.float64)


def kinds(x, dtype="float64"):
    return fills(np.asarray(x, np.float64), dtype).tolist()


def test_fills_are_known_numbers_and_those_near_the_largest():
    assert kinds(FILLS) == [-1] * 7
    assert kinds([0.1 * F64, np.nextafter(0.1 * F64, 0), INF, NAN, 0.0]) == [1, 0, 0, 0, 0]
    assert kinds([-0.05 * F32, -0.1 * F32], "float32") == [0, -1]
    assert kinds([0.1 * F32, np.nextafter(0.1 * F32, 0)], "float32") == [1, 0]
    assert kinds([-32751.0, -32752.0, 6551.0, 65504.0], "float16") == [0, -1, 0, 1]
    assert kinds([1e9, -2e9, -1.1e9, -1e29, -1e4, -1e10 - 1]) == [0] * 6


def test_a_known_fill_is_one_within_a_unit_of_its_dtype():
    for known in (1e9, 1e10, 1e30):
        for dtype, eps in (("float32", 2.0**-23), ("bfloat16", 2.0**-7)):
            near, far = -known * (1 + 0.9 * eps), -known * (1 + 1.1 * eps)
            assert kinds([near, far], dtype) == [-1, 0]
        assert kinds([-np.nextafter(known, 0), -known * (1 + 2.0**-50)]) == [-1, 0]
    at = -1e9 - 7812500.0  # by 2**-7 of it, in exact numbers
    assert kinds([at, np.nextafter(at, -INF)], "bfloat16") == [-1, 0]


def test_groups_are_split_upwards_at_gaps_of_a_million():
    assert groups(row(1.0, -3e6, 2.0, 5e13, 0.0)).tolist() == [0, 1, 0, 2, 0]
    assert groups(row(4.0, 4e6)).tolist() == [0, 0]
    assert groups(row(4.0, -np.nextafter(4e6, 5e6))).tolist() == [0, 1]
    assert groups(row(1e-17, 1.0, 1e-9, 3e5)).tolist() == [0] * 4
    assert groups(row(1e-9, 1e6)).tolist() == [0, 0]
    assert groups(row(1e-9, np.nextafter(1e6, 2e6))).tolist() == [0, 1]
    assert groups(row(0.0, 1e30, 0.0)).tolist() == [0, 0, 0]
    assert groups(np.zeros((0, 2))).shape == (0, 2)
    assert groups(row(F64, 1.0)).tolist() == [1, 0]
    assert groups(row(F64, 1e303, 1.0)).tolist() == [1, 1, 0]


def test_zeros_beside_huge_numbers_are_a_group_where_the_other_side_has_what_no_rounding_leaves():
    """A port with 3 where torch has 0, beside a mask of -3.4e38, was called equal."""
    want = row(0.0, -3.4e38, 0.0)
    assert groups(want, want).tolist() == [0, 0, 0]
    assert groups(want, row(1e23, -3.4e38, 0.0)).tolist() == [0, 0, 0]  # as rounding leaves
    assert groups(want, row(0.0, -3.4e38, 3.0)).tolist() == [0, 1, 0]
    assert groups(row(0.0, 1e30, 2.0), row(3.0, 1e30, 2.0)).tolist() == [0, 1, 0]
    least = 2.0**-53 * 1e9
    assert groups(row(0.0, 1e9), row(least, 1e9)).tolist() == [0, 0]
    assert groups(row(0.0, 1e9), row(np.nextafter(least, 0), 1e9)).tolist() == [0, 1]
    assert groups(row(0.0, 1e12, 1e9), row(least, 1e12, 1e9)).tolist() == [0, 0, 0]
    assert not judge.same_function(row(3.0, -3.4e38), row(0.0, -3.4e38)).ok
    assert judge.same_function(row(1e-5, -1e9 - 1.0), row(0.0, -1e9 - 1.0)).ok


def test_a_small_number_is_judged_beside_a_huge_one():
    want = row(1.0, -2.0, 3e15, 4e15)
    assert judge.same_function(want, want).ok
    got = want + row(0.0, 1e-9, 0.0, 0.0)
    verdict = judge.same_function(got, want)
    assert verdict.differs and (verdict.index, verdict.got, verdict.want) == ((1,), -2 + 1e-9, -2.0)
    assert judge.allclose(row(verdict.error), row(1e-9 / np.sqrt(5)))
    assert verdict.note == "among 2 numbers judged apart from others of up to 4e+15"
    huge = judge.same_function(want + row(0.0, 0.0, 1e4, 0.0), want)
    assert huge.differs and huge.index == (2,) and huge.error == 1e4 / 5e15
    assert judge.same_function(want + row(0, 0, 1e2, 0), want).ok
    assert judge.same_function(got, want, 1.0).error == got[1] + 2  # a scale is for all


def test_what_cancellation_leaves_is_not_judged_by_itself():
    want = row(1.0, 2.0, 3e-17)
    assert judge.same_function(want + row(0, 0, 1e-17), want).ok


def test_fills_go_by_their_places():
    for fill in FILLS[1:]:
        want = row(1.0, fill, 2.0)
        assert judge.same_function(want, want).ok
        off = judge.same_function(row(1.0, fill, 2.5), want)
        assert off.differs and off.index == (2,) and off.error == 0.5 / np.sqrt(5)
        moved = judge.same_function(row(fill, 1.0, 2.0), want)
        assert moved.differs and moved.error == INF and moved.index == (0,)
        assert moved.note == "a fill on one side only"
        for other in FILLS[1:]:
            assert judge.same_function(row(1.0, other, 2.0), want).ok
        assert judge.same_function(row(1.0, -INF, 2.0), want).differs
        assert judge.same_function(row(1.0, -INF, 2.0), want, fill=True).ok
        assert judge.same_function(want, row(1.0, -INF, 2.0), fill=True).ok
        assert judge.same_function(row(1.0, INF, 2.0), want, fill=True).differs
        assert judge.same_function(row(1.0, NAN, 2.0), want, fill=True).differs
    positive = row(1.0, F64)
    assert judge.same_function(positive, positive).ok
    assert judge.same_function(positive, -positive * row(-1, 1)).differs
    assert judge.same_function(row(1.0, 0.5 * F64), positive).ok
    assert judge.same_function(row(1.0, INF), positive, fill=True).differs


def test_a_mask_of_fills_and_zeros_shows_their_places():
    mask = row(0.0, -1e9, 0.0)
    assert judge.same_function(mask, mask).ok
    assert judge.same_function(row(-1e9, 0.0, 0.0), mask).differs
    alone = judge.same_function(row(-1e9), row(-1e30))
    assert not alone.shows and alone.note == judge.FILLED
    assert judge.same_function(row(1e-3, -1e9, 0.0), mask).differs


def test_precision_is_that_of_each_group():
    truth = row(1.0, 2.0, 3e15)
    torchs, eps = truth + row(2.0**-24, 0, 2e8), 2.0**-23
    fine = judge.same_precision(truth + row(eps, 0, 0), torchs, truth, "float32")
    assert fine.ok
    off = judge.same_precision(truth + row(1e-3, 0, 0), torchs, truth, "float32")
    assert off.differs and off.index == (0,) and off.other_error == 2.0**-24 / np.sqrt(5)
    narrow = row(1.0, -F32, 2.0)
    wide = row(1.0, -F64, 2.0)
    assert judge.same_precision(narrow, narrow, wide, "float32").ok
    assert judge.same_precision(row(1.5, -F32, 2.0), narrow, wide, "float32").differs
    open_ = row(1.0, -INF, 2.0)
    assert judge.same_precision(open_, narrow, wide, "float32").differs
    assert judge.same_precision(open_, narrow, wide, "float32", fill=True).ok


def test_a_group_in_which_torch_tells_nothing_is_left_out():
    truth = row(1.0, 3e15)
    torchs = truth + row(0.5, 0.0)
    assert judge.same_precision(row(1.5, 3e15), torchs, truth, "float32").ok
    assert judge.same_precision(row(1.5, 4e15), torchs, truth, "float32").differs
    assert not judge.same_precision(row(1.0), row(1.5), row(1.0), "float32").shows


def test_noise_of_torch_is_as_far_as_an_input_can_tell():
    want = row(3.0, 4.0)
    noisy = [want + row(1e-9, 0), want - row(0, 2e-9), row(NAN, 0)]
    verdict = judge.same_function(want + row(4e-9, 0), want, noisy=noisy)
    assert verdict.ok and verdict.by_noise and judge.allclose(row(verdict.noise), row(4e-10))
    over = judge.same_function(want + row(5e-9, 0), want, noisy=noisy)
    assert over.differs and not over.by_noise and over.limit == 2 * over.noise
    still = judge.same_function(want, want, noisy=noisy)
    assert still.ok and not still.by_noise
    quiet = judge.same_function(want, want, noisy=[want])
    assert (quiet.limit, quiet.noise) == (1e-12, 0.0)
    assert judge.same_function(want, want).noise is None


def test_noise_is_that_of_the_group():
    want = row(1.0, 3e15)
    noisy = [want + row(0, 3e12)]
    assert judge.same_function(want + row(0, 3e12), want, noisy=noisy).by_noise
    assert judge.same_function(want + row(1e-9, 0), want, noisy=noisy).differs


def test_complex_numbers_go_by_norm():
    want = np.asarray([3 + 4j, -1j])
    assert judge.same_function(want, want).ok
    verdict = judge.same_function(want.conj(), want)
    assert verdict.differs and verdict.index == (0, 1)
    assert judge.error(want + 2, want) == np.sqrt(8 / 26)
    assert judge.same_function(want, want.real).note == "shape (2, 2) is not (2,)"


def test_integers_go_by_value():
    wide = np.asarray([1, -2, 3])
    assert judge.same_values(wide.astype(np.int32), wide).ok
    assert judge.same_values(wide.astype(np.int64), wide.astype(np.int8)).ok
    verdict = judge.same_values(np.asarray([1, -2, 4], np.int32), wide)
    assert verdict.differs and verdict.error == 1 / 3
    assert (verdict.index, verdict.got, verdict.want) == ((2,), 4.0, 3.0)
    assert judge.same_values(wide > 0, wide > 0).ok
    assert judge.same_values(wide > 0, wide).differs
    assert judge.same_values(wide[:2], wide).differs
    none = judge.same_values(wide[:0], wide[:0])
    assert not none.shows and none.note == judge.EMPTY


def test_groups_of_nothing_of_small_numbers_and_of_close_ones():
    assert fills(np.zeros((0, 2)), "float32").shape == (0, 2)
    small = groups(np.asarray([[3.0, 0.0]]))
    assert small.dtype == np.int8 and small.tolist() == [[0, 0]]
    # The largest ordinary number decides whether there is a gap before the huge ones.
    assert groups(np.asarray([1e5, 1e-3, 2e7])).tolist() == [0, 0, 0]


def test_what_stands_beside_zeros_is_of_either_sign_and_beside_zeros_alone():
    x = np.asarray([1e30, 0.0, 0.0])
    assert groups(x, np.asarray([1e30, -3.0, 0.0])).tolist() == [1, 0, 0]
    assert groups(x, np.asarray([5.0, 0.0, 0.0])).tolist() == [0, 0, 0]
