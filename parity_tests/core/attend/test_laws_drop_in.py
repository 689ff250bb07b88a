"""The laws of the drop-in for jax.nn: meaning of arguments, refusals and dtypes."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn.attend import use_backend
from flax_attn.drop_in.jax_nn import dot_product_attention
from flax_attn.parity import judge
from parity_tests.requests.oracle import plain

from ..backends.law_cases import eager64, normal
from .test_laws_attend import BIAS, DIAGONAL, KEYS, ONES, TABLE, B, H, K, N, Q, S, T, same

SEEN, COUNTS, ROWS = TABLE, np.asarray([3, 5], "int32"), np.asarray([4, 2], "int32")
VALUES = normal(5, B, S, K, H)
AT_Q, AT_K = np.arange(T)[:, None], np.arange(S)


def window(left, right):
    return (AT_Q - left <= AT_K) & (AT_K <= AT_Q + right)


def short(queries, keys):
    seen = np.ones((B, 1, T, S), bool)
    if queries is not None:
        seen = seen & (AT_Q < queries[:, None, None, None])
    return seen if keys is None else seen & (AT_K < keys[:, None, None, None])


CALLS = [
    ({}, {}),
    ({"scale": 0.3}, {"scale": 0.3}),
    ({"bias": BIAS}, {"bias": BIAS}),
    ({"bias": BIAS[0, 0]}, {"bias": BIAS[:1, :1]}),
    ({"bias": 2}, {"bias": np.full((1, 1, 1, 1), 2.0)}),
    ({"bias": np.arange(S)}, {"bias": np.arange(S).reshape(1, 1, 1, S) * 1.0}),
    ({"mask": SEEN}, {"seen": SEEN}),
    ({"mask": SEEN[0, 0]}, {"seen": SEEN[:1, :1]}),
    ({"is_causal": True}, {"seen": DIAGONAL}),
    ({"is_causal": np.True_}, {"seen": DIAGONAL}),
    ({"local_window_size": 1}, {"seen": window(1, 1)}),
    ({"local_window_size": np.int32(0)}, {"seen": window(0, 0)}),
    ({"local_window_size": (2, 0)}, {"seen": window(2, 0)}),
    ({"local_window_size": [0, np.int64(2)]}, {"seen": window(0, 2)}),
    ({"query_seq_lengths": ROWS}, {"seen": short(ROWS, None)}),
    ({"key_value_seq_lengths": COUNTS}, {"seen": short(None, COUNTS)}),
    (
        {"query_seq_lengths": ROWS, "key_value_seq_lengths": jnp.asarray(COUNTS)},
        {"seen": short(ROWS, COUNTS)},
    ),
    (
        {
            "mask": SEEN,
            "is_causal": True,
            "local_window_size": (3, 9),
            "key_value_seq_lengths": COUNTS,
            "bias": BIAS,
        },
        {"seen": SEEN & DIAGONAL & window(3, 9) & short(None, COUNTS), "bias": BIAS},
    ),
]


@cache
def of_jax(i):
    found = plain(Q, KEYS, VALUES, np.zeros((B, T, N, H)), **CALLS[i][1])
    return found["o"], found["lse"]


def in_both_ways(q, k, v, **given):
    """With the lse, and alone as by jax's own implementation."""
    only = dot_product_attention(q, k, v, implementation="xla", **given)
    return dot_product_attention(q, k, v, return_residual=True, **given), only


@eager64
def test_the_drop_in_equals_jax_nn_for_drawn_arguments():
    for i, (given, _) in enumerate(CALLS):
        want = of_jax(i)
        got, only = jax.jit(partial(in_both_ways, **given))(Q, KEYS, VALUES)
        same(got, want)
        assert judge.same_function(only, want[0]).ok
    got = jax.jit(dot_product_attention)(Q, KEYS, VALUES, BIAS, SEEN)  # by place
    assert judge.same_function(got, plain(Q, KEYS, VALUES, 0 * got, bias=BIAS, seen=SEEN)["o"]).ok


@eager64
def test_the_drop_in_takes_a_batch_of_one_without_its_axis():
    want = of_jax(0)
    got = dot_product_attention(Q[0], KEYS[0], VALUES[0], return_residual=True)
    same(got, [x[0] for x in want])
    alone = dot_product_attention(Q[1], KEYS[1], VALUES[1])
    assert alone.shape == (T, N, H) and judge.same_function(alone, want[0][1]).ok


def test_the_drop_in_makes_no_dense_mask_of_causal_and_window():
    """Backends receive causal and window masks as objects, not as an array of T x S."""
    x = jnp.ones((1, 300, 2, 8), jnp.float32)

    def peak(**given):
        jaxpr = jax.make_jaxpr(lambda x: dot_product_attention(x, x, x, **given))(x)
        return str(jaxpr)

    with use_backend("blockwise"):
        for given in ({}, {"is_causal": True}, {"local_window_size": 3}):
            assert "300,300" not in peak(**given)
        assert "300,300" in peak(mask=np.ones((300, 300), bool))


REFUSED = [
    ({"query": np.ones((T, H))}, ValueError, "query must have the axes (batch, length, heads, wi"),
    ({"key": np.ones((1, B, S, K, H))}, ValueError, "key must have the axes"),
    ({"value": np.ones((S, H))}, ValueError, "value must have the axes"),
    ({"mask": np.ones((T, S))}, TypeError, "mask must be boolean, True where a query may attend"),
    ({"mask": np.ones((S, T), bool)}, ValueError, "mask must broadcast"),
    ({"bias": np.ones((T, S), bool)}, TypeError, "bias must hold real numbers; got bool"),
    ({"bias": np.ones((T, S), complex)}, TypeError, "bias must hold real numbers; got complex"),
    ({"bias": np.ones((S, T))}, ValueError, "bias must broadcast"),
    ({"local_window_size": -1}, ValueError, "local_window_size must be a count of keys, 0 or mor"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "got (1, 2, 3)"),
    ({"local_window_size": (1,)}, ValueError, "got (1,)"),
    ({"local_window_size": (1, None)}, ValueError, "got (1, None)"),
    ({"local_window_size": 1.5}, ValueError, "got 1.5"),
    ({"local_window_size": (1, True)}, ValueError, "got (1, True)"),
    ({"query_seq_lengths": np.ones(B)}, TypeError, "query_seq_lengths must hold integers; got f"),
    ({"query_seq_lengths": np.ones(B, bool)}, TypeError, "query_seq_lengths must hold integers"),
    ({"key_value_seq_lengths": np.ones(B)}, TypeError, "key_value_seq_lengths must hold integers"),
    ({"key_value_seq_lengths": 3}, ValueError, "key_value_seq_lengths needs one length a batch"),
    ({"query_seq_lengths": np.ones(3, int)}, ValueError, "query_seq_lengths needs one length a b"),
    ({"query_seq_lengths": np.ones((B, 1), int)}, ValueError, "shape (2,); got shape (2, 1)"),
    ({"is_causal": "no"}, TypeError, "is_causal must be True or False; got 'no'"),
    ({"is_causal": 1}, TypeError, "is_causal must be True or False"),
    ({"return_residual": None}, TypeError, "return_residual must be True or False; got None"),
    ({"implementation": "flash"}, ValueError, "implementation must be None, 'xla' or 'cudnn'; go"),
    ({"implementation": ["xla"]}, ValueError, "implementation must be None"),
    ({"implementation": 0}, ValueError, "implementation must be None"),
    ({"implementation": "cudnn"}, NotImplementedError, "backend 'cudnn' cannot serve"),
    ({"scale": "1"}, TypeError, "scale must be a number"),
    # What is wrong twice is named once: choices, then arrays, then lengths, then masks, the bias.
    ({"implementation": "flash", "is_causal": 1}, ValueError, "implementation must be"),
    ({"is_causal": 1, "query": np.ones(3)}, TypeError, "is_causal must be"),
    ({"query": np.ones(3), "query_seq_lengths": 3}, ValueError, "query must have"),
    ({"query_seq_lengths": 3, "local_window_size": -1}, ValueError, "query_seq_lengths needs"),
    ({"local_window_size": -1, "mask": np.ones(3)}, ValueError, "local_window_size must"),
    ({"mask": np.ones(3), "bias": True}, TypeError, "mask must be boolean"),
    ({"bias": True, "scale": "1"}, TypeError, "bias must hold"),
]


def test_the_drop_in_refuses_unsupported_arguments():
    given = {"query": ONES["q"], "key": ONES["k"], "value": ONES["k"]}
    for wrong, kind, words in REFUSED:
        with pytest.raises(kind, match=re.escape(words)):
            dot_product_attention(**{**given, **wrong})


def test_the_drop_in_keeps_narrow_dtypes():
    q, k = (jnp.asarray(ONES[name], "bfloat16") for name in "qk")
    out, lse = jax.jit(partial(dot_product_attention, bias=3, return_residual=True))(q, k, k)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert (lse > 3).all()
    with use_backend("cudnn"):
        assert dot_product_attention(q, k, k, implementation="xla").shape == q.shape
        with pytest.raises(NotImplementedError):
            dot_product_attention(q, k, k)
