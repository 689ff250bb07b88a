"""The ranges by which blocks are skipped or left unmasked, against the mask itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn import FULL, Causal, Chunked, Lengths, MaskFn, Prefix, Segments, Window, attend
from flax_attn._internal.types import Sizes
from flax_attn.masks import Rows
from flax_attn.masks.ranges import fully_visible_range, visible_range
from flax_attn.parity import judge

B, T, S = 2, 7, 9
SIZES = Sizes((B,), 1, T, S)
_, _, Q, K = SIZES.grid()

offsets = st.integers(-4, 6) | st.just("end")
counts = st.none() | st.integers(0, 4)
each = st.lists(st.integers(-4, 6), min_size=B, max_size=B).map(np.asarray)
lengths = st.lists(st.integers(0, S), min_size=B, max_size=B).map(np.asarray)


def ids(length):
    row = st.lists(st.integers(0, 3), min_size=length, max_size=length)
    return st.lists(row, min_size=B, max_size=B).map(np.asarray)


leaves = st.one_of(
    st.just(FULL),
    st.just(MaskFn(lambda b, n, q, k: (q * k) % 3 == b)),
    st.builds(Causal, offsets | each),
    st.builds(Window, counts, counts, offsets | each),
    st.builds(Chunked, st.integers(1, 5)),
    st.builds(Prefix, st.integers(0, S) | lengths),
    st.builds(Lengths, lengths, q=st.none() | lengths),
    st.builds(Segments, q_ids=ids(T), kv_ids=ids(S)),
)
masks = st.recursive(
    leaves,
    lambda m: st.one_of(
        m.map(lambda x: ~x),
        st.tuples(m, m).map(lambda x: x[0] & x[1]),
        st.tuples(m, m).map(lambda x: x[0] | x[1]),
    ),
    max_leaves=4,
)


@pytest.mark.nightly
@given(masks, st.integers(0, B - 1), st.integers(0, T - 1), st.integers(1, T))
@settings(deadline=None, max_examples=150)
def test_ranges(mask, b, start, rows):
    mask, stop = mask.bind(SIZES), min(start + rows, T)
    seen = np.asarray(mask(b, 0, Q[0, 0, start:stop], K[0, 0]))
    seen = np.broadcast_to(seen, (stop - start, S))
    lo, hi = map(int, visible_range(mask, b, Rows(start, stop - start), SIZES))
    assert not seen[:, : max(lo, 0)].any() and not seen[:, max(hi, 0) :].any()
    lo, hi = map(int, fully_visible_range(mask, b, Rows(start, stop - start), SIZES))
    assert lo >= hi or (lo >= 0 and hi <= S and seen[:, lo:hi].all())


@pytest.mark.nightly
@given(masks, st.integers(0, B - 1), st.integers(0, T - 1), st.integers(1, T))
@settings(deadline=None, max_examples=150)
def test_traced_ranges_are_the_known_ones(mask, b, start, rows):
    """A plan is made of known ranges, and its loops run over traced ones."""
    mask, rows = mask.bind(SIZES), min(rows, T - start)
    for ranges in (visible_range, fully_visible_range):
        known = ranges(mask, b, Rows(start, rows), SIZES)
        traced = ranges(mask, jnp.asarray(b), Rows(jnp.asarray(start), rows), SIZES)
        assert [int(x) for x in known] == [int(x) for x in traced]
    if mask.is_static:
        assert all(isinstance(x, int) for x in known)


@pytest.mark.nightly
@pytest.mark.parametrize("length", [1024, 1025, 2047, 2049])
def test_a_hidden_band_where_the_plan_changes(length):
    """`~` of a static mask, written out and in loops; against each row's own keys."""
    mask, q = Causal() & ~Causal(-128), np.random.RandomState(0).standard_normal((length, 1, 4))
    with jax.enable_x64(True):
        x = jnp.asarray(q)
        got = np.asarray(attend(x, x, x, mask=mask, backend="blockwise"))[:, 0]
    for t in (0, 127, 128, length // 2, length - 1):
        keys = q[max(0, t - 127) : t + 1, 0]
        powers = np.exp(keys @ q[t, 0] / 2)
        assert judge.same_function(got[t], (powers / powers.sum()) @ keys).ok


@pytest.mark.parametrize(
    ("mask", "most", "least"),
    [
        (FULL, (0, 9), (0, 9)),
        (~FULL, (9, 0), (0, 0)),
        (Causal(), (0, 5), (0, 4)),
        (Window(1, 0), (2, 5), (3, 4)),
        (Chunked(4), (0, 8), (4, 4)),
        (~Window(None, 1), (5, 9), (6, 9)),
    ],
)
def test_static_ranges_are_python_numbers_and_tight(mask, most, least):
    assert visible_range(mask.bind(SIZES), 0, Rows(3, 2), SIZES) == most
    assert fully_visible_range(mask.bind(SIZES), 0, Rows(3, 2), SIZES) == least


@pytest.mark.nightly
def test_documents_are_skipped():
    mask = Segments(
        q_ids=np.asarray([[0, 0, 1, 1, 1, 2, 2]]), kv_ids=np.asarray([[0, 1, 1, 1, 2, 2, 2, 3, 3]])
    )
    found = visible_range(mask.bind(Sizes((1,), 1, T, S)), jnp.asarray(0), Rows(2, 2), SIZES)
    assert tuple(map(int, found)) == (1, 4)
