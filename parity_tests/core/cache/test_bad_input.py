"""Requests that a cache does not support raise a clear error before anything is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    Additive,
    Causal,
    CausalAttention,
    CrossAttention,
    Dense,
    GroupedQueryAttention,
    Int8,
    LatentAttention,
    Memory,
    MultiHeadAttention,
    Rotary,
    Segments,
    Window,
    attend,
    attend_cached,
)
from flax_attn.cache import Cache, PagedCache
from flax_attn.parity.judge import allclose

B, T, S, N, K, H, h = 3, 5, 31, 4, 2, 3, 7
LOCAL = CAUSAL & Window(3, 0)
SEEN = np.random.default_rng(0).random((B, 1, T, S)) > 0.4
IDS = np.random.default_rng(1).integers(0, 2, (B, S))


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


Q, X, V = drawn(B, T, N, H), drawn(B, T, K, H), drawn(B, T, K, h)


def empty(batch=B, length=S, **how):
    return Cache.empty(batch, length, K, H, h, **how)


def paged(**how):
    return PagedCache.empty(B, 8, K, (26, 4), H, h, **how)


def ask(cache, mask=CAUSAL, **how):
    return attend_cached(Q, X, V, cache, mask=mask, **how)


SLOT = "goes by slot, and in a ring or a paged cache no slot belongs to one token. Use a cache with"
REFUSED = {
    "heads": (lambda: ask(Cache.empty(B, S, 9, H, h)), r"9 heads and width 3; got k \(3, 5, 2, 3"),
    "width": (lambda: ask(Cache.empty(B, S, K, 8, h)), r"width 8; got k .*layer\.init_cache\("),
    "width of values": (lambda: ask(Cache.empty(B, S, K, H)), r"values of .* width 3; got v \(3"),
    "batch": (lambda: ask(empty(2)), r"keys of rows \(2,\).*; got k \(3, 5, 2, 3\)"),
    "dtype": (lambda: ask(empty(dtype=jnp.bfloat16)), "holds bfloat16, and k is float32.*dtype=fl"),
    "valid of another shape": (
        lambda: ask(empty(), valid=jnp.ones((B, T + 1), bool)),
        r"valid must broadcast to \*B T = \(3, 5\); got shape \(3, 6\)",
    ),
    "valid of numbers": (lambda: ask(empty(), valid=jnp.ones((B, T))), "boolean, True for.*float"),
    "no window": (lambda: ask(empty(window=4)), r"any number of tokens.*mask & Window\(3, 0\)"),
    "a window longer than the ring": (
        lambda: ask(empty(window=4), CAUSAL & Window(7, 0)),
        r"holds a window of 4 tokens, and the mask looks back over 8.*larger window=",
    ),
    "the first tokens kept": (
        lambda: ask(empty(window=4, keep_first=2)),
        "window of 4 tokens, and the first 2, and the mask looks back over any number",
    ),
    "end": (lambda: ask(empty(), Causal("end")), 'offset="end" beside a cache.*use CAUSAL'),
    "end inside": (lambda: ask(empty(), CAUSAL & Window(3, 0, "end")), "use CAUSAL or Causal"),
    "dense in a ring": (lambda: ask(empty(window=4), LOCAL & Dense(SEEN)), f"Dense {SLOT}"),
    "dense in pages": (lambda: ask(paged(), CAUSAL & Dense(SEEN)), f"Dense {SLOT}"),
    "segments in a ring": (
        lambda: ask(empty(window=4), LOCAL & Segments(q_ids=IDS[:, :T], kv_ids=IDS)),
        f"Segments {SLOT}",
    ),
    "additive in a ring": (
        lambda: ask(empty(window=4), LOCAL, score=Additive(drawn(T, S))),
        f"Additive {SLOT}",
    ),
    "a mask that is too short": (
        lambda: ask(empty(), CAUSAL & Dense(SEEN[..., :T])),
        r"= \(3, 4, 5, 31\); got shape \(3, 1, 5, 5\)",
    ),
    "keep_first alone": (lambda: empty(keep_first=2), "window=None, keep_first=2, spare=0"),
    "spare alone": (lambda: empty(spare=2), "for a ring, which has a window"),
    "no page": (lambda: ask(paged()), "Row 0 would need pages of 4 for 5 tokens.*table="),
    "insert of a ring": (
        lambda: empty().insert(0, empty(1, window=4)),
        r"and one row, Cache\(\); got Cache\(window=4\)",
    ),
    "insert of a store": (lambda: empty().insert(0, empty(1, store=Int8())), r"store=Int8\(\)\)\."),
    "insert of a memory": (lambda: empty().insert(0, Memory.of(X, V)), r"got Memory\(\)"),
    "insert of rows": (lambda: empty().insert(0, empty(2)), r"one row that fits.*got.*\[2, 2, 31"),
    "insert of a length": (lambda: empty().insert(0, empty(1, 30)), r"one row.*got.*\[1, 2, 30"),
    "insert beyond the rows": (lambda: empty().insert(B, empty(1)), "3 rows, from 0 on.* row 3"),
    "pages, insert of a ring": (lambda: paged().insert(0, empty(1, window=4)), "got .*window=4"),
    "pages, insert of rows": (lambda: paged().insert(0, empty()), r"of one row.*got rows \(3,\)"),
    "pages, insert of a memory": (lambda: paged().insert(0, Memory.of(X, V)), "got a Memory"),
    "pages, insert of heads": (
        lambda: paged().insert(0, Cache.empty(1, S, 9, H, h)),
        r"\(2, 3, 'float32'\).*got \[\(9, 3, 'float32'\)",
    ),
    "pages, insert beyond": (lambda: paged().insert(B, empty(1)), "insert was given row 3"),
    "copy_page beyond": (lambda: paged().copy_page(0, 9, 1), "no row holds; got at=9, page=1"),
    "take beyond the rows": (lambda: empty().take([0, B]), r"3 rows.* given \[0, 3\]"),
    "take by True": (lambda: empty().take(np.ones(B, bool)), "numbers of rows.*got bool"),
    "reset by numbers": (lambda: empty().reset([1]), r"True for each row.*\(3,\); got int32"),
    "reset of other rows": (lambda: empty().reset([True, False]), r"each of \(3,\); got shape"),
    "truncate below 0": (lambda: empty().truncate(-1), "0 or more; row 0 has less"),
    "truncate of other rows": (lambda: paged().truncate([1, 2]), r"each of \(3,\); got shape \(2"),
    "a memory": (lambda: ask(Memory.of(X, V)), r"for cross attention.*layer\.init_cache"),
    "no cache": (lambda: ask((X, V)), "must be a Cache or a PagedCache.*got tuple"),
    "latent": (lambda: ask(Cache.empty(B, S, K, H, latent=True)), "stores keys alone.*got values"),
    "no values": (lambda: attend_cached(Q, X, None, empty()), "stores keys alone.*got v=None"),
}


BY_VALUES = {"no page", "copy_page beyond", "take beyond the rows", "truncate below 0"}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_cache_or_call_raises_with_a_clear_message(name):
    """It raises during tracing, unless the fault lies in values that a trace does not know."""
    call, sentence = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){sentence}"):
        call() if name in BY_VALUES else jax.eval_shape(call)


@pytest.mark.nightly
def test_a_ring_takes_back_no_more_than_it_has_spare():
    _, cache = ask(ask(empty(window=4, spare=1), LOCAL)[1], LOCAL)  # ten tokens
    assert cache.truncate(9).length.tolist() == [9] * B
    with pytest.raises(ValueError, match=r"spare=1.*row 0 would lose more.*larger spare="):
        cache.truncate(8)


@pytest.mark.parametrize("make", [empty, paged])
def test_a_traced_length_below_0_counts_as_overflow(make):
    cache = jax.jit(lambda cache, length: cache.truncate(length))(make(), jnp.asarray([0, -1, 2]))
    assert cache.overflowed.tolist() == [False, True, False] and not cache.length.any()


@pytest.mark.nightly
def test_the_overflow_error_gives_capacity_and_need():
    sentence = r"holds 8 tokens a row; row 0 would need 10\. Make a longer one, or one with window="
    _, cache = ask(empty(length=8))
    with pytest.raises(ValueError, match=sentence):
        ask(cache)
    o, over = jax.jit(ask)(cache)
    assert np.isnan(o).all() and (over.keys == cache.keys).all()
    with pytest.raises(ValueError, match=r"holds 8 .* rows \[0, 1, 2\] were given more.*`reset`"):
        over.check()
    over = jax.lax.scan(lambda c, _: (ask(c)[1], None), empty(length=8), length=2)[0]
    with pytest.raises(ValueError, match=r"holds 8 tokens a row; rows \[0, 1, 2\]"):
        over.check()


@pytest.mark.nightly
def test_arrays_by_slot_must_have_the_length_of_a_static_cache():
    masks = [Dense(SEEN), Segments(q_ids=IDS[:, :T], kv_ids=IDS)]
    wanted = [Dense(SEEN[..., :T]), Segments(IDS[:, :T])]
    score = drawn(T, S)
    for mask, want in zip(masks, wanted, strict=True):
        o, _ = ask(empty(), CAUSAL & mask, score=Additive(score))
        whole = attend(Q, X, V, mask=CAUSAL & want, score=Additive(score[:, :T]))
        assert allclose(o, whole)


TOKENS = drawn(B, T, 12)
LAYER, LATENT, CROSS, *TEACHING = nnx.jit(
    lambda: (
        GroupedQueryAttention(12, 6, 3, 4, rotary=Rotary(), rngs=nnx.Rngs(0)),
        LatentAttention(12, 3, 5, 6, 4, 7, rngs=nnx.Rngs(0)),
        CrossAttention(12, 3, rngs=nnx.Rngs(0)),
        MultiHeadAttention(12, 12, 20, 0.3, 3, rngs=nnx.Rngs(0)),
        CausalAttention(12, 12, 20, 0.3, rngs=nnx.Rngs(0)),
    )
)()
ASKED = {
    "another layer's": (lambda: LAYER(TOKENS, cache=LATENT.init_cache(B, S)), "keys|latent"),
    "another dtype": (
        lambda: LAYER(TOKENS, cache=LAYER.init_cache(B, S, dtype=jnp.bfloat16)),
        "holds bfloat16, and k is float32. Make the cache with dtype=float32",
    ),
    "pages and a window": (
        lambda: LAYER.init_cache(B, S, window=4, pages=(5, 4)),
        r"no ring.*got pages=\(5, 4\) and window=4",
    ),
    "the mask's window": (
        lambda: LAYER.init_cache(B, S, window="mask"),
        r"known number of tokens, such as CAUSAL & Window\(255, 0\); this layer's.*Causal",
    ),
    "the mean": (
        lambda: LAYER(TOKENS, cache=LAYER.init_cache(B, S), empty="mean"),
        "empty='mean' cannot be had with a cache.*leave empty=\"zero\"",
    ),
    "a memory": (lambda: LAYER(TOKENS, cache=CROSS.remember(TOKENS)), "for cross attention"),
    "a memory in latent": (lambda: LATENT(TOKENS, cache=CROSS.remember(TOKENS)), "for cross att"),
    "a memory in a lesson": (
        lambda: TEACHING[0](TOKENS, cache=CROSS.remember(TOKENS), deterministic=True),
        "for cross attention",
    ),
    "no cache": (lambda: LAYER(TOKENS, cache=3), "must be a Cache.*got int"),
    "a memory twice": (
        lambda: CROSS(TOKENS, TOKENS, cache=CROSS.init_cache(B, S)),
        r"layer\.remember\(memory\) and then layer\(x, cache=memory\)",
    ),
}


@pytest.mark.nightly(but=["a memory twice", "pages and a window", "the mask's window", "the mean"])
@pytest.mark.parametrize("name", ASKED)
def test_a_layer_refuses_a_wrong_cache_with_a_clear_message(name):
    call, sentence = ASKED[name]
    with pytest.raises((ValueError, TypeError), match=f"(?s){sentence}"):
        jax.eval_shape(call)


@pytest.mark.nightly
@pytest.mark.parametrize("layer", TEACHING, ids=lambda x: type(x).__name__)
def test_a_teaching_layer_decodes_without_dropout_and_within_its_length(layer):
    with pytest.raises(ValueError, match=r"dropout=0\.3 is for training.*layer\.eval\(\) before"):
        layer(TOKENS, cache=layer.init_cache(B, 20))
    with pytest.raises(ValueError, match="context_length=20 tokens; got 21"):
        layer.init_cache(B, 21)
    assert layer(TOKENS, cache=layer.init_cache(B, 20), deterministic=True)[0].shape == (B, T, 12)
