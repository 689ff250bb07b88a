"""`dot_product_attention` refuses bad input before any arithmetic, by its own argument's name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import dot_product_attention
from parity_tests.core.backends.refusal import refused

B, T, S, N, K, H = 2, 7, 9, 6, 3, 8
GIVEN = {
    "query": jnp.ones((B, T, N, H)),
    "key": jnp.ones((B, S, K, H)),
    "value": jnp.ones((B, S, K, H)),
}

GRID_OF = "(2, 6, 7, 9)"
WRONG = {
    "rank": ({"query": np.ones((T, H))}, ValueError, ["query must have the axes", "(7, 8)"]),
    "axes to spare": (
        {"key": np.ones((1, B, S, 3, H))},
        ValueError,
        ["key", "(1, 2, 9, 3, 8)", "attend takes"],
    ),
    "batch": ({"query": np.ones((T, N, H))}, ValueError, ["batch axes", "(1, 7, 6, 8)"]),
    "heads": ({"query": np.ones((B, T, 5, H))}, ValueError, ["must divide the query heads"]),
    "lengths of k and v": ({"value": np.ones((B, T, 3, H))}, ValueError, ["k and v must share"]),
    "integers": ({"query": np.ones((B, T, N, H), int)}, TypeError, ["floating", "q int32"]),
    "mixed": ({"value": jnp.ones((B, S, 3, H), "bfloat16")}, TypeError, ["share one dtype"]),
    "float mask": (
        {"mask": np.zeros((T, S))},
        TypeError,
        ["mask must be boolean", "float32", "bias="],
    ),
    "mask turned": ({"mask": np.ones((S, T), bool)}, ValueError, ["mask must broadcast", GRID_OF]),
    "mask by key heads": (
        {"mask": np.ones((B, 3, T, S), bool)},
        ValueError,
        [GRID_OF, "(2, 3, 7, 9)"],
    ),
    "boolean bias": ({"bias": np.ones((T, S), bool)}, TypeError, ["bias must hold real", "mask="]),
    "complex bias": ({"bias": np.ones((T, S), complex)}, TypeError, ["bias must hold real"]),
    "bias turned": ({"bias": np.ones((S, T))}, ValueError, ["bias must broadcast", GRID_OF]),
    "bias with axes to spare": ({"bias": np.ones((1, B, N, T, S))}, ValueError, ["bias", GRID_OF]),
    "scales": ({"scale": np.ones(N)}, ValueError, ["scale must be one number", "(6,)"]),
    "scale": ({"scale": "0.1"}, TypeError, ["scale must be a number"]),
    "causal": ({"is_causal": "no"}, TypeError, ["is_causal must be True or False", "'no'"]),
    "residual": ({"return_residual": None}, TypeError, ["return_residual must be True or False"]),
    "float lengths": (
        {"query_seq_lengths": np.ones(B)},
        TypeError,
        ["query_seq_lengths", "float64"],
    ),
    "boolean lengths": ({"query_seq_lengths": np.ones(B, bool)}, TypeError, ["integers", "bool"]),
    "one length": (
        {"key_value_seq_lengths": 3},
        ValueError,
        ["key_value_seq_lengths", "(2,)", "()"],
    ),
    "lengths": ({"query_seq_lengths": np.ones(3, int)}, ValueError, ["(2,)", "(3,)"]),
    "negative window": (
        {"local_window_size": -1},
        ValueError,
        ["0 or more", "got -1", "Window(left, None)"],
    ),
    "window": ({"local_window_size": (3, None)}, ValueError, ["got (3, None)"]),
    "three windows": ({"local_window_size": (3, 2, 1)}, ValueError, ["got (3, 2, 1)"]),
    "fraction of a window": ({"local_window_size": 1.5}, ValueError, ["got 1.5"]),
    "implementation": (
        {"implementation": "flash"},
        ValueError,
        ["'xla' or 'cudnn'", "'flash'", "attend(backend"],
    ),
    "no implementation": ({"implementation": ["xla"]}, ValueError, ["'xla' or 'cudnn'"]),
    "cudnn": ({"implementation": "cudnn"}, NotImplementedError, ["backend 'cudnn' cannot"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused(name):
    given, kind, words = WRONG[name]
    with refused(kind, *words):
        dot_product_attention(**{**GIVEN, **given})


def test_a_window_that_is_traced_is_refused():
    with refused(ValueError, "local_window_size"):
        jax.eval_shape(lambda n: dot_product_attention(**GIVEN, local_window_size=n), 3)
