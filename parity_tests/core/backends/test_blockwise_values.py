"""Attention in blocks on drawn values: sizes of logits, lengths, segments, shares and keys.

Everything drawn is an array, so that one program of each kind serves all examples.
"""

from functools import cache
from itertools import product

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flax_attn import CAUSAL, Alibi, Dropout, Lengths, Segments, Softcap, Window, reference
from flax_attn.backends import blockwise
from flax_attn.parity import judge
from flax_attn.rules import Rules, sizes_of
from parity_tests.core.backends.flash import normal
from parity_tests.core.backends.test_blockwise import WALKS, B, H, h
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

T, S, N, K = 9, 14, 6, 3
MASKS = {
    "lengths": lambda x: CAUSAL & Lengths(x["cols"], q=x["rows"]),
    "segments": lambda x: Segments(q_ids=x["q_ids"], kv_ids=x["kv_ids"]) & Window(5, 20),
}
WHOLE = st.integers(0, 2**32 - 1)


@st.composite
def values(draw):
    """A seed, the size of the logits (tiny, usual, large), and all that rules hold."""
    return {
        "seed": draw(WHOLE),
        "size": draw(st.sampled_from([1e-6, 1.0, 10.0])),
        "cols": draw(st.lists(st.integers(0, S), min_size=B, max_size=B)),
        "rows": draw(st.lists(st.integers(0, T), min_size=B, max_size=B)),
        "ids": draw(st.lists(st.integers(0, 3), min_size=T + S, max_size=T + S)),
        "cap": draw(st.sampled_from([5.0, 500.0])),
        "key": draw(WHOLE),
    }


def arrays(drawn):
    of = np.random.RandomState(drawn["seed"]).standard_normal
    ids = np.asarray(drawn["ids"], np.int32)
    learnt = {
        "q": of((B, T, N, H)) * drawn["size"],
        "k": of((B, S, K, H)),
        "v": of((B, S, K, h)),
        "sinks": of(N),
        "slopes": of(N),
        "cap": np.asarray(drawn["cap"]),
    }
    fixed = {
        "rows": np.asarray(drawn["rows"], np.int32),
        "cols": np.asarray(drawn["cols"], np.int32),
        "q_ids": ids[:T],
        "kv_ids": ids[T:],
        "key": np.asarray([0, drawn["key"]], np.uint32),
    }
    return learnt, fixed


@cache
def program(mask, walk):
    """Output, lse and all gradients of one kind of request, compiled once."""
    how = {} if walk is None else {"rows": 4, "cols": 5, **WALKS[walk]}
    forward = reference.forward if walk is None else blockwise.forward

    def run(learnt, fixed):
        def attention(x):
            score = Softcap(x["cap"]) >> Alibi(x["slopes"])
            drop = Dropout(0.3, jax.random.wrap_key_data(fixed["key"]))
            rules = Rules(MASKS[mask](fixed), score, None, x["sinks"], drop)
            bound = rules.bind(sizes_of(x["q"], x["k"]), H)
            return forward(x["q"], x["k"], x["v"], bound, **how)

        (o, lse), back = jax.vjp(attention, learnt)
        return o, lse, back((normal(8, *o.shape), normal(9, *lse.shape)))[0]

    return jax.jit(run)


EVERY = product(MASKS, WALKS)


@pytest.mark.parametrize(
    ("mask", "walk"),
    with_nightly(EVERY, commit=[("lengths", "unrolled"), ("segments", "loops")]),
)
@given(drawn=values())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_drawn_values(mask, walk, drawn):
    with jax.enable_x64(True):
        given = arrays(drawn)
        got, want = (program(mask, name)(*given) for name in (walk, None))
    everything = [np.asarray(g) for g in want[2].values()]
    for a, b in zip(got[:2], want[:2], strict=True):
        verdict = judge.same_function(np.asarray(a), np.asarray(b), zero=True)
        assert verdict.ok, verdict
    for name, b in want[2].items():
        scale = judge.gradient_scale(everything, np.asarray(b))
        verdict = judge.same_function(np.asarray(got[2][name]), np.asarray(b), scale, zero=True)
        assert verdict.ok, (name, verdict)
