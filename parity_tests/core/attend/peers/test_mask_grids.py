"""Kinds of masks that other libraries test and no other test of ours has: each as data of ours.

xformers packs sequences and aligns each one's causal diagonal at its own end, with keys left over
as padding, or lets a triangle and a bias join; tokamax gives every query its own range of keys, by
head, and fills padding with NaN and a float's largest number; torch's `MultiheadAttention` adds a
key of zeros that everybody sees.
"""

import numpy as np
import pytest

import flax_attn as fa
from flax_attn.parity import judge
from parity_tests.core.attend.peers.run import Additive, MaskFn, outcome, same, truth

pytestmark = pytest.mark.nightly  # another library's suite, at its size

BACKENDS = ("reference", "blockwise")
N, K, H, h = 4, 2, 8, 10

# Queries and keys of each packed sequence, and how many keys are given room; xformers'
# BlockDiagonalCausalFromBottomRight, ...WithOffsetPaddedKeys and ...LocalAttentionFromBottomRight.
PACKED = [
    [(5, 9, 9), (40, 40, 40), (1, 30, 30), (34, 51, 51)],
    [(20, 20, 40), (3, 17, 30), (57, 57, 60)],  # padded keys
    [(30, 12, 12), (1, 1, 1), (49, 103, 117)],  # more queries than keys: rows that see nothing
]
T, S = 80, 130
NOBODY = -1, -2  # the ids of queries and keys that belong to no sequence


def packed(sequences, reach):
    """Ids and places of queries and keys as arrays; keys beyond a sequence's own are nobody's.

    A place counts from the last token of each sequence, so that equal places are the diagonal;
    `reach` is how many keys a query sees, its own among them.
    """
    ids = [np.full(n, who, np.int32) for n, who in zip((T, S), NOBODY, strict=True)]
    places = [np.zeros(n, np.int32) for n in (T, S)]
    starts = [0, 0]
    for number, (queries, keys, room) in enumerate(sequences):
        for side, count in enumerate((queries, keys)):
            at = slice(starts[side], starts[side] + count)
            ids[side][at], places[side][at] = number, np.arange(count) - count
        starts = [starts[0] + queries, starts[1] + room]
    return {"ids": ids, "places": places, "reach": np.asarray(reach, np.int32)}


def by_packing(x):
    q_at, k_at = x["places"]

    def near(b, n, q, k):
        beside = q_at[q] - k_at[k]
        return (beside >= 0) & (beside < x["reach"])

    return {"mask": fa.Segments(q_ids=x["ids"][0], kv_ids=x["ids"][1]) & MaskFn(near)}


def loops_of_packing(sequences, reach):
    """The same pair by pair."""
    seen = np.zeros((T, S), bool)
    q0 = k0 = 0
    for queries, keys, room in sequences:
        for q in range(queries):
            last = q + keys - queries
            for k in range(max(last - reach + 1, 0), min(last, keys - 1) + 1):
                seen[q0 + q, k0 + k] = True
        q0, k0 = q0 + queries, k0 + room
    return seen


def draw(seed, T=T, S=S, K=K, B=2):
    of = np.random.RandomState(seed).standard_normal
    learnt = {"q": of((B, T, N, H)), "k": of((B, S, K, H)), "v": of((B, S, K, h))}
    return learnt, (of((B, T, N, h)), of((B, T, N)))


def check(rules, backend, learnt, fixed, cotangents, **how):
    got = outcome(rules, backend, "float64", learnt, fixed, cotangents)
    same(got, truth(learnt, cotangents, **how))
    return got


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_sequences_causal_from_their_own_ends(backend):
    """Whole, local, and each with padded keys: values of one program."""
    for seed, sequences in enumerate(PACKED):
        for reach in (S, 7):
            seen = loops_of_packing(sequences, reach)
            learnt, cotangents = draw(seed)
            fixed = packed(sequences, reach)
            got = check(by_packing, backend, learnt, fixed, cotangents, seen=seen)
            assert np.isneginf(got["lse"][:, ~seen.any(axis=1)]).all()


def local_from_the_last(x):
    return {"mask": fa.Window(11, 4, "end")}


def triangle_and_bias(x):
    return {"mask": fa.Causal("end"), "score": Additive(x["bias"])}


def test_lower_triangle_with_a_tensor_bias():
    """Where the triangle hides, the bias may hold huge numbers and -inf without a trace."""
    learnt, cotangents = draw(5)
    seen = np.arange(S) <= np.arange(T)[:, None] + S - T
    bias = np.random.RandomState(6).standard_normal((2, 1, T, S))
    for hidden in (1e30, -np.inf):
        learnt["bias"] = np.where(seen, bias, hidden)
        want = {**learnt, "bias": np.where(seen, bias, 0)}
        got = outcome(triangle_and_bias, "blockwise", "float64", learnt, {}, cotangents)
        same(got, truth(want, cotangents, seen=seen, chain=("bias",)))


@pytest.mark.parametrize("lengths", [(130, 80), (80, 130)])
def test_local_attention_from_the_last(lengths):
    """More queries than keys, of which the first see nothing, and more keys than queries."""
    queries, keys = lengths
    at = np.arange(queries)[:, None] + keys - queries
    seen = (np.arange(keys) >= at - 11) & (np.arange(keys) <= at + 4)
    learnt, cotangents = draw(7, queries, keys)
    check(local_from_the_last, "blockwise", learnt, {}, cotangents, seen=seen)


# Ranges of keys by query, and by head.


def by_ranges(x):
    def within(b, n, q, k):
        return (k >= x["first"][n, q]) & (k < x["beyond"][n, q])

    return {"mask": MaskFn(within)}


def ranges():
    """First key and the one beyond the last, N T: triangles, mirrored ones, an hourglass, none."""
    q, ramp = np.arange(T), np.linspace(0, S, T).astype(int)
    waist = np.minimum(ramp, S - ramp)
    yield np.zeros(T, int), ramp
    yield ramp, np.full(T, S)
    yield np.zeros(T, int), S - ramp
    yield waist, S - waist
    yield np.where(q % 3 == 0, S, ramp // 2), np.full(T, S)


def test_every_query_has_its_range_of_keys():
    """Moved by three keys a head, as tokamax does; values of one program."""
    for seed, (first, beyond) in enumerate(ranges()):
        moved = 3 * np.arange(N)[:, None]
        fixed = {
            "first": np.asarray(first + moved, np.int32),
            "beyond": np.asarray(beyond - moved, np.int32),
        }
        k = np.arange(S)
        seen = (k >= fixed["first"][..., None]) & (k < fixed["beyond"][..., None])
        learnt, cotangents = draw(seed)
        check(by_ranges, "blockwise", learnt, fixed, cotangents, seen=seen[None])


# Padding that holds anything.


def padded(x):
    return {"mask": fa.Lengths(x["keys"], q=x["queries"])}


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_may_hold_nan_and_the_largest_number(backend):
    """NaN in queries and keys, the largest float32 in values: bit for bit what zeros give."""
    learnt, cotangents = draw(9)
    fixed = {"keys": np.asarray([100, 37], np.int32), "queries": np.asarray([80, 41], np.int32)}
    beyond = {"q": (T, "queries", np.nan), "k": (S, "keys", np.nan)}
    beyond["v"] = S, "keys", np.finfo(np.float32).max
    found = []
    for is_clean in (True, False):
        given = {}
        for name, (length, by, number) in beyond.items():
            hidden = np.arange(length) >= fixed[by][:, None]
            number = 0 if is_clean else number
            given[name] = np.where(hidden[:, :, None, None], number, learnt[name])
        found.append(outcome(padded, backend, "float32", given, fixed, cotangents))
    for name, x in found[0].items():
        assert judge.exact(found[1][name], x).ok, name


# torch.nn.MultiheadAttention.


def by_sinks(x):
    return {"sinks": x["sinks"], "mask": fa.Dense(x["seen"]) & fa.CAUSAL}


@pytest.mark.parametrize("backend", BACKENDS)
def test_add_zero_attn_is_a_sink_of_zero(backend):
    """A key and a value of zeros that all may look at: its logit is 0 and it adds nothing.

    The truth has the key: `key_padding_mask` and `attn_mask` joined, neither of which hides it.
    """
    learnt, cotangents = draw(8)
    fixed = {"seen": (np.arange(S) < np.asarray([100, 37])[:, None])[:, None, None]}
    seen = fixed["seen"] & np.tri(T, S, dtype=bool)
    with_sinks = {**learnt, "sinks": np.zeros(N)}
    got = outcome(by_sinks, backend, "float64", with_sinks, fixed, cotangents)
    same(got, truth(with_sinks, cotangents, seen=seen))

    one_more = ((0, 0), (0, 1), (0, 0), (0, 0))
    wider = {name: x if name == "q" else np.pad(x, one_more) for name, x in learnt.items()}
    seen = np.concatenate([seen, np.ones((2, 1, T, 1), bool)], axis=3)
    want = truth(wider, cotangents, seen=seen)
    want |= {name: want[name][:, :S] for name in "kv"}
    same({name: got[name] for name in want}, want)
