"""Which numbers, arrays and tuples masks and scores hold: any integer, far ones, one an entry."""

import copy
import pickle
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Causal,
    Prefix,
    Rules,
    ScoreFn,
    Softcap,
    Window,
    attend,
    frozen,
)
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from parity_tests.tables import with_nightly

BACKENDS = ("reference", "blockwise")
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


def by_entry(make, offsets, q):
    """Each batch entry by itself, with its own number."""
    pairs = zip(np.asarray(q), offsets, strict=True)
    return np.stack([jax.jit(lambda x, o=o: attend(x, x, x, **make(int(o))))(x) for x, o in pairs])


MAKES = {
    "causal": lambda o: {"mask": Causal(o)},
    "window": lambda o: {"mask": Window(9, 2, o)},
    "both": lambda o: {"mask": Window(30, None, o) & CAUSAL},
    "alibi": lambda o: {"score": Alibi(np.asarray([0.5, 0.1]), o)},
}
ROWS = [*product(BACKENDS, MAKES)]
AT_COMMIT = [("reference", "both"), ("reference", "alibi")]


@pytest.mark.nightly
@pytest.mark.parametrize(("backend", "name"), with_nightly(ROWS, commit=AT_COMMIT))
def test_offsets_for_each_entry(backend, name):
    q, offsets = drawn(0, 3, 140, 2, 4), np.asarray([-20, 0, 7])
    with jax.numpy_rank_promotion("raise"):
        got = attend(q, q, q, **MAKES[name](offsets), backend=backend)
        assert judge.allclose(got, by_entry(MAKES[name], offsets, q))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_for_each_entry(backend):
    q, slopes = drawn(0, 3, 9, 2, 4), drawn(6, 3, 2)
    got = jax.jit(lambda q, s: attend(q, q, q, score=Alibi(s), backend=backend))(q, slopes)
    alone = jax.jit(lambda q, s: attend(q, q, q, score=Alibi(s)))
    want = [alone(x, s) for x, s in zip(np.asarray(q), np.asarray(slopes), strict=True)]
    assert judge.allclose(got, np.stack(want))


@pytest.mark.nightly
def test_none_leaves_everything_as_it_is():
    q, k, v = arrays()
    assert same(attend(q, k, v, mask=None, score=None), attend(q, k, v))


@pytest.mark.parametrize(
    "bound", [np.asarray(0.0), jnp.asarray(-1.0), np.nan, jnp.asarray(jnp.inf)]
)
def test_a_bound_that_is_none_is_refused(bound):
    with pytest.raises(ValueError, match=r"Softcap\.cap must be finite and above zero"):
        Softcap(bound)


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


def test_a_hash_is_of_one_process_and_of_one_object():
    """Strings have other hashes in another process, to which an object may be sent."""
    mask = Window(3, 0)
    known = hash(mask)
    for other in (pickle.loads(pickle.dumps(mask)), copy.copy(mask), replace(mask)):
        assert "_hash" not in vars(other) and other == mask and hash(other) == known
