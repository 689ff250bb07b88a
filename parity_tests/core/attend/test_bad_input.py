"""attend refuses bad input before any arithmetic, in a sentence: asked, given, what would work."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_attn as fa
from flax_attn import attend
from parity_tests.core.backends.refusal import refused, told

B, T, S, N, K, H, h = 2, 5, 9, 6, 3, 8, 10


def qkv():
    return {"q": jnp.ones((B, T, N, H)), "k": jnp.ones((B, S, K, H)), "v": jnp.ones((B, S, K, h))}


def changed(name, change):
    return lambda given: {**given, name: change(given[name])}


def both(change):
    return lambda given: {**given, "k": change(given["k"]), "v": change(given["v"])}


WRONG_ARRAYS = {
    "rank": (
        changed("q", lambda q: q[0, :, 0]),
        ValueError,
        ["(length, heads, width)", "q (5, 8)", "k (2, 9, 3, 8)"],
    ),
    "batch": (both(lambda x: x[:1]), ValueError, ["share their batch axes", "k (1, 9, 3, 8)"]),
    "batch rank": (
        changed("q", lambda q: q[None]),
        ValueError,
        ["batch axes", "q (1, 2, 5, 6, 8)"],
    ),
    "lengths": (changed("v", lambda v: v[:, 1:]), ValueError, ["k and v must share", "v (2, 8,"]),
    "heads of v": (changed("v", lambda v: v[:, :, 1:]), ValueError, ["share length and heads"]),
    "widths": (changed("q", lambda q: q[..., 1:]), ValueError, ["a head width", "q (2, 5, 6, 7)"]),
    "heads": (
        both(lambda x: jnp.concatenate([x, x[:, :, :1]], 2)),
        ValueError,
        ["must divide the query heads", "q (2, 5, 6, 8)", "k (2, 9, 4, 8)"],
    ),
    "no heads": (both(lambda x: x[:, :, :0]), ValueError, ["divide", "k (2, 9, 0, 8)"]),
    "integers": (changed("q", lambda q: q.astype(int)), TypeError, ["floating", "q int32"]),
    "booleans": (changed("v", lambda v: v > 0), TypeError, ["floating", "v bool"]),
    "complex": (changed("k", lambda k: k.astype(complex)), TypeError, ["floating", "k complex64"]),
    "mixed": (
        changed("k", lambda k: k.astype(jnp.bfloat16)),
        TypeError,
        ["share one dtype", "q float32, k bfloat16, v float32", "x.astype(dtype)"],
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_attend_refuses_arrays(name):
    change, kind, words = WRONG_ARRAYS[name]
    given = change(qkv())
    with refused(kind, *words):
        attend(**given)
    with refused(kind, *words):
        fa.explain(**given)
    if given["v"].shape == (B, S, K, h) and given["v"].dtype == given["k"].dtype == jnp.float32:
        with refused(kind):
            fa.attention_weights(given["q"], given["k"])


def boolean(*shape):
    return np.ones(shape, bool)


def narrowed(logits, b, n, q, k):
    return logits.astype(jnp.bfloat16)


GRID = "(2, 6, 5, 9)"
POLARITY = ["True means 'may attend'", "score=Additive(array)", "torch.nn.MultiheadAttention"]
WRONG_RULES = {
    "float mask": (lambda: {"mask": jnp.ones((T, S))}, TypeError, [*POLARITY, "got float32"]),
    "integer mask": (
        lambda: {"mask": np.ones((T, S), int)},
        TypeError,
        [*POLARITY, "got int64", "array == 1"],
    ),
    "mask of lists": (lambda: {"mask": [[True]]}, TypeError, [*POLARITY, "got list"]),
    "a number for a mask": (lambda: {"mask": 3}, TypeError, [*POLARITY, "got int"]),
    "float in a mask": (lambda: {"mask": fa.CAUSAL & jnp.ones((T, S))}, TypeError, POLARITY),
    "function for a mask": (
        lambda: {"mask": lambda q, k: q >= k},
        TypeError,
        ["MaskFn(lambda b, "],
    ),
    "score for a mask": (lambda: {"mask": fa.Softcap(3.0)}, TypeError, ["given as score="]),
    "function of two": (
        lambda: {"mask": fa.MaskFn(lambda q, k: q >= k)},
        TypeError,
        ["(b, n, q, k)"],
    ),
    "function of three": (
        lambda: {"score": fa.ScoreFn(lambda p, x, q: x, jnp.ones(2))},
        TypeError,
        ["fn(params, logits, b, n, q, k)", "takes (p, x, q)"],
    ),
    "function for a score": (lambda: {"score": jnp.abs}, TypeError, ["ScoreFn(lambda logits, b,"]),
    "scores added": (
        lambda: {"score": fa.Alibi(jnp.ones(N)) + fa.Softcap(3.0)},
        TypeError,
        [">>", "Got Alibi and Softcap"],
    ),
    "one side of a window": (
        lambda: {"mask": fa.Window(64)},
        TypeError,
        ["needs right", "(63, 0)"],
    ),
    "class for a mask": (lambda: {"mask": fa.Causal}, TypeError, ["Causal(...)"]),
    "word for a mask": (lambda: {"mask": "causal"}, TypeError, ["mask=CAUSAL", "mask=FULL"]),
    "float from a mask_mod": (
        lambda: {"mask": fa.MaskFn(lambda b, n, q, k: 1.0 * (q >= k))},
        TypeError,
        POLARITY,
    ),
    "mask turned": (lambda: {"mask": boolean(S, T)}, ValueError, ["broadcast", GRID, "(9, 5)"]),
    "mask by kv heads": (lambda: {"mask": boolean(B, K, T, S)}, ValueError, [GRID, "(2, 3, 5, 9)"]),
    "mask without its head axis": (lambda: {"mask": boolean(B, T, S)}, ValueError, [GRID]),
    "mask with axes to spare": (lambda: {"mask": boolean(1, 1, 1, T, S)}, ValueError, [GRID]),
    "mask in a mask": (lambda: {"mask": fa.CAUSAL | boolean(S, T)}, ValueError, [GRID]),
    "lengths": (
        lambda: {"mask": fa.Lengths(np.ones(3, int))},
        ValueError,
        ["Lengths.kv", "(2,)", "(3,)"],
    ),
    "float lengths": (
        lambda: {"mask": fa.Lengths(np.ones(2))},
        TypeError,
        ["Lengths.kv must hold integers", "float64"],
    ),
    "segments": (
        lambda: {"mask": fa.Segments(np.ones((B, T), int))},
        ValueError,
        ["Segments(ids)", "T=5 and S=9", "Segments(q_ids=..., kv_ids=...)"],
    ),
    "window": (lambda: {"mask": fa.Window(-1, 0)}, ValueError, ["Window.left", "got -1"]),
    "chunk": (lambda: {"mask": fa.Chunked(0)}, ValueError, ["Chunked.size", "got 0"]),
    "prefix": (lambda: {"mask": fa.Prefix(1.5)}, TypeError, ["Prefix.length", "integers"]),
    "offset between keys": (lambda: {"mask": fa.Causal(1.5)}, ValueError, ["integer", "got 1.5"]),
    "offsets": (
        lambda: {"mask": fa.Window(1, 0, jnp.arange(float(T)))},
        ValueError,
        ["Window.offset", '"end"'],
    ),
    "offset": (lambda: {"mask": fa.Causal("start")}, ValueError, ['"end"', "got 'start'"]),
    "bias turned": (
        lambda: {"score": fa.Additive(jnp.ones((S, T)))},
        ValueError,
        ["An additive score must broadcast", GRID, "(9, 5)"],
    ),
    "bias by kv heads": (
        lambda: {"score": fa.Softcap(3.0) >> fa.Additive(jnp.ones((K, T, S)))},
        ValueError,
        [GRID, "(3, 5, 9)"],
    ),
    "boolean bias": (
        lambda: {"score": fa.Additive(boolean(T, S))},
        TypeError,
        ["floating", "got bool", "mask="],
    ),
    "bare bias": (
        lambda: {"score": jnp.ones((T, S))},
        TypeError,
        ["score must be one of", "score=Additive(array)"],
    ),
    "slopes": (
        lambda: {"score": fa.Alibi(jnp.ones(K))},
        ValueError,
        ["one slope a query head", "(6,)", "(3,)"],
    ),
    "no cap": (lambda: {"score": fa.Softcap(0.0)}, ValueError, ["above zero", "got 0.0"]),
    "nan cap": (lambda: {"score": fa.Softcap(float("nan"))}, ValueError, ["above zero", "nan"]),
    "caps": (lambda: {"score": fa.Softcap(jnp.ones(S))}, ValueError, ["one number", "(9,)"]),
    "chain": (
        lambda: {"score": fa.Softcap(3.0) >> jnp.ones((T, S))},
        TypeError,
        ["chained with a score", "Additive(array)"],
    ),
    "word for a scale": (lambda: {"scale": "full"}, TypeError, ["scale", "number", "'full'"]),
    "flag for a scale": (lambda: {"scale": True}, TypeError, ["scale", "number", "True"]),
    "scales": (lambda: {"scale": jnp.ones(S)}, ValueError, ["scale must be one number", "(9,)"]),
    "sinks": (lambda: {"sinks": jnp.ones(K)}, ValueError, ["sinks", "(6,)", "(3,)"]),
    "one sink": (lambda: {"sinks": 1.0}, ValueError, ["one logit a query head", "()"]),
    "bare rate": (lambda: {"dropout": 0.1}, TypeError, ["Dropout(rate, key)", "got float"]),
    "keep": (
        lambda: {"dropout": fa.DropoutMask(boolean(B, K, T, S), 0.5)},
        ValueError,
        ["DropoutMask.mask", GRID],
    ),
    "keep at a rate of zero": (
        lambda: {"dropout": fa.DropoutMask(boolean(S, T), 0.0)},
        ValueError,
        ["DropoutMask.mask", GRID, "(9, 5)"],
    ),
    "seed for a key": (lambda: {"dropout": fa.Dropout(0.1, 0)}, TypeError, ["key(seed)", "int"]),
    "float keep": (
        lambda: {"dropout": fa.DropoutMask(np.ones((T, S)), 0.5)},
        TypeError,
        ["boolean"],
    ),
    "backend": (lambda: {"backend": "flash"}, ValueError, ['"auto"', "reference", "got 'flash'"]),
    "no backend": (lambda: {"backend": None}, ValueError, ['"auto"', "got None"]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG_RULES)
def test_attend_refuses_rules(name):
    make, kind, words = WRONG_RULES[name]
    with refused(kind, *words):
        attend(**qkv(), **make())


@pytest.mark.parametrize("batch", [(2,), (2, 3)])
@pytest.mark.parametrize("more", [(S,), (T, S)], ids=["keys", "pairs"])
def test_the_axes_that_are_named_make_a_mask(batch, more):
    q, k = np.ones((*batch, T, N, H), np.float32), np.ones((*batch, S, K, H), np.float32)
    array = boolean(*batch, *more)
    with pytest.raises(ValueError, match="must broadcast") as error:
        fa.explain(q, k, k, mask=array)
    code = re.search(r"is (array\[.*?\])", str(error.value))[1]
    assert any(v.refusal is None for v in fa.explain(q, k, k, mask=eval(code, {"array": array})))


@pytest.mark.nightly
def test_a_function_of_scores_keeps_shape_and_dtype():
    with told(ValueError, "keep the logits' shape and dtype", "returned (2, 6, 5, 9) bfloat16"):
        attend(**qkv(), score=fa.ScoreFn(narrowed))


FUNCTIONS = [
    lambda x, b, n, q, k: x + np.ones(9, np.float32)[k],
    lambda x, b, n, q, k: x if q > k else -x,
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=["numpy array", "condition"])
def test_a_function_of_traced_indices_raises_with_a_hint(fn):
    with told(TypeError, "traced indices", "jnp.asarray(array)[q]", "jnp.where"):
        attend(**qkv(), score=fa.ScoreFn(fn))
    by_head = fa.ScoreFn(lambda p, x, b, n, q, k: x + p[n], fa.alibi_slopes(N))  # of numpy
    assert any(verdict.refusal is None for verdict in fa.explain(**qkv(), score=by_head))


RATES = [-0.1, 1.5, float("nan"), float("inf"), True, "0.1", None]


@pytest.mark.nightly
@pytest.mark.parametrize("rate", RATES)
def test_dropout_rates_outside_0_to_1_are_refused(rate):
    words = "is the share dropped, from 0 to 1", repr(rate)
    with refused(ValueError, "Dropout.rate", *words):
        fa.Dropout(rate, jax.random.key(0))
    with refused(ValueError, "DropoutMask.rate", *words):
        fa.DropoutMask(boolean(T, S), rate)


@pytest.mark.nightly
def test_a_backend_that_refuses_gives_its_reason():
    for verdict in fa.explain(**qkv()):
        if verdict.refusal is not None:
            with refused(NotImplementedError, repr(verdict.backend), verdict.refusal):
                attend(**qkv(), backend=verdict.backend)


def test_a_refusal_is_right_only_with_all_its_words_and_before_arithmetic():
    with told(AssertionError, "['three'] not in"), refused(ValueError, "three"):
        raise ValueError("words, two of them")
    with told(AssertionError, "arithmetic came before"), refused(ValueError):
        jnp.ones((3, 2)) @ jnp.ones((2, 3))
