"""The scenarios in which jax tests its own `dot_product_attention` (tests/nn_test.py), with ours.

In bfloat16 and float16, jax.nn's own error against numpy's float64 truth being the measure.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import dot_product_attention
from flax_attn.parity import judge
from parity_tests.core.attend.numpy_attention import attention, gathered
from parity_tests.core.attend.test_drop_in import draw, rounded, run
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly


@cache
def whole(attend, mapped=False):
    """Output and gradients, with bias and mask by place, as None, and the batch perhaps by vmap.

    jax.nn's own is not jitted: with float16 on a CPU it runs eagerly only.
    """
    f = partial(attend, implementation="xla")
    if mapped:
        f = jax.vmap(f, in_axes=(0, 0, 0, None, None))

    def both(q, k, v, c):
        out, back = jax.vjp(f, q, k, v, None, None)
        return out, *back(c)[:3]

    return both if attend is jax.nn.dot_product_attention else jax.jit(both)


GROUPS = [*product(["bfloat16", "float16"], [1, 2, 4])]


@pytest.mark.parametrize("mapped", [False, True], ids=["batched", "vmapped"])
@pytest.mark.parametrize(("dtype", "G"), with_nightly(GROUPS, commit=GROUPS[:3]))
def test_grouped_heads_are_repeated_heads(dtype, G, mapped):
    B, T, N, H = 2, 12, 4, 32
    shapes = (B, T, N, H), (B, T, N // G, H), (B, T, N // G, H), (B, T, N, H)
    q, k, v, c = (rounded(draw(i, *shape), dtype) for i, shape in enumerate(shapes))
    want = attention(q, k, v, c)

    def run(f, k, v):
        with jax.numpy_dtype_promotion("standard"):
            found = f(*(jnp.asarray(x, dtype) for x in (q, k, v, c)))
        return [np.asarray(x, np.float64) for x in found]

    repeated = (np.repeat(x, G, axis=2) for x in (k, v))
    out, dq, *shared = run(whole(jax.nn.dot_product_attention), *repeated)
    theirs = out, dq, *(gathered(x, G) for x in shared)
    mine = run(whole(dot_product_attention, mapped), k, v)
    for part, x, own in zip(("out", *"qkv"), mine, theirs, strict=True):
        verdict = judge.same_precision(x, own, want[part], dtype)
        assert verdict.ok, (part, verdict)


MODES = [
    ("bias",),
    ("causal",),
    ("padding",),
    ("custom",),
    ("causal", "padding"),
    ("custom", "padding"),
    ("bias", "causal"),
    ("causal", "sliding window"),
    ("sliding window",),
]


AT_COMMIT = [("bias",), ("causal", "padding"), ("custom", "padding"), ("causal", "sliding window")]
ROWS = with_nightly([(modes,) for modes in MODES], commit=[(modes,) for modes in AT_COMMIT])


@pytest.mark.parametrize(("modes",), ROWS, ids=lambda modes: "+".join(modes))
def test_masks_in_bfloat16(modes):
    B, T, N, H = 2, 16, 4, 32
    given = {"is_causal": "causal" in modes}
    seen = np.tril(np.ones((T, T), bool)) if {"causal", "custom"} & {*modes} else True
    if "padding" in modes:
        lengths = np.asarray([[T // 2, T // 4], [T // 4, T // 2]], np.int32)
        given |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
        rows, columns = (np.arange(T) < n[:, None] for n in lengths)
        seen = seen & (rows[:, :, None] & columns[:, None])[:, None]
    if "custom" in modes:
        given["mask"] = np.tril(np.ones((1, 1, T, T), bool))
    if "sliding window" in modes:
        given["local_window_size"] = (3, 2 if "causal" in modes else 0)
        seen = seen & np.triu(np.tril(np.ones((T, T), bool)), -3)
    arrays = {name: rounded(draw(i, B, T, N, H), "bfloat16") for i, name in enumerate("qkv")}
    if "bias" in modes:
        arrays["bias"] = rounded(draw(4, 1, N, T, T), "bfloat16")
    c = rounded(draw(5, B, T, N, H), "bfloat16")
    want = attention(*(arrays[name] for name in "qkv"), c, bias=arrays.get("bias"), seen=seen)
    theirs, mine = (
        run(f, arrays, (c, np.zeros((B, T, N))), given, "bfloat16")
        for f in (jax.nn.dot_product_attention, dot_product_attention)
    )
    for part in ("out", *arrays):
        verdict = judge.same_precision(mine[part], theirs[part], want[part], "bfloat16")
        assert verdict.ok, (part, verdict)


OF_A_BIAS = [*product([1, 3], [False, True])]


@pytest.mark.parametrize(
    ("size", "mapped"), with_nightly(OF_A_BIAS, commit=[(1, False), (3, True)])
)
def test_the_gradient_of_a_bias(size, mapped):
    """One array as query, key and value; a mask of keys, of rank 3; all by name, under jit."""
    S, N, H = 12, 4, 16
    x, bias = (
        rounded(draw(i, size, *shape), "bfloat16") for i, shape in [(0, (S, N, H)), (1, (N, S, S))]
    )
    want = attention(x, x, x, x, bias=bias)
    mask = np.ones((1, 1, S), bool)

    def run(attend):
        def f(x, bias, mask):
            return attend(query=x, key=x, value=x, bias=bias, mask=mask, is_causal=False)

        if mapped:
            f = jax.vmap(f, in_axes=(0, 0, None))

        @jax.jit
        def both(x, bias, mask):
            out, back = jax.vjp(f, x, bias, mask)
            return out, *back(x)[:2]

        with jax.numpy_dtype_promotion("standard"):
            found = both(*(jnp.asarray(x, "bfloat16") for x in (x, bias)), jnp.asarray(mask))
        return [np.asarray(x, np.float64) for x in found]

    truth = want["out"], want["q"] + want["k"] + want["v"], want["bias"]
    both = map(run, (dot_product_attention, jax.nn.dot_product_attention))
    for got, own, x in zip(*both, truth, strict=True):
        verdict = judge.same_precision(got, own, x, "bfloat16")
        assert verdict.ok, verdict
