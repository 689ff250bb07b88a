"""Dropout is drawn by indices at its rate; gradients pass only through kept weights."""

from functools import partial
from math import isclose

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn import Dropout, DropoutMask, attend, attention_weights
from flax_attn._internal.types import Sizes
from flax_attn.layers._dropout import AttentionDropout
from flax_attn.parity import judge
from parity_tests.core.backends.flash import normal

B, N, T, S, H = 2, 3, 5, 7, 4
SIZES = Sizes((B,), N, T, S)
DRAW = Dropout(0.4, jax.random.key(3))
WHOLE = np.asarray(DRAW.grid(SIZES))


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def qkv():
    return normal(3, B, T, N, H), normal(4, B, S, N, H), normal(5, B, S, N, H)


# By place.


def threefry(key, counts):
    """Threefry-2x32 with 20 rounds, as its paper has it (Salmon et al., 2011)."""
    mask, turns = 0xFFFFFFFF, ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    a, b = (counts[0] + keys[0]) & mask, (counts[1] + keys[1]) & mask
    for i in range(5):
        for turn in turns[i % 2]:
            a = (a + b) & mask
            b = (((b << turn) | (b >> (32 - turn))) & mask) ^ a
        a = (a + keys[(i + 1) % 3]) & mask
        b = (b + keys[(i + 2) % 3] + i + 1) & mask
    return a, b


def test_dropout_bits_are_threefry_of_the_indices():
    """Keyed by the key, then by batch entry and head; the counters are query and key."""
    words = tuple(int(x) for x in jax.random.bits(DRAW.key, (2,), jnp.uint32))
    for place in np.ndindex(B, N, T, S):
        bits, _ = threefry(threefry(words, place[:2]), place[2:])
        assert WHOLE[place] == (bits >= int(0.4 * 2**32))


@st.composite
def ranges(draw, length):
    lo = draw(st.integers(0, length - 2))
    return slice(lo, lo + 2)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(ranges(B), ranges(N), ranges(T), ranges(S))
def test_the_dropout_mask_of_a_block_is_a_slice_of_the_whole(b, n, t, s):
    block = (b, n, t, s)
    index = np.ix_(*(np.arange(size)[cut] for size, cut in zip((B, N, T, S), block, strict=True)))
    assert (np.asarray(DRAW.keep(*index)) == WHOLE[block]).all()


@pytest.mark.nightly
def test_sizes_and_batch_layout_do_not_matter():
    longer = np.asarray(DRAW.grid(Sizes((2, B), N + 1, T + 3, S + 2)))
    assert longer.shape == (2 * B, N + 1, T + 3, S + 2)
    assert (longer[:B, :N, :T, :S] == WHOLE).all()
    assert (np.asarray(DRAW.grid(Sizes((), N, T, S))) == WHOLE[:1]).all()


def test_traced_indices_draw_the_same_mask():
    drawn = jax.jit(lambda drop, *place: drop.keep(*place))(DRAW, *SIZES.grid())
    assert (np.asarray(drawn) == WHOLE).all()


@pytest.mark.nightly
def test_keys_batch_entries_and_heads_draw_different_masks():
    assert (WHOLE != np.asarray(Dropout(0.4, jax.random.key(4)).grid(SIZES))).any()
    for axis in range(4):
        assert (np.diff(WHOLE.astype(int), axis=axis) != 0).any()


@pytest.mark.nightly
def test_a_layout_of_the_batch_changes_no_output():
    q, k, v = (np.concatenate([x] * 2) for x in qkv())
    call = jax.jit(partial(attend, dropout=DRAW))
    flat = call(q, k, v)
    square = call(*(x.reshape(2, B, *x.shape[1:]) for x in (q, k, v)))
    assert judge.exact(square.reshape(flat.shape), flat).ok


# At its rate: five deviations of a binomial count.


def is_binomial(count, of, p):
    return abs(int(count) - of * p) < 5 * np.sqrt(of * p * (1 - p))


@pytest.mark.nightly
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_survivors(rate):
    keep = np.asarray(Dropout(rate, jax.random.key(0)).grid(Sizes((4,), 4, 50, 60)))
    assert is_binomial(keep.sum(), keep.size, 1 - rate)
    alike = rate**2 + (1 - rate) ** 2  # how often independent neighbours agree
    for axis in range(4):
        pairs = np.diff(keep.astype(int), axis=axis) == 0
        assert is_binomial(pairs.sum(), pairs.size, alike)


@pytest.mark.nightly
def test_rates_of_zero_and_one():
    q, k, v = qkv()
    none, all_of_it = (Dropout(rate, jax.random.key(0)) for rate in (0.0, 1.0))
    assert judge.exact(attend(q, k, v, dropout=none), attend(q, k, v)).ok

    @jax.jit
    def both_ways(*given):
        out, back = jax.vjp(lambda *x: attend(*x, dropout=all_of_it), *given)
        return out, *back(jnp.ones_like(out))

    assert not any(np.any(x) for x in both_ways(q, k, v))
    assert not attend(q, k, v, dropout=DropoutMask(np.ones((T, S), bool), 1.0)).any()
    kept = DropoutMask(np.ones((T, S), bool), 0.0)
    assert judge.exact(attend(q, k, v, dropout=kept), attend(q, k, v)).ok
    assert not attend(q, k, v, dropout=DropoutMask(np.zeros((T, S), bool), 0.0)).any()


# What it does to weights and gradients.


@pytest.mark.nightly
@pytest.mark.parametrize("drop", [DRAW, DropoutMask(WHOLE, 0.4)], ids=["drawn", "kept"])
def test_survivors_are_divided_by_their_share(drop, float64):
    q, k, v = qkv()
    weights = attention_weights(q, k)
    want = np.einsum("bnts,bsnh->btnh", np.where(WHOLE, np.asarray(weights) / 0.6, 0), v)
    assert judge.same_function(attend(q, k, v, dropout=drop), want).ok


@pytest.mark.nightly
def test_gradients_flow_only_through_kept_weights(float64):
    q, k, v = qkv()
    keep = np.ones((B, N, T, S), bool)
    keep[0, :, :, 3] = False  # a key whose value reaches nobody
    keep[1, 2, 4] = False  # a query that gets nothing
    c = normal(6, B, T, N, H)

    def loss(*x):
        return jnp.sum(c * attend(*x, dropout=DropoutMask(keep, 0.25)))

    by_q, by_k, by_v = map(np.asarray, jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))
    assert not by_v[0, 3].any() and not by_q[1, 4, 2].any()
    assert by_k[0, 3].any() and by_v[1, 3].any()  # a dropped weight still counts in the softmax
    weights = np.asarray(attention_weights(q, k)) * keep / 0.75
    want = np.einsum("bnts,btnh->bsnh", weights, c)
    assert judge.same_function(by_v, want).ok


def test_the_lse_is_before_dropout():
    q, k, v = qkv()
    lse, dropped = (attend(q, k, v, dropout=x, return_lse=True)[1] for x in (None, DRAW))
    assert judge.exact(dropped, lse).ok


@pytest.mark.nightly
def test_a_rate_is_divided_by_in_the_dtype_of_the_weights():
    weights = jnp.ones((2, 2), jnp.bfloat16)
    out = DRAW.apply(weights, jnp.ones((2, 2), bool))
    assert out.dtype == jnp.bfloat16 and isclose(float(out[0, 0]), float(jnp.bfloat16(1 / 0.6)))


# As data.


@pytest.mark.nightly
def test_a_rate_is_structure_and_a_key_is_a_leaf():
    traces = []

    @jax.jit
    def f(drop):
        traces.append(drop)
        return drop.keep(*SIZES.grid())

    for rate, seed in ((0.4, 3), (0.4, 4), (0.5, 3), (0.4, 3)):
        f(Dropout(rate, jax.random.key(seed)))
    assert len(traces) == 2
    assert Dropout(0.4, jax.random.key(3)) == DRAW != Dropout(0.4, jax.random.key(4))
    assert hash(Dropout(0.4, jax.random.key(3))) == hash(DRAW)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan"), float("inf"), True, "0.1", None])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match=r"Dropout\.rate .* from 0 to 1; got"):
        Dropout(rate, jax.random.key(0))
    with pytest.raises(ValueError, match=r"DropoutMask\.rate .* from 0 to 1; got"):
        DropoutMask(np.ones((T, S), bool), rate)
    with pytest.raises(ValueError, match=r"dropout .* from 0 to 1; got"):
        AttentionDropout(rate, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("key", [None, 0])
def test_a_value_that_is_no_random_key_is_refused(key):
    with pytest.raises(TypeError, match=r"jax\.random\.key\(seed\); got"):
        Dropout(0.5, key)


def test_attention_dropout_follows_the_mode():
    dropout = AttentionDropout(0.3, rngs=nnx.Rngs(0))
    one, two = dropout(), dropout()
    assert one is not None and two is not None and one != two
    assert dropout(deterministic=True) is None
    dropout.eval()
    assert dropout() is None and dropout(deterministic=False) is not None
    dropout.train()
    assert dropout() is not None
    assert AttentionDropout(0.0, rngs=nnx.Rngs(0))() is None
