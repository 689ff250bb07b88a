"""`flax_attention` over flax's grid of dtypes, precisions, biases, norms and caches.

flax runs each by `flax.nnx` and by `flax.linen`; here each runs by flax's own function and by ours,
and ours may be no further from the float64 truth than flax's.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_attn import flax_attention
from flax_attn.parity import judge
from parity_tests.core.attend.flax_modules import (
    as_flax_runs,
    by_linen,
    by_nnx,
    draw,
    written_out,
)
from parity_tests.tables import with_nightly

X = draw(1, 1, 5, 12)
KINDS = [*itertools.product(["float32", "float16"], repeat=2)]  # dtype, param_dtype
PARTS = [*itertools.product([True, False], repeat=3)]  # use_bias, decode, normalize_qk
# On a CPU all three precisions are one program but for a word.
PRECISIONS = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST
GRID = [(*kind, *rest) for kind, *rest in itertools.product(KINDS, PARTS, PRECISIONS)]
AT_COMMIT = [
    (*kind, part, jax.lax.Precision.DEFAULT)
    for kind, part in zip([*KINDS[:2], KINDS[3]], [*PARTS[1:3], PARTS[6]], strict=True)
]


def run(by, fn, part, whole=True, **config):
    use_bias, decode, normalize_qk = part
    config = {"use_bias": use_bias, "normalize_qk": normalize_qk, **config}
    return by(fn, config, [X], steps=2 * decode, gradients=False, whole=whole).out


@cache
def truth_of(part):
    with as_flax_runs(x64=True):
        return run(by_nnx, written_out, part, param_dtype=jnp.float64)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "param_dtype", "part", "precision"), with_nightly(GRID, commit=AT_COMMIT), ids=str
)
def test_ours_is_as_near_to_the_truth_as_flaxs(dtype, param_dtype, part, precision):
    with as_flax_runs(x64=False):
        kinds = {"dtype": jnp.dtype(dtype), "param_dtype": jnp.dtype(param_dtype)}
        runs = [(by_nnx, None), (by_nnx, flax_attention)]
        usual = precision == jax.lax.Precision.DEFAULT
        if usual:  # flax's own test says that both are equal
            runs.append((by_linen, flax_attention))
        # With float16 a CPU runs flax's own function eagerly only.
        how = {"whole": usual and dtype == "float32", "precision": precision, **kinds}
        theirs, *ours = (run(by, fn, part, **how) for by, fn in runs)
    for got in ours:
        assert got.dtype == theirs.dtype == np.dtype(dtype)
        verdict = judge.same_precision(got, theirs, truth_of(part), dtype)
        assert verdict.ok, verdict


@pytest.mark.nightly
@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", None])
def test_a_forced_softmax_gives_linens_dtypes(dtype, forced):
    with as_flax_runs(x64=False):
        q, k, v = (jnp.asarray(draw(i, 2, 5, 3, 4), dtype or "bfloat16") for i in range(3))
        call = {"dtype": dtype, "force_fp32_for_softmax": forced}
        want, got = (
            np.asarray(fn(q, k, v, **call)) for fn in (linen.dot_product_attention, flax_attention)
        )
        truth = np.asarray(flax_attention(*(x.astype("float32") for x in (q, k, v))))
    assert got.dtype == want.dtype
    assert judge.same_precision(got, want, truth, str(q.dtype)).ok


@pytest.mark.nightly
def test_dtypes_are_promoted_as_flax_promotes_them():
    with as_flax_runs(x64=False):
        q, k, v = (jnp.asarray(draw(i, 5, 3, 4), "float32") for i in range(3))
        for mixed in ((q, k.astype("bfloat16"), v), (q.astype("float16"), k, v.astype("float16"))):
            want, got = (fn(*mixed) for fn in (nnx.dot_product_attention, flax_attention))
            assert got.dtype == want.dtype == jnp.float32
        assert flax_attention(jnp.ones((5, 3, 4), int), k, v, dtype="bfloat16").dtype == "bfloat16"
        seen = []

        def promote(arrays, dtype):
            seen.append(dtype)
            return tuple(x.astype("float16") for x in arrays)

        assert flax_attention(q, k, v, dtype="bfloat16", promote_dtype=promote).dtype == "float16"
        assert seen == ["bfloat16"]
        with pytest.raises(ValueError, match="must be inexact"):
            flax_attention(q, k, v, dtype=int)


def products(precision):
    """The precision of every product, forward and backward."""
    q = jnp.ones((5, 3, 4))
    loss = lambda q: flax_attention(q, q, q, precision=precision).sum()  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(loss))(q))
    found = [line.partition("=")[2] for line in text.splitlines() if " precision=" in line]
    return {*found}, text.count("dot_general[")


@pytest.mark.nightly(but=["F32_F32_F32-F32_F32_F32"])
@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, "None"),
        (jax.lax.Precision.HIGHEST, "(Precision.HIGHEST, Precision.HIGHEST)"),
        ("high", "(Precision.HIGH, Precision.HIGH)"),
        ("fastest", "(Precision.DEFAULT, Precision.DEFAULT)"),
        (("float32", "highest"), "(Precision.HIGHEST, Precision.HIGHEST)"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
        ("BF16_BF16_F32", "BF16_BF16_F32"),
    ],
)
def test_the_precision_reaches_every_product(given, want):
    found, count = products(given)
    assert count == 6 and found == ({want} if given else {"None"} & found)
    with jax.default_matmul_precision("highest"):
        ambient, _ = products(given)
    assert ambient == ({want} if given else {"(Precision.HIGHEST, Precision.HIGHEST)"})


run_one = partial(flax_attention, *(jnp.ones((5, 3, 4)) for _ in range(3)))


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ("sharp", ValueError, "precision must be None, .* got 'sharp'"),
        (("high", "highest"), NotImplementedError, "precision must be one for both operands"),
        (("high",), NotImplementedError, "precision must be one for both operands"),
        (7, ValueError, "precision must be None, .* got 7"),
    ],
)
def test_other_precisions_are_refused(given, kind, words):
    with pytest.raises(kind, match=words):
        run_one(precision=given)
