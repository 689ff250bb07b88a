"""Positions in calls of `attend`: laws, batch axes, transformations, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flax_attn import (
    CAUSAL,
    FULL,
    Alibi,
    Causal,
    Chunked,
    Dropout,
    MaskFn,
    Places,
    Rules,
    Softcap,
    Window,
    assume_platform,
    attend,
    attention_weights,
    explain,
)
from flax_attn.backends import cudnn, splash, tokamax
from flax_attn.parity import judge
from flax_attn.places import Positions
from flax_attn.rules import sizes_of
from parity_tests.core.attend.at_positions import B, H, K, N, S, T, Where, drawn, h, where
from parity_tests.core.backends.refusal import refused
from parity_tests.core.drawing import float64 as float64
from parity_tests.requests.masks import Random


def arrays(seed=0):
    return [jnp.asarray(drawn(seed).floats[name]) for name in "qkv"]


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        verdict = judge.same_function(np.asarray(a), np.asarray(b), zero=True)
        assert verdict.ok, verdict


OF_INDEX = {
    "mask": (CAUSAL & ~Window(1, 0)) | Chunked(3) | MaskFn(lambda b, n, q, k: q + n == k),
    "score": Alibi(np.arange(1.0, N + 1)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_indices_as_positions_change_nothing(backend):
    how = {**OF_INDEX, "dropout": Dropout(0.5, jax.random.key(0)), "backend": backend}

    def call(**at):
        return jax.jit(partial(attend, **how, **at, return_lse=True))(*arrays())

    want = call()
    for q, kv in ((np.arange(T), None), (None, jnp.arange(S)), (np.arange(T), [[*range(S)]] * B)):
        q, kv = (None if x is None else np.asarray(x) for x in (q, kv))
        same(call(q_positions=q, kv_positions=kv), want)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_keys_may_change_slots_together_with_their_positions(backend):
    q, k, v = arrays(1)
    at, order = where(8), Random(0).permutation(S)
    back = np.argsort(order)

    @jax.jit
    def run(k, v, kv_positions):
        def call(q, k, v):
            how = {"q_positions": at.q, "kv_positions": kv_positions, "backend": backend}
            return attend(q, k, v, **OF_INDEX, **how)

        o, pull = jax.vjp(call, q, k, v)
        return o, pull(jnp.cos(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape))

    o, (dq, dk, dv) = run(k[:, order], v[:, order], at.k[:, order])
    want, grads = run(k, v, at.k)
    same((o, dq, dk[:, back], dv[:, back]), (want, *grads))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_absent_positions_equal_masked_rows_and_keys(backend):
    q, k, v = arrays()
    sinks = jnp.asarray([0.5, -jnp.inf, 2.0, 0.0])
    none = -jnp.ones((), int)
    for how in ({"q_positions": none}, {"kv_positions": none}):
        for more in ({}, {"sinks": sinks}, {"mask": ~FULL}):
            call = partial(attend, q, k, v, backend=backend, return_lse=True)
            hidden = call(**{"mask": ~FULL, **more})
            same(call(**how, **more), hidden)
            assert not np.asarray(hidden[0]).any()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_the_mean_of_an_empty_row_is_of_the_keys_that_are_present(backend):
    q, k, v = arrays()
    at = where(12)
    v = np.where((at.k >= 0)[:, :, None, None], v, np.nan)
    how = {"q_positions": at.q, "kv_positions": at.k, "mask": Window(1, 0)}
    call = partial(attend, **how, backend=backend)
    o = jax.jit(partial(call, empty="mean"))(q, k, v)
    zero, lse = jax.jit(partial(call, return_lse=True))(q, k, v)
    assert np.isneginf(lse).any() and np.isfinite(lse).any()
    mean = np.stack([np.asarray(v[b, at.k[b] >= 0]).mean(0) for b in range(B)])
    mean = np.repeat(mean, N // K, axis=1)[:, None]  # B 1 N h
    empty = np.isneginf(lse)[..., None] & (at.q >= 0)[:, :, None, None]
    assert empty.any() and (at.q < 0).any()
    same(o, np.where(empty, mean, zero))
    drop = Dropout(0.5, jax.random.key(1))
    keep = np.asarray(drop.keep(*(np.maximum(x, 0) for x in at.at)))
    o = jax.jit(partial(call, dropout=drop, empty="mean"))(q, k, v)
    weight = 2 / (at.k >= 0).sum(1)[:, None, None, None]
    weights = np.where(keep & at.seen(np.True_), weight, 0)
    clean = np.repeat(np.nan_to_num(np.asarray(v)), N // K, axis=2)
    dropped = np.einsum("bnts,bsnh->btnh", weights, clean)
    same(np.where(empty, o, 0), np.where(empty, dropped, 0))


@pytest.mark.nightly
def test_weights_at_positions():
    q, k, _ = arrays()
    at = where(21)
    _, _, q_at, k_at = at.at
    got = attention_weights(q, k, mask=CAUSAL, q_positions=at.q, kv_positions=at.k)
    same(got, attention_weights(q, k, mask=jnp.asarray(at.seen(k_at <= q_at))))


# Under jax's transformations, and what is said of it.


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_positions_may_be_mapped_over_and_carried(backend):
    q, k, v = arrays()
    many = [where(60 + i) for i in range(3)]
    at = Where(*(np.stack(x) for x in zip(*many, strict=True)))
    call = partial(attend, **OF_INDEX, backend=backend)

    def one(q_at, k_at):
        return call(q, k, v, q_positions=q_at, kv_positions=k_at)

    want = [jax.jit(one)(*each) for each in many]
    want = np.stack(want)
    same(jax.jit(jax.vmap(one))(*at), want)
    same(jax.lax.scan(lambda _, each: (None, one(*each)), None, at)[1], want)


@pytest.mark.nightly
def test_positions_of_several_batch_axes():
    q, k, v = (np.stack([x, x[::-1], x + 1]) for x in map(np.asarray, arrays()))  # 3 B
    r = Random(2)
    q_at, k_at = r.randint(-1, 20, (3, 1, T)), np.stack([r.permutation(S) - 1 for _ in range(B)])
    call = jax.jit(partial(attend, **OF_INDEX))
    got = call(q, k, v, q_positions=q_at, kv_positions=k_at)
    flat = (np.reshape(x, (-1, *x.shape[2:])) for x in (q, k, v))
    at = (np.broadcast_to(x, (3, B, n)).reshape(-1, n) for x, n in ((q_at, T), (k_at, S)))
    how = dict(zip(("q_positions", "kv_positions"), at, strict=True))
    same(got.reshape(-1, *got.shape[2:]), call(*flat, **how))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_positions_are_exported(backend):
    b, t = export.symbolic_shape("b, t")
    t = T if backend == "blockwise" else t

    def call(q, k, v, q_at, k_at):
        how = {"q_positions": q_at, "kv_positions": k_at, "backend": backend}
        return attend(q, k, v, mask=CAUSAL & Window(4, 0), **how)

    shapes = [(b, t, N, H), (b, S, K, H), (b, S, K, h), (b, t), (b, S)]
    kinds = [*(jnp.float64,) * 3, *(jnp.int32,) * 2]
    program = export.export(jax.jit(call))(*map(jax.ShapeDtypeStruct, shapes, kinds))
    at = where(1)
    given = (*arrays(), *(x.astype(np.int32) for x in at))
    same(program.call(*given), call(*given))


@pytest.mark.nightly
def test_shards_hand_in_their_own_positions():
    """Beside places, by which the caller says where entries and heads stand."""
    q, k, v = map(np.asarray, arrays())
    at, drop = where(5), Dropout(0.5, jax.random.key(3))
    how = {"mask": CAUSAL & MaskFn(lambda b, n, q, k: (b + n + q + k) % 3 > 0), "dropout": drop}
    call = jax.jit(partial(attend, **how))
    want = call(q, k, v, q_positions=at.q, kv_positions=at.k)
    places = Places(b=np.asarray([1]), n=np.asarray([2, 3]))
    part = q[1:, :, 2:], k[1:, :, 1:], v[1:, :, 1:]
    got = call(*part, places=places, q_positions=at.q[1:], kv_positions=at.k[1:])
    same(got, want[1:, :, 2:])


def test_explain_names_positions():
    long = [jax.ShapeDtypeStruct((1, 1024, 8, 64), jnp.bfloat16)] * 3
    at = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
    with assume_platform("tpu"):
        found = explain(*long, mask=CAUSAL, kv_positions=at)
    said = next(v.refusal for v in found if v.backend == "splash")
    assert said == "takes no q_positions and kv_positions; blockwise and reference do"
    assert found.chosen == "blockwise"


@pytest.mark.parametrize(
    "kernel", [cudnn._of_rules, tokamax.unsupported_reason, splash.unsupported_reason]
)
def test_kernels_of_other_libraries_refuse_positions(kernel):
    q = jax.ShapeDtypeStruct((1, 256, 8, 64), jnp.bfloat16)
    rules = Rules(CAUSAL, positions=Positions(None, np.arange(256))).bind(sizes_of(q, q), 64)
    given = (rules, 256, 256) if kernel is cudnn._of_rules else (q, q, q, rules)
    assert "q_positions and kv_positions" in kernel(*given)


WRONG = {
    "floats": (
        {"q_positions": np.zeros(T)},
        TypeError,
        ["q_positions must hold integers", "float64"],
    ),
    "booleans": ({"kv_positions": np.ones(S, bool)}, TypeError, ["kv_positions", "bool"]),
    "length": ({"q_positions": np.arange(S)}, ValueError, ["q_positions", "(2, 9)", "(13,)"]),
    "batch": ({"kv_positions": np.zeros((3, S), int)}, ValueError, ["kv_positions", "(3, 13)"]),
    "rank": ({"kv_positions": np.zeros((1, B, S), int)}, ValueError, ["must broadcast to (2, 13)"]),
    "far": (
        {"q_positions": np.full(T, 2**31)},
        ValueError,
        ["less than 2147483648", "2147483648."],
    ),
    "causal": (
        {"mask": Causal("end") & Window(2, 0), "q_positions": np.arange(T)},
        ValueError,
        ['Causal(offset="end")', "Causal(), which is CAUSAL"],
    ),
    "window": (
        {"mask": ~Window(2, 0, "end"), "kv_positions": np.arange(S)},
        ValueError,
        ['Window(offset="end")', "Window with offset=0"],
    ),
    "alibi": (
        {"score": Softcap(2.0) >> Alibi(np.ones(N), "end"), "q_positions": np.arange(T)},
        ValueError,
        ['Alibi(offset="end")', "Alibi with offset=0"],
    ),
}


@pytest.mark.nightly(but=["far", "length"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_positions_are_refused(name):
    how, kind, words = WRONG[name]
    with refused(kind, *words):
        attend(*arrays(), **how)
