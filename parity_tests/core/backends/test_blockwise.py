"""Attention in blocks is the plain formula: outputs, lse and all gradients, whatever the rules."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    IDENTITY,
    Additive,
    Alibi,
    Causal,
    Chunked,
    Dense,
    Dropout,
    DropoutMask,
    Lengths,
    MaskFn,
    Prefix,
    ScoreFn,
    Segments,
    Softcap,
    Window,
    reference,
)
from flax_attn.backends import blockwise
from flax_attn.rules import Rules
from parity_tests.core.backends.flash import check_same, normal, outcome
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

B, H, h = 2, 4, 5
# T, S, N, K, rows, cols: lengths that are a multiple of the block, shorter than it, one, neither.
SHAPES = [(11, 13, 6, 3, 6, 5), (9, 6, 3, 3, 3, 3), (1, 14, 4, 1, 3, 8), (8, 1, 6, 2, 5, 3)]
WALKS = {"loops": {"unrolled": False}, "unrolled": {"unrolled": True}, "batched": {"batched": True}}


def drawn(seed, *shape):
    return np.random.RandomState(seed).rand(*shape)


def ragged(N, T, S):
    """A random mask with a query that sees nothing and a key that nobody sees."""
    seen = drawn(3, B, N, T, S) < 0.6
    seen[0, 1, T // 2] = False
    seen[1, :, :, S // 2] = False
    return seen


def by_table(N, T, S):
    """A mask function that closes over an array."""
    table = jnp.asarray(drawn(4, N, T, S) < 0.5)
    return MaskFn(lambda b, n, q, k: table[n, q, k] | (b == 1))


def words(length, seed):
    """Ids of packed documents, in order, of drawn lengths."""
    return np.cumsum(drawn(seed, B, length) < 0.3, axis=1)


MASKS = {
    "full": lambda N, T, S: FULL,
    "causal": lambda N, T, S: CAUSAL,
    "causal from the end": lambda N, T, S: Causal("end"),
    "window": lambda N, T, S: Window(2, 1),
    "left window from the end": lambda N, T, S: Window(3, 0, "end"),
    "chunks": lambda N, T, S: Chunked(3),
    "prefix": lambda N, T, S: CAUSAL | Prefix(np.asarray([2, 0])),
    "lengths": lambda N, T, S: Lengths(np.asarray([S - 1, S // 2]), q=np.asarray([T // 2, T])),
    "documents": lambda N, T, S: CAUSAL & Segments(q_ids=words(T, 5), kv_ids=words(S, 6)),
    "shuffled documents": lambda N, T, S: Segments(q_ids=words(T, 5)[:, ::-1], kv_ids=words(S, 6)),
    "dense": lambda N, T, S: Dense(ragged(N, T, S)),
    "dense of few axes": lambda N, T, S: Dense(drawn(7, B, 1, 1, S) < 0.7),
    "function": by_table,
    "function and window": lambda N, T, S: by_table(N, T, S) & Window(4, 2),
    "not": lambda N, T, S: ~Window(1, 2) & ~Dense(ragged(N, T, S)),
}
SCORES = {
    "none": lambda N, T, S: IDENTITY,
    "softcap": lambda N, T, S: Softcap(jnp.asarray(1.5)),
    "alibi": lambda N, T, S: Alibi(jnp.arange(1.0, N + 1) / 7),
    "bias": lambda N, T, S: Additive(normal(11, N, T, S)),
    "bias of few axes": lambda N, T, S: Softcap(2.0) >> Additive(normal(12, B, 1, 1, S)),
    "function": lambda N, T, S: ScoreFn(by_distance, {"slope": normal(13, N), "gain": normal(14)}),
}


def by_distance(params, x, b, n, q, k):
    return x * params["gain"] - params["slope"][n] * jnp.abs(q - k).astype(x.dtype)


def arrays(T, S, N, K):
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, h)


def check(q, k, v, rules, **how):
    got = outcome(blockwise.forward, q, k, v, rules, **how)
    check_same(got, outcome(reference.forward, q, k, v, rules))


PAIRS = with_nightly(  # at each commit each mask once, and each score twice or more
    product(enumerate(MASKS), enumerate(SCORES)),
    commit=lambda pair: pair[1][0] == pair[0][0] % len(SCORES),
)


@pytest.mark.parametrize(("mask", "score"), PAIRS, ids=lambda x: x[1])
def test_every_mask_with_every_score(mask, score):
    """Each pair in one shape and one walk; scale, sinks and dropout in turns."""
    (i, mask), (j, score) = mask, score
    T, S, N, K, rows, cols = SHAPES[(i + j + i // 4) % 4]
    turn = (i + 2 * j) % 3
    dropout = None if turn else DropoutMask(drawn(15, B, N, T, S) < 0.7, 0.3)
    rules = Rules(
        mask=MASKS[mask](N, T, S),
        score=SCORES[score](N, T, S),
        scale=[None, jnp.asarray(0.7), 0.3][turn],
        sinks=None if turn else normal(16, N),
        dropout=Dropout(0.4, jax.random.key(1)) if turn == 1 else dropout,
    )
    how = WALKS[list(WALKS)[(i + j) % 3]]
    check(*arrays(T, S, N, K), rules, rows=rows, cols=cols, **how)
