"""Rates that depend on the length of a sequence: that of each row, and of each document."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import LongRope, Rotary
from flax_attn.parity import judge
from flax_attn.positions.lengths import lengths_of
from parity_tests.core.drawing import float64 as float64

pytestmark = pytest.mark.nightly

WIDTH = 16
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(8)), tuple(2.0 + i for i in range(8))


def test_each_entry_of_a_batch_has_the_rates_of_its_own_length():
    x = jnp.asarray(np.random.RandomState(2).standard_normal((2, 3, 1, WIDTH)))
    rotary, at = Rotary(scaling=LongRope(SHORT, LONG, 6, 4.0)), np.asarray([[0, 1, 2], [7, 8, 9]])
    for positions in (at, jnp.asarray(at)):
        both = rotary(x, positions)
        for row, length in enumerate((3, 10)):
            fixed = Rotary(scaling=LongRope(SHORT, LONG, 6, 4.0, length=length))
            assert judge.same_function(both[row], fixed(x[row], at[row])).ok
    lengths = jnp.asarray([[3, 3, 10]])  # of the document that each token belongs to
    long = Rotary(scaling=LongRope(SHORT, LONG, 6, 4.0, length=10))
    assert judge.exact(rotary(x, at, lengths)[0, 2], long(x, at)[0, 2]).ok


def test_lengths_are_those_of_rows_and_documents_without_padding():
    draw = np.random.default_rng(0)
    for several in (False, True):
        at = draw.integers(0, 20, size=(3, 2, 9) if several else (2, 9))
        valid, ids = draw.random((2, 9)) < 0.7, draw.integers(-3, 3, size=(2, 9))
        flat = at.max(0) if several else at
        want, counts = np.ones((2, 9), int), np.ones((2, 9), int)
        for row, token in np.ndindex(2, 9):
            same = valid[row] & (ids[row] == ids[row, token])
            want[row, token] = max(flat[row][same].max(initial=-1) + 1, 1)
            counts[row, token] = max(same.sum(), 1)
        how = {"valid": jnp.asarray(valid), "ids": jnp.asarray(ids)}
        assert lengths_of(at, (2, 9), **how, several=several).tolist() == want.tolist()
        assert lengths_of(None, (2, 9), **how).tolist() == counts.tolist()
