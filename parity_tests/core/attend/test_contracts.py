"""The nine contracts of `attend`, in every backend that runs on this machine."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from flax_attn import (
    CAUSAL,
    FULL,
    Alibi,
    Causal,
    Dropout,
    MultiHeadAttention,
    ScoreFn,
    attend,
)
from flax_attn.parity import judge
from parity_tests.core.backends.flash import normal
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import of_both_modes

B, T, S, N, K, H, W = 2, 5, 7, 6, 3, 4, 8


def qkv():
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, W)
    return [np.asarray(normal(i, *shape)) for i, shape in enumerate(shapes)]


def changed(x, at, value):
    """A copy with a number elsewhere."""
    x = x.copy()
    x[at] = value
    return x


def seen(seed=3):
    """A random mask with an empty row and a key that nobody sees."""
    mask = np.random.RandomState(seed).rand(B, N, T, S) < 0.6
    mask[0, 1, 2] = False
    mask[1, :, :, 4] = False
    return mask


@jax.jit
def outcome(q, k, v, **rules):
    """Output, lse and gradients by random cotangents."""
    out, back = jax.vjp(lambda q, k, v: attend(q, k, v, return_lse=True, **rules), q, k, v)
    lse = jnp.where(jnp.isneginf(out[1]), 0, normal(8, *out[1].shape))
    return *out, *back((normal(9, *out[0].shape), lse))


def bit_equal(a, b):
    return all(judge.exact(np.asarray(x), np.asarray(y)).ok for x, y in zip(a, b, strict=True))


def same(a, b):
    return judge.same_function(np.asarray(a), np.asarray(b), zero=True).ok


# 1. A row that may look at nothing.


def test_an_empty_row_gives_zeros_and_an_lse_of_minus_infinity():
    q, k, v = qkv()
    o, lse, dq, dk, dv = outcome(q, k, v, mask=seen())
    o, lse, dq = map(np.asarray, (o, lse, dq))
    assert not o[0, 2, 1].any() and not dq[0, 2, 1].any()
    assert np.isneginf(lse[0, 2, 1]) and np.isfinite(lse).sum() == lse.size - 1
    assert all(np.isfinite(x).all() for x in (o, dq, dk, dv))


def test_an_empty_row_with_a_sink_has_the_sink_as_its_lse():
    q, k, v = qkv()
    sinks = normal(4, N)
    o, lse, dq, *_ = map(np.asarray, outcome(q, k, v, mask=seen(), sinks=sinks))
    assert not o[0, 2, 1].any() and not dq[0, 2, 1].any()
    assert same(lse[0, 2, 1], sinks[1])


def test_attention_without_keys_gives_zeros():
    q, k, v = qkv()
    o, lse, *grads = outcome(q, k, v, mask=~FULL)
    assert np.isneginf(lse).all() and not any(np.any(x) for x in (o, *grads))
    o, lse = jax.jit(partial(attend, return_lse=True))(q, k[:, :0], v[:, :0])
    assert np.isneginf(lse).all() and not np.any(o)


# 2. What nobody sees.


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_values_affect_no_output_or_gradient(poison):
    q, k, v = qkv()
    clean = outcome(q, k, v, mask=seen())
    q = changed(q, (0, 2, 1), poison)
    k, v = (changed(x, (1, 4), poison) for x in (k, v))
    dirty = outcome(q, k, v, mask=seen())
    assert bit_equal(clean, dirty)


def test_a_hidden_finite_value_changes_not_one_bit():
    q, k, v = qkv()
    hidden = changed(k, np.s_[:, 3], 1e30), changed(v, np.s_[:, 3], -1e30)
    call = jax.jit(partial(attend, mask=CAUSAL))
    before, after = (np.asarray(call(q, *x)) for x in ((k, v), hidden))
    assert bit_equal([before[:, :3]], [after[:, :3]])
    assert not bit_equal([before[:, 3:]], [after[:, 3:]])


# 3. A knob reaches the arithmetic or raises.
# Every backend with every knob: test_battery.py.


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(backend):
    """Equal logits and values that are a unit matrix show what was kept, and so does dv."""
    q, k, v = np.zeros((T, 1, H)), np.zeros((S, 1, H)), np.eye(S)[:, None]
    drop, do = Dropout(0.5, jax.random.key(3)), np.asarray(normal(4, T, 1, S))
    look = lambda v: attend(q, k, v, dropout=drop, backend=backend)  # noqa: E731
    o, back = jax.vjp(jax.jit(look), v)
    assert 0 < np.count_nonzero(o) < T * S
    assert same(back(do)[0][:, 0], o[:, 0].T @ do[:, 0])


# 4. True means "may look".


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_mask_that_is_not_boolean_is_refused_with_both_conventions(dtype):
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"may attend.*Additive.*MultiheadAttention"):
        attend(q, k, v, mask=np.ones((T, S), dtype))


# 5. Free axes.


def test_query_head_n_reads_key_head_n_over_g():
    q, k, v = qkv()
    repeated = (np.repeat(x, N // K, axis=2) for x in (k, v))
    assert same(attend(q, k, v), attend(q, *repeated))


# 6. The lse.


def test_the_lse_is_differentiable_and_wide():
    q, k, v = qkv()
    mask, c = seen(), normal(7, B, T, N)

    def plain(q, k):
        logits = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, axis=2)) / H**0.5
        lse = jax.nn.logsumexp(jnp.where(mask, logits, -1e300), axis=-1)
        return jnp.sum(jnp.where(mask.any(-1), jnp.swapaxes(c, 1, 2) * lse, 0))

    def ours(q, k):
        lse = attend(q, k, v, mask=mask, return_lse=True)[1]
        return jnp.sum(jnp.where(jnp.isfinite(lse), c * lse, 0))

    found = (jax.jit(jax.grad(f, (0, 1)))(q, k) for f in (ours, plain))
    for got, want in zip(*found, strict=True):
        assert same(got, want)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    o, lse = jax.jit(partial(attend, return_lse=True))(*half)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_float64_is_computed_in_float64(backend):
    q, k, v = (x[:, :, :K] for x in qkv())
    logits = np.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    call = jax.jit(partial(attend, backend=backend, return_lse=True))
    o, lse = call(q, k, v)
    assert o.dtype == lse.dtype == np.float64 and same(o, want)
    narrow, _ = call(*(x.astype(np.float32) for x in (q, k, v)))
    assert narrow.dtype == np.float32 and not same(np.asarray(narrow, np.float64), want)


# 7. Transformations.


@of_both_modes
def test_transformations(mode):
    """The first query is fully masked."""
    q, k, v = qkv()
    f = partial(attend, mask=Causal(-1), empty="mean")
    want = f(q, k, v)

    def scanned(*given):
        return jax.lax.scan(lambda c, x: (c, f(*x)), 0, given)[1]

    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    ways = f, jax.vmap(f), jax.checkpoint(f), scanned, sharded
    for found in mode(lambda *given: [way(*given) for way in ways])(q, k, v):
        assert same(found, want)


def test_forward_mode_and_second_derivatives():
    q, k, v = (x[:1, :2, :1] for x in qkv())
    q = q[:, :1]
    direction, c = normal(5, *q.shape), normal(6, 1, 1, N, W)

    def loss(q):
        return jnp.sum(c * attend(q, k, v))

    @jax.jit
    def derivatives(q):
        slope = jax.jvp(loss, (q,), (direction,))[1]
        return slope, jax.grad(loss)(q), jax.hessian(loss)(q), jax.jacrev(jax.grad(loss))(q)

    slope, gradient, *second = map(np.asarray, derivatives(q))
    assert same(slope, np.sum(gradient * direction))
    hessian, twice = (x.reshape(H, H) for x in second)
    assert hessian.any() and same(hessian, twice) and same(hessian, hessian.T)


# 8. Dropout in eval mode.


def test_eval_mode_is_bit_equal_to_no_dropout():
    q, k, v = qkv()
    assert bit_equal([attend(q, k, v, dropout=Dropout(0.0, jax.random.key(0)))], [attend(q, k, v)])
    x = normal(0, B, T, 6).astype(jnp.float32)
    with_it, without = (
        MultiHeadAttention(6, 4, 9, rate, 2, rngs=nnx.Rngs(0)) for rate in (0.5, 0.0)
    )
    with_it.eval()
    assert bit_equal([with_it(x)], [without(x)])


# 9. Matmul precision.


def dots(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn.params["precision"]
        for inner in jaxprs_in_params(eqn.params):
            yield from dots(inner)


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_the_callers_precision_reaches_every_dot(precision):
    q, k, v = qkv()
    layer = MultiHeadAttention(6, 4, 9, 0.0, 2, rngs=nnx.Rngs(0))

    def both(q, k, v, x):
        return jnp.sum(attend(q, k, v)) + jnp.sum(layer(x)).astype(q.dtype)

    x = normal(0, B, T, 6).astype(jnp.float32)
    with jax.default_matmul_precision(precision):
        jaxpr = jax.make_jaxpr(jax.grad(both, (0, 1, 2, 3)))(q, k, v, x).jaxpr
    found = list(dots(jaxpr))
    wanted = jax.lax.Precision(precision)
    assert len(found) > 10 and all(p in (wanted, (wanted, wanted)) for p in found)


INT32_MAX = {"float32": 2.0**36, "bfloat16": 2.0**36, "float64": 2.0**64}  # the logits, about
ENDS = {"no score": None, "a product": ScoreFn(lambda x, b, n, q, k: x * 0.37)}


@pytest.mark.nightly(but=[f"{dtype}-a product-reference" for dtype in INT32_MAX])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("score", ENDS)
@pytest.mark.parametrize("dtype", INT32_MAX)
def test_huge_logits_are_finite_and_the_same_under_jit(dtype, score, backend):
    """XLA rounds `scale * q.k` once less where it subtracts the maximum in the same step."""
    with jax.enable_x64(True):
        draw = np.random.RandomState(15).standard_normal
        q, k = (jnp.asarray(draw((2, 7, 2, 8)) * INT32_MAX[dtype] ** 0.5, dtype) for _ in range(2))
        v = jnp.asarray(draw((2, 7, 2, 8)), dtype)

        def far(q, k, v):
            rules = {"mask": CAUSAL, "score": ENDS[score], "scale": 0.37}
            return (attend(q, k, v, **rules, backend=backend),)

        def gradients(q, k, v):
            return jax.grad(lambda *x: far(*x)[0].sum(), (0, 1, 2))(q, k, v)

        for run in (far, gradients):
            for got, want in zip(jax.jit(run)(q, k, v), run(q, k, v), strict=True):
                assert np.isfinite(np.asarray(got, "float64")).all()
                assert judge.allclose(np.asarray(got), np.asarray(want))


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from flax_attn import CAUSAL, attend
jax.config.update("jax_enable_x64", True)
for dtype, size in (("float32", 2.0**36), ("bfloat16", 2.0**36), ("float64", 2.0**64)):
    draw = np.random.default_rng(15).normal
    qkv = [jnp.asarray(draw(size=(2, 7, 2, 8)) * x, dtype) for x in (size**0.5, size**0.5, 1)]
    run = lambda *qkv: attend(*qkv, mask=CAUSAL, scale=0.37, backend="reference")
    got, want = (np.asarray(f(*qkv), "float64") for f in (jax.jit(run), run))
    assert np.isfinite(got).all() and (got == want).all(), dtype
"""


def test_huge_logits_in_programs_compiled_as_users_do():
    """Without the flags by which tests compile faster, under which XLA fuses less."""
    flags = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {k: v for k, v in os.environ.items() if k not in flags}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_largest_score_has_a_gradient_however_it_is_rounded():
    """In a program that computes it twice it may exceed its row's maximum by a last place."""
    score = Alibi(jnp.ones(2) / 3, "end") >> ScoreFn(lambda x, b, n, q, k: x * 0.37)
    x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 9, 2, 3)), "float32")

    def gradient(x, backend):
        run = lambda x: jnp.sin(attend(x, x, x, mask=CAUSAL, score=score, backend=backend)).sum()  # noqa: E731
        return jax.grad(lambda x: (jax.grad(run)(x) ** 2).sum())(x)

    want = gradient(x, "reference")
    for backend in ("reference", "blockwise"):
        got = jax.jit(gradient, static_argnums=1)(x, backend)
        assert judge.allclose(np.asarray(got), np.asarray(want))
