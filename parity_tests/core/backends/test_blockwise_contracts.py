"""Blockwise attention with functions that close over arrays, transformations and memory."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from flax_attn import (
    CAUSAL,
    Alibi,
    Chunked,
    Dropout,
    Lengths,
    MaskFn,
    ScoreFn,
    Segments,
    Softcap,
    Window,
    attend,
    explain,
    reference,
    taps,
)
from flax_attn.backends import blockwise
from flax_attn.parity import judge
from flax_attn.rules import Rules, sizes_of
from parity_tests.core.attend.test_contracts import dots
from parity_tests.core.backends.flash import check_same, normal, outcome, traced
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import of_both_modes, with_nightly

B, T, S, N, K, H, h = 2, 11, 13, 6, 3, 4, 5
WALKS = {"loops": {"unrolled": False}, "unrolled": {"unrolled": True}, "batched": {"batched": True}}


def drawn(seed, *shape):
    return np.random.RandomState(seed).rand(*shape)


def arrays(T, S, N, K):
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, h)


def closing_over(table, gain, backend):
    """A loss whose mask and score close over arrays, traced or not."""

    def loss(q, k, v):
        o, lse = attend(
            q,
            k,
            v,
            mask=MaskFn(lambda b, n, q, k: table[q, k]),
            score=ScoreFn(lambda x, b, n, q, k: x * gain[n]),
            backend=backend,
            return_lse=True,
        )
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    return loss


WRAPS = {
    "grad": lambda f: jax.grad(f, (0, 1, 2)),
    "jit of grad": lambda f: jax.jit(jax.grad(f, (0, 1, 2))),
    "grad of jit": lambda f: jax.grad(jax.jit(f), (0, 1, 2)),
    "remat": lambda f: jax.grad(jax.checkpoint(f), (0, 1, 2)),
    "scan": lambda f: jax.grad(
        lambda *xs: jax.lax.scan(lambda c, _: (c + f(*xs), None), 0.0, None, length=2)[0], (0, 1, 2)
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("wrap", with_nightly(WRAPS, commit=3))
def test_functions_may_close_over_arrays(wrap):
    """Over arrays of any trace, differentiated ones too."""
    x = arrays(T, S, N, K), jnp.asarray(drawn(5, T, S) < 0.6), normal(6, N)
    by = {}
    for backend in ("reference", "blockwise"):

        def loss(arrays, gain, table, backend=backend):
            return closing_over(table, gain, backend)(*arrays)

        def whole(table, arrays, gain, loss=loss):
            return WRAPS[wrap](lambda q, k, gain: loss((q, k, arrays[2]), gain, table))(
                arrays[0], arrays[1], gain
            )

        by[backend] = whole(x[1], x[0], x[2])
    for got, want in zip(by["blockwise"], by["reference"], strict=True):
        assert judge.same_function(np.asarray(got), np.asarray(want)).ok


@pytest.mark.nightly
def test_one_function_over_other_arrays():
    """A function that is handed out again after what it closes over has changed."""
    q, k, v = arrays(T, S, N, K)
    table = [jnp.asarray(drawn(5, T, S) < 0.6)]
    mask = MaskFn(lambda b, n, q, k: table[0][q, k])
    outs = []
    for _ in range(2):
        outs.append(attend(q, k, v, mask=mask, backend="blockwise"))
        want = attend(q, k, v, mask=table[0], backend="reference")
        assert judge.same_function(np.asarray(outs[-1]), np.asarray(want)).ok
        table[0] = ~table[0]
    assert (outs[0] != outs[1]).any()


@pytest.mark.nightly
@of_both_modes
def test_under_vmap(mode):
    q, k, v = arrays(T, S, N, K)
    lengths = jnp.asarray([9, 4])

    def loss(q, k, v, length, backend):
        mask = CAUSAL & Lengths(length)
        return jnp.sum(jnp.sin(attend(q, k, v, mask=mask, backend=backend)))

    want, got = (
        mode(jax.vmap(jax.grad(partial(loss, backend=name), (0, 1, 2))))(q, k, v, lengths)
        for name in ("reference", "blockwise")
    )
    for a, b in zip(got, want, strict=True):
        assert judge.same_function(np.asarray(a), np.asarray(b)).ok


@pytest.mark.nightly
@of_both_modes
def test_under_shard_map(mode):
    q, k, v = arrays(T, S, N, K)
    slopes = normal(7, N)
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    def loss(q, k, v, slopes, backend):
        o = attend(q, k, v, mask=CAUSAL, score=Alibi(slopes), backend=backend)
        return jax.lax.psum(jnp.sum(jnp.sin(o)), "b")

    want, got = (
        mode(
            jax.grad(
                jax.shard_map(
                    partial(loss, backend=name),
                    mesh=mesh,
                    in_specs=(P("b"), P("b"), P("b"), P()),
                    out_specs=P(),
                ),
                (0, 1, 2, 3),
            )
        )(q, k, v, slopes)
        for name in ("reference", "blockwise")
    )
    for a, b in zip(got, want, strict=True):
        assert judge.same_function(np.asarray(a), np.asarray(b)).ok


def sizes_in(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (x.aval.size for x in (*eqn.invars, *eqn.outvars) if hasattr(x.aval, "size"))
        for inner in jaxprs_in_params(eqn.params):
            yield from sizes_in(inner)


NARROW = {
    "documents": CAUSAL & Segments(q_ids=np.arange(130) // 9, kv_ids=np.arange(140) // 8),
    "causal": CAUSAL,
    "window": Window(2, 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mask", "walk"),
    with_nightly(product(NARROW, WALKS), commit=[*zip(NARROW, WALKS, strict=True)]),
)
def test_no_array_of_both_lengths(mask, walk):
    T, S, N, K = 130, 140, 4, 2
    rules = Rules(NARROW[mask], Softcap(2.0) >> Alibi(normal(1, N)), sinks=normal(2, N))
    rules = Rules(rules.mask, rules.score, None, rules.sinks, Dropout(0.5, jax.random.key(0)))
    q, k, v = arrays(T, S, N, K)
    how = {"rows": 16, "cols": 16, **WALKS[walk]}
    jaxpr = jax.make_jaxpr(lambda *x: traced(blockwise.forward, *x, rules, **how))(q, k, v)
    assert max(sizes_in(jaxpr.jaxpr)) < T * S
    plain = jax.make_jaxpr(lambda *x: traced(reference.forward, *x, rules))(q, k, v)
    assert max(sizes_in(plain.jaxpr)) >= T * S


def test_auto_chooses_blockwise_for_long_sequences():
    small, long = (jax.ShapeDtypeStruct((1, n, 2, 4), jnp.float32) for n in (127, 128))

    def chosen(x):
        found = []
        jax.eval_shape(lambda x: found.append(explain(x, x, x).chosen), x)
        return found[0]

    assert chosen(small) == "reference" and chosen(long) == "blockwise"
    with taps.listen():
        assert chosen(long) == "reference"


def test_the_precision_asked_for_in_the_forward_pass_holds_in_the_backward_pass():

    def gradients(*x):
        with jax.default_matmul_precision("highest"):
            o, back = jax.vjp(lambda *x: attend(*x, backend="blockwise"), *x)
        return back(o)

    found = list(dots(jax.make_jaxpr(gradients)(*arrays(T, S, N, K)).jaxpr))
    highest = jax.lax.Precision.HIGHEST
    assert len(found) >= 7 and set(found) == {(highest, highest)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "window", with_nightly([Window(2, 1), Chunked(3), Window(0, 0, "end")], commit=3)
)
def test_narrow_masks_read_a_band_of_keys(window):
    """One piece of keys for each block of queries, not a loop over blocks of keys."""
    q, k, v = arrays(40, 44, 6, 3)
    how = {"rows": 8, "cols": 4, "unrolled": False}
    got, want = (
        outcome(forward, q, k, v, Rules(window), **more)
        for forward, more in ((blockwise.forward, how), (reference.forward, {}))
    )
    check_same(got, want)
    rules = Rules(window).bind(sizes_of(q, k), H)
    jaxpr = jax.make_jaxpr(lambda *x: blockwise.forward(*x, rules, **how))(q, k, v)
    assert "while" not in str(jaxpr) and "scan" in str(jaxpr)
