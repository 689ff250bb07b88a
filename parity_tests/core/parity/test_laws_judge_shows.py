"""The laws of what a judgement shows, of its worst group, and of gradients measured together."""

import numpy as np

from flax_attn.parity import judge

INF, NAN = np.inf, np.nan
F64 = float(np.finfo("float64").max)


def row(*numbers):
    return np.asarray(numbers, np.float64)


def test_the_limits_are_those_of_the_documents():
    assert (judge.SIGMAS, judge.CHANCE, judge.ROUNDS, judge.HUGE_GRADIENT) == (6, 1e-9, 0.3, 1e6)
    assert (judge.NOISE, judge.TELLS, judge.GRADIENT_SHARE) == (2, 0.1, 1e-3)
    assert judge.ZEROS == "both are all zeros" and judge.EMPTY == "there are no elements"
    assert judge.FILLED == "every element is infinite or a fill"


# What is shown.


def test_only_what_is_shown_and_fails_differs():
    for shows, error, differs in ((True, 1.0, True), (True, 0.0, False), (False, 1.0, False)):
        assert judge.Verdict("exact", error, 0.5, shows=shows).differs is differs
    assert judge.Verdict("exact", 0.5, 0.5).differs is False


def test_only_noise_lets_it_pass_where_the_same_function_is_shown_beyond_its_own_limit():
    def by_noise(statement="same function", error=1e-9, limit=1e-6, shows=True):
        return judge.Verdict(statement, error, limit, shows=shows).by_noise

    assert by_noise() is True
    assert not by_noise(error=1e-12) and by_noise(error=np.nextafter(1e-12, 1))
    assert not by_noise(error=1e-5) and not by_noise(shows=False)
    assert not by_noise("same precision") and not by_noise("exact")


def test_values_equal_by_value_are_exact():
    plain = judge.Verdict("exact", 0.0, 0.0)
    assert judge.same_values([1, 2], [1, 2]) == plain and judge.same_values(3, 3) == plain
    assert judge.same_values([7], [7]) == plain
    differs = judge.same_values(row(1, 5, 3), row(1, 2, 3))
    assert differs == judge.Verdict("exact", 1 / 3, 0.0, index=(1,), got=5.0, want=2.0)
    assert type(differs.error) is float
    listed = judge.same_values([1, 2], [1, 4])
    assert (listed.index, listed.error) == ((1,), 0.5)
    none = judge.same_values([], [])
    assert none == judge.Verdict("exact", 0.0, 0.0, note=judge.EMPTY, shows=False)


def test_values_of_other_shapes_or_of_truth_and_number_are_told_apart():
    shape = judge.same_values([1, 2], [1, 2, 3])
    assert shape.note == "int64[2] is not int64[3]" and shape.error == INF
    kind = judge.same_values([True], [1])
    assert kind.note == "bool[1] is not int64[1]" and kind.differs
    assert judge.same_values([1], [True]).note == "int64[1] is not bool[1]"


def test_beside_noise_that_changes_everything_nothing_shows():
    want = row(3.0, 4.0)

    def judged(off, noise):
        return judge.same_function(want + row(off, 0), want, noisy=[want + row(noise, 0)])

    lost = judged(0.25, 0.75)
    assert not lost.shows and not lost.differs and lost.noise == 0.15 and lost.index is None
    assert lost.note == "torch's own rounding changes it by 1.5e-01, beside which nothing shows"
    assert lost.error == 0.05 and lost.statement == "same function"
    assert judged(0.0, 0.75).shows and judged(0.0, 0.75).ok
    at = judged(0.2, 0.5)  # 0.1 of the norm: the last that still tells
    assert at.shows and at.noise == 0.1 and at.by_noise
    assert judged(2.0, 0.5).differs
    tight = row(2.0**40, 0.0), row(2.0**40, 1e-12 * 2.0**40)
    exact = judge.same_function(tight[1], tight[0], noisy=[tight[0] * 2])
    assert exact.error == 1e-12 and exact.shows


def test_noise_that_is_no_number_is_left_out():
    want = row(3.0, 4.0)
    for wild in (NAN, INF):
        noisy = [row(wild, 0.0), want + row(1e-9, 0)]
        assert judge.same_function(want, want, noisy=noisy).noise == judge.error(noisy[1], want)
        assert judge.same_function(want, want, noisy=[row(wild, 0.0)]).noise is None


def test_another_shape_differs_where_torch_itself_tells_nothing():
    truth = row(1.0, 2.0)
    verdict = judge.same_precision(np.ones((2, 1)), row(NAN, 2.0), truth, "float32")
    assert verdict.differs and verdict.note == "shape (2, 1) is not (2,)"
    assert verdict.error == INF and verdict.index is None
    torchs = judge.same_precision(truth, np.ones((2, 1)), truth, "float32")
    assert torchs.other_error == INF and not torchs.shows


def test_torch_that_has_a_nan_somewhere_shows_nothing():
    truth = row(1.0, 2.0, 4.0)
    verdict = judge.same_precision(truth, row(1.0, NAN, 4.0), truth, "float32")
    assert verdict.other_error == INF and not verdict.shows
    filled = judge.same_precision(truth, row(1.0, 2.0, -1e9), truth, "float32")
    assert filled.other_error == INF and not filled.shows


def test_a_scale_measures_all_elements_together():
    truth = row(1.0, 3e15)
    got = truth + row(1e-3, 0)
    assert judge.same_precision(got, truth, truth, "float32", 1e4).ok
    assert judge.same_precision(got, truth, truth, "float32").differs
    torchs = truth + row(0, 3e15)  # its own error hides what is small only if all go together
    assert judge.same_precision(got, torchs, truth, "float32").differs
    assert judge.same_precision(got, torchs, truth, "float32", 4e15).other_error > 0.5


def test_fills_count_only_where_groups_are_split():
    want = row(1.0, -1e9)
    off = row(1.0, -1e9 * (1 - 1e-10))
    assert judge.within_precision(off, 0.0, want, "float32").ok
    assert judge.within_precision(row(1.0, -2e9), 0.0, want, "float32").error > 0.9
    assert judge.no_worse(row(1.0, -2e9), want, want, "float32").error > 0.9
    huge = row(1.0, 3e15)
    assert judge.within_precision(huge + row(1e-3, 0), 0.0, huge, "float32").ok
    assert judge.no_worse(huge + row(1e-3, 0), huge, huge, "float32").ok


# The worst group.


def test_a_place_is_hidden_where_the_reference_fills_it():
    for fill in (False, True):
        assert judge.same_function(row(1, 2, 2), row(1, INF, 2), fill=fill).differs
        assert judge.same_function(row(1, 5, 2), row(1, -1e9, 2), fill=fill).differs
        assert judge.same_function(row(1, -1e9, 2), row(1, 5, 2), fill=fill).differs
        nan = judge.same_function(row(1, NAN, 2), row(1, 2, 2), fill=fill)
        assert nan.differs and nan.index == (1,) and "one side" in nan.note
    both = judge.same_function(row(NAN, -INF, 2), row(NAN, -1e9, 2), fill=True)
    assert both.ok and both.shows


def test_the_worst_group_is_that_which_exceeds_its_own_limit_most():
    want = row(1.0, 3e15)
    noisy = [want + row(0, 3e12)]  # the huge may be off by 2e-3, the ordinary by 1e-12
    got = want + row(1e-11, 3e12)
    verdict = judge.same_function(got, want, noisy=noisy)
    assert verdict.differs and verdict.index == (0,) and verdict.limit == 1e-12
    much = judge.same_function(want + row(1e-11, 9e14), want, noisy=noisy)
    assert much.differs and much.index == (1,)
    assert much.note == "among 1 numbers judged apart from others of up to 3e+15"


def test_a_group_that_shows_nothing_does_not_speak_for_one_that_passes():
    truth = row(1.0, 3e15)
    verdict = judge.same_precision(truth, truth + row(0.5, 0), truth, "float32")
    assert verdict.ok and verdict.shows and verdict.other_error == 0.0


def test_what_stands_beside_is_told_by_its_largest_number_that_is_no_fill():
    want = row(1.0, -3e15, -1e300, -INF, -F64)
    got = want + row(1e-3, 0, 0, 0, 0)
    told = judge.same_function(got, want)
    assert told.note == "among 1 numbers judged apart from others of up to 1e+300"
    far = row(1.0, -3e15, -INF, -F64)
    assert judge.same_function(far + row(1e-3, 0, 0, 0), far).note.endswith("up to 3e+15")
    near = judge.same_function(row(2.0, -3e15), row(1.0, -3e15))
    assert near.note.endswith("others of up to 3e+15")


def test_a_group_of_zeros_that_is_not_zero_on_the_other_side_differs():
    verdict = judge.same_function(row(1e-3, -1e9), row(0.0, -1e9))
    assert verdict.differs and verdict.error == INF
    assert verdict.note == "the reference is all zeros"
    expected = judge.same_function(row(1.0, 0.0), row(0.0, 0.0), zero=True)
    assert expected.differs and expected.index == (0,) and expected.note == ""
    some = judge.same_function(row(0.0, 2.0, 0.0), row(0.0, 0.0, 0.0))
    assert some.differs and some.shows
    other = judge.same_function(row(0.0, 0.0), row(0.0, 2.0))
    assert other.differs and other.error == 1.0


def test_complex_numbers_go_by_both_parts_along_a_last_axis():
    want = np.asarray([[1 + 2j, 3 - 1j, 2j], [4 + 0j, 1j, 2 + 2j]])
    got = want.copy()
    got[1, 0] += 1j
    assert judge.real(want).shape == (2, 3, 2) and judge.real(want)[1, 2].tolist() == [2, 2]
    assert judge.same_function(got, want).index == (1, 0, 1)


# Gradients that are measured together.


def test_gradients_of_inputs_that_dwarf_those_of_the_parameters_are_measured_alone():
    sizes = {"k": row(3.0, 4.0), "input x": row(5e6, 0.0), "input mask": row(6e6), "b": row(0.0)}
    assert judge.of_one_size(sizes) == ["k", "input x", "b"]
    assert judge.of_one_size({**sizes, "k": row(1.0)}) == ["k", "b"]
    assert judge.of_one_size({"b": row(1e-9), "k": row(9e9)}) == ["b", "k"]
    assert judge.of_one_size({"inputs": row(1.0), "input x": row(1e7)}) == ["inputs"]


def test_without_parameters_the_huge_are_measured_alone():
    inputs = {"input x": row(3.0, 4.0), "input y": row(2.0), "input mask": row(1e30, NAN)}
    assert judge.of_one_size(inputs) == ["input x", "input y"]
    assert judge.of_one_size({"w": row(0.0), "input x": row(2.0)}) == ["w", "input x"]
    assert judge.of_one_size({"input x": row(5e6)}) == ["input x"]
    assert judge.of_one_size({}) == []


def test_a_gradient_without_finite_numbers_does_not_enter_the_scale():
    assert judge.whole_gradient([row(NAN), row(INF, -INF)]) == 0.0
    assert judge.whole_gradient([row(NAN), row(3.0, 4.0)]) == 5.0
    assert judge.whole_gradient([row(2.0**1000), row(2.0**1000)]) == 2.0**1000 * 2**0.5
    assert type(judge.whole_gradient([row(1.0)])) is float
