"""The laws of `judge.no_worse`, by hand-made numbers; one more file of `test_laws_judge`."""

import numpy as np

from flax_attn.parity import judge

FLOOR = {
    "float64": 1e-12,
    "float32": 4 * 2.0**-23,
    "bfloat16": 2 * 2.0**-7,
    "float16": 2 * 2.0**-10,
}


def row(*numbers):
    return np.asarray(numbers, np.float64)


def test_no_worse_is_twice_the_others_error_and_a_floor():
    own, others, truth = 2.0**-6, row(2.0, 2.0**-5), row(2.0, 0.0)
    for dtype, floor in FLOOR.items():
        limit = 2 * own + floor
        for sign in (2, -2):
            at = judge.no_worse(row(2.0, sign * limit), others, truth, dtype)
            assert at == judge.Verdict("no worse", limit, limit, own) and at.ok
            over = judge.no_worse(row(2.0, sign * (limit + 2.0**-40)), others, truth, dtype)
            assert not over.ok and (over.limit, over.other_error) == (limit, own)
            assert over.index == (1,) and over.error == limit + 2.0**-40
        same = judge.no_worse(truth, truth, truth, dtype)
        assert same == judge.Verdict("no worse", 0.0, floor, 0.0)


def test_no_worse_measures_both_against_the_scale():
    verdict = judge.no_worse(row(3.0), row(5.0), row(4.0), "float32", 8.0)
    assert (verdict.error, verdict.other_error) == (0.125, 0.125) and verdict.ok
    assert verdict == judge.no_worse(row(3.0), row(5.0), row(4.0), "float32", scale=8.0)


def test_no_worse_than_what_is_not_finite_proves_nothing():
    for others in (row(np.nan), row(np.inf)):
        verdict = judge.no_worse(row(1.0), others, row(1.0), "float16")
        assert (verdict.statement, verdict.error, verdict.limit) == ("no worse", np.inf, 0.0)
        assert verdict.other_error == np.inf and not verdict.ok and verdict.index is None
        assert verdict.note == (
            "the other has NaN or Inf in float16 where the truth has none, or the reverse"
        )
    verdict = judge.no_worse(row(np.nan), row(1.0), row(1.0), "float16")
    assert not verdict.ok and verdict.other_error == 0.0 and "one side" in verdict.note


def test_no_worse_wants_a_truth_that_is_not_all_zeros_unless_it_is_expected():
    zeros = np.zeros(3)
    verdict = judge.no_worse(zeros, zeros, zeros, "float32")
    assert not verdict.ok and not verdict.shows and verdict.note == judge.ZEROS
    assert verdict.statement == "no worse" and verdict.limit == FLOOR["float32"]
    assert judge.no_worse(zeros, zeros, zeros, "float32", zero=True).ok
    assert judge.no_worse(zeros, zeros, zeros, "float32", 2.0).ok
    assert not judge.no_worse(zeros, zeros, zeros, "float32", None, False).ok
