"""`Documents` by lengths equals `Segments` by ids in every use."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    FULL,
    Cache,
    Chunked,
    Documents,
    GroupedQueryAttention,
    Lengths,
    LongRope,
    Prefix,
    Rotary,
    Segments,
    Window,
    attend,
    attend_by_weights,
    attend_cached,
)
from flax_attn._internal.types import Sizes
from flax_attn.masks.ranges import runs_of, segments_of
from flax_attn.parity import judge
from flax_attn.places import Positions
from flax_attn.rules import Rules
from parity_tests.core.backends.refusal import refused, told
from parity_tests.core.cache.cuts import same
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.drawing import normal

B, T, N, K, H, h = 3, 14, 4, 2, 5, 3
LENGTHS = np.asarray([[5, 0, 4, 2], [14, 0, 0, 0], [0, 1, 1, 9]])
TOKENS = LENGTHS.sum(-1)  # of which the rest is padding
IDS = np.full((B, T), 9)
for row, lengths in zip(IDS, LENGTHS, strict=True):
    row[: lengths.sum()] = np.repeat(np.arange(4), lengths)
BY_IDS = Segments(IDS) & Lengths(TOKENS, q=TOKENS)
Q, KEYS, V = normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, h)
BESIDE = {
    "nothing": FULL,
    "causal": CAUSAL,
    "window": Window(2, 0),
    "both sides": Window(1, 2),
    "chunks": CAUSAL & Chunked(3),
    "not": ~Window(1, 1),
    "or": CAUSAL | Prefix(3),
}


def both_ways(mask, **options):
    """Output and gradients."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, mask=mask, **options), Q, KEYS, V)
    return [out, *back(jnp.cos(out))]


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("name", BESIDE)
def test_documents_equal_segments_with_their_ids(name, backend):
    want = both_ways(BESIDE[name] & BY_IDS, backend=backend)

    def traced(lengths):
        return both_ways(BESIDE[name] & Documents(lengths), backend=backend)

    for results in (
        both_ways(BESIDE[name] & Documents(LENGTHS), backend=backend),
        jax.jit(traced)(LENGTHS),
    ):
        assert all(same(x, y) for x, y in zip(results, want, strict=True))
    assert not np.asarray(want[0])[0, TOKENS[0] :].any()  # padding is zero


@pytest.mark.nightly
def test_padding_affects_no_output_or_gradient():
    k, v = (x.copy() for x in (KEYS, V))
    k[0, TOKENS[0] :] = v[0, TOKENS[0] :] = np.nan
    mask = CAUSAL & Documents(LENGTHS)
    for backend in ("reference", "blockwise"):
        dirty = attend(Q, k, v, mask=mask, backend=backend)
        assert judge.exact(dirty, attend(Q, KEYS, V, mask=mask, backend=backend)).ok


@pytest.mark.nightly
def test_one_row_of_lengths_is_for_all():
    mask = CAUSAL & Documents(LENGTHS[0])
    assert same(attend(Q, KEYS, V, mask=mask)[0], both_ways(CAUSAL & BY_IDS)[0][0])
    several = attend(*(x[None] for x in (Q, KEYS, V)), mask=Documents(LENGTHS[None]))
    assert same(several[0], both_ways(BY_IDS)[0])
    none = attend(Q, KEYS, V, mask=Documents(np.zeros((B, 0), int)))
    assert not np.asarray(none).any()


@pytest.mark.nightly
def test_attention_by_steps_takes_documents():
    want = attend_by_weights(Q, KEYS, V, mask=CAUSAL & BY_IDS)
    assert same(attend_by_weights(Q, KEYS, V, mask=CAUSAL & Documents(LENGTHS)), want)


@pytest.mark.nightly
@pytest.mark.parametrize("cut", [(14,), (5, 1, 8), (1,) * 14])
def test_a_cache_counts_its_tokens(cut):
    cache, out, at = Cache.empty(B, T, K, H, h, dtype=jnp.float64), [], 0
    step = jax.jit(
        lambda q, k, v, cache: attend_cached(q, k, v, cache, mask=CAUSAL & Documents(LENGTHS))
    )
    for size in cut:
        part = slice(at, at + size)
        o, cache = step(Q[:, part], KEYS[:, part], V[:, part], cache)
        out, at = [*out, o], at + size
    assert same(jnp.concatenate(out, 1), both_ways(CAUSAL & BY_IDS)[0])


def layer():
    rotary = Rotary(
        scaling=LongRope([1.0, 1.5], [2.0, 3.0], original_length=3, attention_factor=1.2)
    )
    return GroupedQueryAttention(6, 4, 2, 4, rotary=rotary, rngs=nnx.Rngs(0), param_dtype=float)


@pytest.mark.nightly
def test_a_layer_counts_real_tokens():
    """Lengths go on behind padding on the left, and rates of a rotary by the documents' lengths."""
    module, x = layer(), normal(3, B, T, 6)
    packed = Documents(LENGTHS)
    at = packed.positions(T)
    want = module(x, mask=CAUSAL & BY_IDS, positions=at)
    assert same(module(x, mask=CAUSAL & packed, positions=at), want)
    valid = np.arange(T + 2) >= 2
    moved = np.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=np.nan)
    behind = jnp.pad(at, ((0, 0), (2, 0)))
    out = module(moved, mask=CAUSAL & packed, positions=behind, valid=jnp.asarray([valid] * B))
    assert same(out[:, 2:], want)


@pytest.mark.nightly
def test_kernels_receive_runs_and_segment_ids_of_documents():
    """Each query's run, never an array of T x T, and ids by which padding is no document."""
    bound = Documents(LENGTHS).bind(Sizes((B,), N, T, T))
    first, end = runs_of(bound, np.arange(T, dtype=np.int32)[None])
    table = np.asarray(bound.grid(Sizes((B,), N, T, T)))[:, 0]
    k = np.arange(T)
    assert ((np.asarray(first)[..., None] <= k) & (k < np.asarray(end)[..., None]) == table).all()
    q_ids, kv_ids = segments_of(bound)
    assert ((q_ids[:, :, None] == kv_ids[:, None]) == table).all()


@pytest.mark.nightly
def test_ids_that_stand_together():
    ids = np.asarray([[3, 3, 5, 5, 5], [1, 2, 3, 4, 4]])
    packed = Documents.of(ids)
    assert packed.lengths.tolist() == [[2, 3, 0, 0], [1, 1, 1, 2]]
    assert packed.segments().tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 3, 3]]
    assert packed.positions().tolist() == [[0, 1, 0, 1, 2], [0, 0, 0, 0, 1]]
    assert Documents([2, 1]).positions(5).tolist() == [0, 1, 0, 0, 1]
    behind = np.asarray([[4, 4, 7, 0, 0], [3, 0, 0, 0, 0], [0, 0, 0, 0, 0]])
    assert Documents.of(behind, padding=0).lengths.tolist() == [[2, 1], [1, 0], [0, 0]]
    assert Documents.of(behind[0] - 9, padding=-9).lengths.tolist() == [2, 1]
    with told(ValueError, "do not decrease", "Segments(ids)"):
        Documents.of(np.asarray([1, 1, 0]))
    with told(ValueError, "padding behind them", "padding=0", "valid="):
        Documents.of(np.asarray([0, 1, 1]), padding=0)
    with told(ValueError, "known while the program is traced", "Documents(lengths)"):
        jax.jit(Documents.of)(ids)
    with told(TypeError, "Documents.of", "float"):
        Documents.of(np.ones(3))


@pytest.mark.nightly
def test_known_lengths_are_known_while_a_program_is_traced():
    packed = Documents([2, 1])
    ids, at = jax.jit(lambda: (packed.segments(), packed.positions()))()
    assert ids.tolist() == [0, 0, 1] and at.tolist() == [0, 1, 0]
    assert not jax.make_jaxpr(lambda: packed.segments(9))().eqns


def test_lengths_of_a_program_need_a_number_of_tokens():
    assert jax.jit(lambda x: Documents(x).segments(4))(np.asarray([1, 2])).tolist() == [0, 1, 1, 2]
    with told(ValueError, "how many tokens", "segments(T)"):
        jax.jit(lambda x: Documents(x).positions())(np.asarray([1, 2]))


BAD = {
    "floats": (TypeError, lambda: Documents(np.ones(3)), ["integers"]),
    "a number": (ValueError, lambda: Documents(3), ["a length for each document", "Lengths(n)"]),
    "below zero": (ValueError, lambda: Documents([3, -1]), ["0 or more", "-1"]),
    "rows of a list": (ValueError, lambda: Documents([[1, 2], [3]]), ["fill shorter rows with 0"]),
    "ids": (ValueError, lambda: Documents(np.arange(T) // 5), ["as ids do", "Documents.of(ids)"]),
    "ids, one document": (ValueError, lambda: Documents(np.zeros(T, int)), ["as ids do"]),
    "too many": (ValueError, lambda: Documents([9, 9]), ["18", "14", "np.diff(cu_seqlens)"]),
    "other rows": (ValueError, lambda: Documents(np.ones((2, 4), int)), ["(3, G)", "(2, 4)"]),
}


@pytest.mark.nightly(but=["a number", "below zero", "rows of a list"])
@pytest.mark.parametrize("name", BAD)
def test_bad_lengths_are_refused(name):
    """While a program is traced too: lengths that it closes over are known."""
    kind, make, words = BAD[name]

    def call(q, k, v):
        return attend(q, k, v, mask=make())

    for run in (call, jax.jit(call)):
        with refused(kind, *words):
            run(Q, KEYS, V)


def test_queries_and_keys_are_the_same_tokens():
    with refused(ValueError, "T=4", "S=14", "Segments(q_ids=..., kv_ids=...)"):
        attend(Q[:, :4], KEYS, V, mask=Documents(LENGTHS))


@pytest.mark.nightly
def test_numbers_beyond_int32_hide_and_show_the_same():
    bound = Documents(np.asarray([3, 2**40, 5])).lengths
    rules = Rules(Documents(bound), positions=Positions(np.arange(T), np.arange(T)))
    seen = rules.bind(Sizes((), 1, T, T), H).mask.grid(Sizes((), 1, T, T))
    want = np.asarray([[(q < 3) == (k < 3) for k in range(T)] for q in range(T)])
    assert (np.asarray(seen)[0, 0] == want).all()
