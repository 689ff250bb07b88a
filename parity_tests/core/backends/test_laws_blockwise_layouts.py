"""The laws of where keys and values lie: few queries read them as they are, eight-bit ones too."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import reference
from flax_attn._internal.types import Sizes
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise.plan import BlockPlan, make_plan
from flax_attn.masks import CAUSAL, MaskFn
from flax_attn.parity import judge
from flax_attn.quantized import Int8
from flax_attn.rules import Rules, sizes_of
from flax_attn.scores import Additive, ScoreFn

from .law_cases import B, H, K, N, S, T, case, check, eager64, h, normal, outcome, same

FEW = {"few": True, "cols": 2}


def turned(x: Any) -> jax.Array:
    return jnp.swapaxes(x, 1, 2)


def planned(call: Any, *given: Any) -> tuple[BlockPlan, tuple[int, ...]]:
    """The plan that a traced request runs with, and the shape of the keys that it is given."""
    heard = []

    def run(plan: BlockPlan, q: Any, k: Any, v: Any, rules: Rules) -> Any:
        heard.append((plan, k.shape))
        return v, reference.Stats(q, q)

    with mock.patch.object(blockwise, "run", run):
        jax.eval_shape(call, *given)
    return heard[0]


# Few queries.


@eager64
def test_few_queries_are_the_plain_formula():
    check(blockwise.forward, "table", **FEW)
    check(blockwise.forward, "lengths", batched=True, **FEW)


@eager64
def test_gradients_return_in_the_layout_of_the_keys():
    """Of keys and values as a cache stores them, B K S H."""
    given, cotangents, want = case("documents")

    def forward(q, k, v, rules):
        plan = make_plan(sizes_of(q, turned(k)), K, rules, "cpu", **FEW)
        o, stats = blockwise.run(plan._replace(layout="heads first"), q, k, v, rules)
        return o, stats.lse

    q, k, v, rules = given
    got = outcome(forward, (q, turned(k), turned(v), rules), cotangents)
    assert got[3].shape == (B, K, S, H) and got[4].shape == (B, K, S, h)
    got[3:5] = (np.swapaxes(x, 1, 2) for x in got[3:5])
    same(got, want, "documents")


def test_only_few_queries_in_loops_of_their_own_read_keys_as_they_lie():
    q, k, v = (jnp.ones(shape) for shape in ((B, T, N, H), (B, K, S, H), (B, K, S, h)))
    rules = Rules().bind(Sizes((B,), N, T, S), H)
    for how, layout in (
        (FEW, "heads first"),
        ({"few": True, "batched": True}, "tokens first"),
        ({"rows": 2, "cols": 2}, "tokens first"),
        ({"rows": 2, "cols": 2, "batched": True}, "tokens first"),
    ):

        def call(q, k, v, how=how):
            return blockwise.attention(q, turned(k), turned(v), rules, **how)

        plan, shape = planned(call, q, k, v)
        assert plan.layout == layout, how
        assert shape == ((B, K, S, H) if layout == "heads first" else (B, S, K, H)), how
        plan, shape = planned(
            lambda q, k, v, how=how: blockwise.attention(q, k, v, rules, **how),
            *(q, turned(k), turned(v)),
        )
        assert plan.layout == "tokens first" and shape == (B, S, K, H), how


def test_a_plan_is_made_for_the_request_the_platform_and_the_options():
    q, k = jnp.ones((B, T, N, H)), jnp.ones((B, S, K, H))
    rules = Rules().bind(Sizes((B,), N, T, S), H)
    for platform in ("cpu", "tpu"):
        with mock.patch.object(blockwise, "platform_of", lambda _, at=platform: at):
            plan, _ = planned(lambda q, k: blockwise.attention(q, k, k, rules), q, k)
            assert plan == make_plan(sizes_of(q, k), K, rules, platform)
            plan, _ = planned(lambda q, k: blockwise.forward(q, k, k, rules, rows=2), q, k)
            assert plan == make_plan(sizes_of(q, k), K, rules, platform, rows=2)


def test_many_queries_never_stand_beside_a_whole_block_of_keys():
    many = Sizes((1,), 2, 64, 64)
    q, k = (jnp.ones((1, 64, 2, 2)) for _ in range(2))
    made = make_plan(many, 2, Rules(), "cpu", rows=8, cols=16)
    program = jax.make_jaxpr(
        lambda q, k, v: blockwise.forward_pass(made, q, k, v, Rules(scale=1.0))
    )
    largest = max(np.prod(x.shape, dtype=int) for x in arrays(program(q, k, k).jaxpr))
    assert largest < 64 * 16


def arrays(jaxpr: Any) -> Any:
    """All that a program computes, programs inside it included."""
    for equation in jaxpr.eqns:
        yield from (x.aval for x in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                yield from arrays(inner.jaxpr)


# Keys and values of eight bits.


@eager64
def test_eight_bits_have_the_outputs_and_gradients_of_what_they_stand_for():
    (q, k, v, rules), cotangents, _ = case("table")
    k, v = (np.where(np.isfinite(x), x, 0) for x in (k, v))
    stores = [jax.jit(Int8().quantize)(np.swapaxes(x, 1, 2)) for x in (k, v)]
    plan = make_plan(sizes_of(q, k), K, rules, "cpu", **FEW)._replace(layout="heads first")

    def forward(q, rules):
        o, stats = blockwise.run(plan, q, *stores, rules)
        return o, stats.lse

    def plain(q, rules):
        return reference.forward(q, *(turned(x.dequantized(q.dtype)) for x in stores), rules)

    got, want = (outcome(call, (q, rules), cotangents) for call in (forward, plain))
    same(got, want, "eight bits")


def test_eight_bits_have_no_gradients_and_narrow_queries_have_narrow_ones():
    """The weights of the backward pass are those of the forward pass: keys in float32 for both."""
    q, k, v, do = (
        jnp.asarray(normal(i, *shape), "float32")
        for i, shape in enumerate(((B, T, N, H), (B, K, S, H), (B, K, S, h), (B, T, N, h)))
    )
    stores = [jax.jit(Int8().quantize)(x) for x in (k, v)]
    rules = Rules(CAUSAL, scale=20.0).bind(Sizes((B,), N, T, S), H)
    plan = make_plan(Sizes((B,), N, T, S), K, rules, "cpu", **FEW)._replace(layout="heads first")
    narrow = q.astype("bfloat16")
    kinds = []

    def backward(q, *stores):
        _, back = jax.vjp(lambda q, k, v: blockwise.run(plan, q, k, v, rules)[0], q, *stores)
        dq, *others = back(do.astype("bfloat16"))
        kinds[:] = [(x.values.dtype, x.values.shape) for x in others]
        return dq, [x.scale for x in others]

    def formula(q, *stores):
        def plain(q):
            return reference.forward(q, *(turned(x.dequantized("float32")) for x in stores), rules)

        _, back = jax.vjp(lambda q: plain(q)[0], q)
        return back(do.astype("bfloat16").astype("float32"))[0]

    dq, scales = jax.jit(backward)(narrow, *stores)
    want = jax.jit(formula)(narrow.astype("float32"), *stores)
    assert dq.dtype == jnp.bfloat16
    assert judge.no_worse(dq, want.astype("bfloat16"), want, "bfloat16").ok
    for store, kind, scale in zip(stores, kinds, scales, strict=True):
        assert kind == (jax.dtypes.float0, store.values.shape)
        assert scale.shape == store.scale.shape and not scale.any()


# What users' functions close over.


@eager64
def test_arrays_that_functions_close_over_have_gradients():
    (q, k, v, _), (do, dlse), _ = case("plain")

    def of(forward, **how):
        def loss(shift, at, gain):
            score = ScoreFn(lambda x, b, n, q, k: x * gain + (shift[n] * (k - q)).astype(x.dtype))
            rules = Rules(MaskFn(lambda b, n, q, k: q + 1 >= k - at[b]), score)
            o, lse = forward(q, k, v, rules.bind(Sizes((B,), N, T, S), H), **how)
            return jnp.vdot(o, do) + jnp.vdot(jnp.where(jnp.isfinite(lse), lse, 0), dlse)

        shift, gain = jnp.linspace(-0.3, 0.4, N), jnp.asarray(1.3)
        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(jax.grad(loss, (0, 2)))(shift, jnp.asarray([0, 1]), gain)

    got, want = of(blockwise.forward, rows=2, cols=2), of(reference.forward)
    for a, b in zip(got, want, strict=True):
        assert judge.same_function(a, b).ok


def test_functions_are_given_scores_that_are_wide():
    """In narrow dtypes too: rounded before the function, a score would lose its digits."""
    heard = []

    def score(x, b, n, q, k):
        heard.append(x.dtype)
        return x

    given, _, _ = case("plain", "bfloat16")
    rules = Rules(score=ScoreFn(score)).bind(Sizes((B,), N, T, S), H)
    jax.eval_shape(lambda *x: blockwise.forward(*x, rules), *given[:3])
    assert set(heard) == {jnp.dtype("float32")}


def test_only_keys_may_vary_over_devices():
    """Inside a shard_map that checks its axes a carry varies over those of all that is added."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    q, k, v = (
        normal(i, *x).astype("float32")
        for i, x in enumerate([(1, 2, 2, 3), (1, 3, 1, 3), (1, 3, 1, 2)])
    )
    bias = jnp.asarray(normal(3, 1, 2, 2, 3), "float32")
    sizes = Sizes((1,), 2, 2, 3)
    for how in ({"rows": 1, "cols": 2}, {"few": True, "cols": 2}):

        def call(q, k, v, bias, how=how):
            score = Additive(bias) >> ScoreFn(lambda x, b, n, q, k: x + 1)
            rules = Rules(CAUSAL, score).bind(sizes, 3)
            return jax.grad(lambda *x: sum(y.sum() for y in blockwise.forward(*x, rules, **how)))(
                q, k, v
            )

        specs = P(), P("x"), P("x"), P("x")
        local = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P())
        jax.jit(local).lower(q, k, v, bias)


# The shift of the softmax.


def test_the_largest_score_has_no_gradient():
    """A caller that adds up parts of the keys differentiates through the statistics."""
    o, m, l = (
        jnp.asarray(normal(i, *x)) for i, x in enumerate(((B, T, N, h), (B, N, T), (B, N, T)))
    )
    for sinks in (None, jnp.asarray([0.5, -1.0, 0.0, 2.0])):
        largest = jax.grad(lambda m, sinks: blockwise.with_sinks(sinks, o, m, l**2)[1].m.sum())
        assert not np.asarray(jax.jit(largest)(m, sinks)).any()
