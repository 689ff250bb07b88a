"""Numbers, arrays and tuples in masks and scores: any integer type and size."""

import copy
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    Additive,
    Alibi,
    Causal,
    Prefix,
    Rules,
    ScoreFn,
    Window,
    attend,
    frozen,
)
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge

B, T, N, H = 2, 12, 3, 4


def drawn(seed, *shape):
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), np.float32)


def arrays():
    return drawn(0, B, T, N, H), drawn(1, B, T, N, H), drawn(2, B, T, N, H)


def same(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(judge.exact(np.asarray(x), np.asarray(y)).ok for x, y in pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("number", [np.int64, np.int32, np.uint8, int])
def test_whole_numbers_of_every_kind_are_offsets(number):
    """From 128 tokens on too, where blocks take over."""
    q = drawn(0, 130, 1, 2)
    masks = [Causal(number(3)), Window(number(4), number(2), number(1)), Prefix(number(5))]
    plain = [Causal(3), Window(4, 2, 1), Prefix(5)]
    for mask, want in zip(masks, plain, strict=True):
        assert same(attend(q, q, q, mask=mask), attend(q, q, q, mask=want))


@pytest.mark.nightly
@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**40, 10**30])
def test_far_offsets_hide_or_show_all(far):
    sizes = Sizes((), 1, 5, 7)
    assert Causal(far).bind(sizes).static(sizes).all()
    assert not Causal(-far).bind(sizes).static(sizes).any()
    assert Window(far, far).bind(sizes).static(sizes).all()
    assert not Window(3, 3, far).bind(sizes).static(sizes).any()
    cancels = Window(far, None, far).bind(sizes).static(sizes)  # k - q >= 0
    assert (cancels == (np.arange(7) >= np.arange(5)[:, None])).all()
    assert Prefix(far).bind(sizes).static(sizes).all()
    q = drawn(0, 130, 1, 2)
    assert same(attend(q, q, q, mask=Causal(far)), attend(q, q, q))
    assert not attend(q, q, q, mask=Causal(-far), backend="blockwise").any()


@pytest.mark.nightly
def test_a_param_inside_a_frozen_object_is_refused():
    param = nnx.Param(jnp.ones(N))
    for make in (
        lambda: Alibi(param),
        lambda: Additive(param),
        lambda: ScoreFn(lambda p, x, b, n, q, k: x, {"gain": param}),
        lambda: Rules(sinks=param),
    ):
        with pytest.raises(TypeError, match=r"nnx\.Param, which would never be trained"):
            make()
    q, k, v = arrays()
    assert attend(q, k, v, sinks=param).shape == q.shape


def test_tuples_of_plain_values_are_structure_and_arrays_in_tuples_are_data():
    @frozen
    class Sized:
        sizes: tuple

    plain, nested = Sized((2, 3.0, None)), Sized((2, (3, "a")))
    assert jax.tree.leaves((plain, nested)) == [] and plain == Sized((2, 3.0, None)) != nested
    assert hash(plain) == hash(Sized((2, 3.0, None)))
    again = jax.tree.unflatten(jax.tree.structure(plain), [])
    assert again.sizes == (2, 3.0, None) and again == plain
    assert len(jax.tree.leaves(Sized((np.ones(2), 3.0)))) == 2


def test_copies_and_pickles_of_a_mask_recompute_its_hash():
    """Strings have other hashes in another process, to which an object may be sent."""
    mask = Window(3, 0)
    known = hash(mask)
    for other in (pickle.loads(pickle.dumps(mask)), copy.copy(mask), replace(mask)):
        assert "_hash" not in vars(other) and other == mask and hash(other) == known
