"""The laws of attention in blocks: any plan gives the plain formula, results and gradients."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import reference, taps
from flax_attn._internal.types import Sizes
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise import block_loops, online_softmax
from flax_attn.backends.blockwise.block import Block
from flax_attn.backends.blockwise.plan import make_plan
from flax_attn.dropout import DropoutMask
from flax_attn.masks import CAUSAL
from flax_attn.parity import judge
from flax_attn.rules import Rules, sizes_of
from flax_attn.scores import Additive

from .law_cases import B, H, K, N, S, T, case, check, eager64, normal, one_program, outcome

LOOPS = {"rows": 2, "cols": 3, "unrolled": False}  # small sizes are written out otherwise
WRITTEN = {"rows": 2, "cols": 3, "unrolled": True}
BATCHED = {"rows": 2, "cols": 2, "batched": True, "unrolled": False}


# Whole attentions. Those that tell most come first.


@eager64
def test_a_table_of_everything_in_loops():
    check(blockwise.forward, "table", rows=2, cols=2, unrolled=False)


@eager64
def test_lengths_and_dropout_written_out():
    check(blockwise.forward, "lengths", **WRITTEN)


@eager64
def test_numbers_of_a_score_for_all_heads_at_once():
    check(blockwise.forward, "causal", **BATCHED)
    check(blockwise.forward, "padding", **BATCHED)


@eager64
def test_a_window_in_a_band():
    check(blockwise.forward, "window", rows=1, cols=2, unrolled=False)
    check(blockwise.forward, "chunks", rows=2, cols=2, unrolled=False)


@eager64
def test_rows_that_are_hidden_by_huge_numbers():
    check(blockwise.forward, "huge", **LOOPS)
    check(blockwise.forward, "lowest", **WRITTEN)


@eager64
def test_rows_masked_by_a_bias_with_a_sink():
    check(blockwise.forward, "masked out by a bias", rows=3, cols=5, batched=True)


@eager64
def test_sinks_of_heads_that_share_keys():
    check(blockwise.forward, "documents", batched=True, **LOOPS)


@eager64
def test_all_keys_masked_gives_zeros():
    check(blockwise.forward, "blind", rows=3, cols=5)
    check(blockwise.forward, "table alone", rows=3, cols=2, unrolled=True)


@eager64
def test_offsets_of_each_entry():
    check(blockwise.forward, "own offsets", **LOOPS)


# The parts of the weights.


@eager64
def test_the_parts_of_the_weights_are_those_of_the_plain_formula():
    for name in ("table", "blind", "padding"):
        (q, k, v, rules), _, want = case(name)
        o, stats = jax.jit(partial(blockwise.attention, rows=3, cols=5))(q, k, v, rules)
        assert o.dtype == jnp.float64 and stats.m.dtype == stats.l.dtype == jnp.float64
        _, known = jax.jit(reference.attention)(q, k, v, rules)
        dead = np.asarray(known.l) == 0
        assert np.array_equal(np.asarray(stats.l) == 0, dead)
        assert np.isfinite(stats.m).all() and not np.asarray(stats.m)[dead].any()
        assert judge.same_function(stats.lse, want[1]).ok
        top = np.asarray(known.l) * np.exp(np.asarray(known.m) - np.asarray(stats.m))
        assert judge.same_function(stats.l, top).ok


@eager64
def test_nothing_depends_on_the_largest_score():
    (q, k, v, rules), _, _ = case("documents")

    def parts(q):
        return blockwise.attention(q, k, v, rules, rows=3, cols=5)[1]

    _, back = jax.vjp(parts, q)
    still = back(reference.Stats(jnp.ones((B, N, T)), jnp.zeros((B, N, T))))[0]
    assert not np.asarray(still).any()
    moved = back(reference.Stats(jnp.zeros((B, N, T)), jnp.ones((B, N, T))))[0]
    assert np.asarray(moved).any()


def test_the_parts_before_the_sinks_are_kept():
    (q, k, v, rules), _, want = case("documents")
    with jax.enable_x64(True):
        made = make_plan(sizes_of(q, k), K, rules, "cpu", rows=3, cols=5)
        o, m, l = jax.jit(partial(blockwise.forward_pass, made))(q, k, v, rules)
        assert o.dtype == m.dtype == l.dtype == jnp.float64
        bare = Rules(rules.mask, rules.score, rules.scale)
        alone, known = jax.jit(reference.attention)(q, k, v, bare)
        got = reference.Stats(jnp.where(l == 0, 0.0, m), l)
        assert judge.same_function(got.lse, known.lse).ok
        assert judge.same_function(o, alone).ok
        less, stats = blockwise.with_sinks(rules.sinks, o, m, l)
        assert judge.same_function(less, want[0]).ok
        assert judge.same_function(stats.lse, want[1]).ok
        same, stats = blockwise.with_sinks(None, o, m, l)
        assert same is o and judge.exact(stats.l, l).ok


# Dtypes.


def narrow_scale(wants, i):
    """For the error of result i in narrow dtypes: that of output and lse is their own.

    A gradient that is one number is a sum of thousands that nearly cancel, in another order on each
    processor: as the harness does in narrow dtypes, all gradients are its scale.
    """
    if i < 2:
        return None
    gradients, own = wants[2:], wants[i]
    whole = own.size == 1
    return judge.whole_gradient(gradients) if whole else judge.gradient_scale(gradients, own)


@eager64
def test_narrow_inputs_are_summed_wide():
    exact = case("causal")
    for dtype in ("bfloat16", "float32"):
        (q, k, v, rules), cotangents, want = case("causal", dtype)
        made = make_plan(sizes_of(q, k), K, rules, "cpu", **LOOPS)
        o, m, l = jax.eval_shape(partial(blockwise.forward_pass, made), q, k, v, rules)
        assert o.dtype == m.dtype == l.dtype == jnp.float32
        got = outcome(blockwise.forward, (q, k, v, rules), cotangents, **LOOPS)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            scale = narrow_scale(exact.want, i)
            assert a.dtype == b.dtype, i
            assert judge.no_worse(a, b, exact.want[i], dtype, scale, zero=True).ok, i


@eager64
def test_float32_parameters_of_a_wide_attention_keep_their_dtype():
    bias, sinks = jnp.asarray(normal(1, N, T, S), "float32"), jnp.asarray(normal(2, N), "float32")
    (q, k, v, _), cotangents, _ = case("plain")
    rules = Rules(CAUSAL, Additive(bias), jnp.asarray(0.7, "float32"), sinks)
    given = q, k, v, rules.bind(Sizes((B,), N, T, S), H)
    got, want = (
        outcome(forward, given, cotangents)
        for forward in (partial(blockwise.forward, **LOOPS), reference.forward)
    )
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.dtype == b.dtype, i
        scale = judge.gradient_scale(want[2:], b) if i > 1 else None
        assert judge.no_worse(a, b, b, str(a.dtype), scale, zero=True).ok, i


# What a request without numbers gives, and what is refused or passed over.


def test_no_keys_no_queries_no_width():
    for shapes in (
        ((2, 0, 4, 3), (2, 5, 2, 3), (2, 5, 2, 2)),
        ((2, 3, 4, 3), (2, 0, 2, 3), (2, 0, 2, 2)),
        ((2, 3, 4, 3), (2, 5, 2, 3), (2, 5, 2, 0)),
        ((0, 3, 4, 3), (0, 5, 2, 3), (0, 5, 2, 2)),
        ((2, 3, 4, 0), (2, 5, 2, 0), (2, 5, 2, 2)),
    ):
        q, k, v = (np.ones(shape) for shape in shapes)
        rules = Rules().bind(Sizes((shapes[0][0],), 4, shapes[0][1], shapes[1][1]), 1)
        o, stats = jax.jit(blockwise.attention)(q, k, v, rules)
        assert o.shape == (*shapes[0][:3], shapes[2][3])
        assert stats.l.shape == (shapes[0][0], 4, shapes[0][1])


def test_a_listener_receives_the_dropout_mask():
    keep = np.random.RandomState(0).rand(1, N, 1, S) < 0.5
    (q, k, v, _), _, _ = case("plain", "float32")
    sizes = Sizes((B,), N, T, S)
    rules = Rules(dropout=DropoutMask(keep, 0.5)).bind(sizes, H)
    forward = partial(blockwise.forward, **LOOPS)
    with taps.listen() as heard:
        forward(q, k, v, rules)
        ((name, found),) = heard
        assert name == "keep" and np.array_equal(found, np.broadcast_to(keep, sizes.shape))
        forward(q, k, v, Rules().bind(sizes, H))
    assert len(heard) == 1


def test_one_jitted_program_for_one_plan():
    (q, k, v, rules), _, want = case("causal", "float32")
    traced = jax.make_jaxpr(partial(blockwise.forward, **LOOPS))(q, k, v, rules)
    assert [e.params["name"] for e in traced.eqns if "name" in e.params].count("_attend") == 1
    got = blockwise.forward(q, k, v, rules, **LOOPS)
    for a, b, exact in zip(got, want, case("causal").want, strict=False):
        assert judge.no_worse(a, b, exact, "float32").ok
    made = make_plan(sizes_of(q, k), K, rules, "tpu")
    assert made.sizes == Sizes((B,), N, T, S) and made.batched and made.groups == N // K
    lead = Sizes((3, 1), N, T, S)
    assert make_plan(lead, K, rules, "cpu").sizes == Sizes((3,), N, T, S)


def test_it_runs_inside_a_shard_map():
    """Where arrays vary over devices and others do not, in the carries of loops too."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    q, k, v = normal(0, 1, 2, 2, 3), normal(1, 1, 3, 1, 3), normal(2, 1, 3, 1, 2)
    q, k, v = (jnp.asarray(x, "float32") for x in (q, k, v))
    rules = Rules(CAUSAL, sinks=jnp.asarray([0.3, -1.0]), scale=jnp.asarray(0.5))
    rules = rules.bind(Sizes((1,), 2, 2, 3), 3)
    for how in ({"rows": 1, "cols": 2}, {"rows": 1, "cols": 2, "batched": True}):
        run = partial(blockwise.forward, **how)
        grad = jax.grad(lambda *x, run=run: sum(y.sum() for y in run(*x)), argnums=(0, 1, 2))
        local = jax.shard_map(
            grad, mesh=mesh, in_specs=(P("x"), P(), P(), P()), out_specs=(P("x"), P(), P())
        )
        jax.jit(local).lower(q, k, v, rules)


# The pieces.


def test_heads_that_share_keys_stand_together_and_return():
    x = normal(0, 2, 3, 6, 4)
    for G in (1, 2, 3, 6):
        given = x, x[..., 0].swapaxes(1, 2)
        parts, lines = one_program(lambda x, G=G: block_loops._split_heads(x, 6 // G), given)
        assert parts.shape == (2 * 6 // G, 1, 3, G, 4) and lines.shape == (2 * 6 // G, 1, G, 3)
        for u, g in itertools.product(range(2 * 6 // G), range(G)):
            b, n = divmod(u, 6 // G)
            assert np.array_equal(parts[u, 0, :, g], x[b, :, n * G + g].astype("float32"))
            assert np.array_equal(lines[u, 0, g], x[b, :, n * G + g, 0].astype("float32"))
        heads = np.moveaxis(parts[:, 0], 2, 1).reshape(-1, 1, 3, 4)
        joined = jax.jit(block_loops.join, static_argnums=1)(heads, 2)
        assert np.array_equal(joined, x.astype("float32"))


@eager64
def test_every_key_head_is_walked_once_with_its_own_place():
    """One after the other, in loops side by side, or all at once: with the sum of their carries."""
    q, line = normal(0, 2, 3, 6, 4), normal(1, 2, 6, 3)
    all_rows, want = Block(0, 0, 0, 0, 3, 3, 5), np.moveaxis(q.reshape(2, 3, 2, 3, 4), 1, 3)

    def step(carry, heads, at):
        assert (at.q, at.k, at.G, at.rows, at.cols) == (0, 0, 3, 2, 3)
        assert at.b.dtype == at.n.dtype == jnp.int32
        x, y = (part.rows(all_rows) for part in heads)
        return carry + x.sum(), (at.b, at.n, x.reshape(3, 3, 4), y.reshape(3, 3))

    for how in ({}, {"lanes": 2}, {"lanes": 3}, {"lanes": 4}, {"batched": True}):
        plan = make_plan(Sizes((2,), 6, 3, 5), 2, Rules(), "cpu", rows=2, cols=3, **how)
        walk = jax.jit(partial(block_loops.scan_heads, plan, plan.batched, step))
        total, (b, n, x, y) = walk(jnp.zeros(()), (q, line))
        assert (b.tolist(), n.tolist()) == ([0, 0, 1, 1], [0, 3, 0, 3])
        assert np.array_equal(x, want.reshape(4, 3, 3, 4))
        assert np.array_equal(y, line.reshape(4, 3, 3))
        assert judge.same_function(total, q.sum()).ok


def test_parts_are_taken_from_their_place_and_put_there():
    at = Block(0, 0, 1, 2, 2, 2, 3)
    x = normal(0, 2, 5, 4, 3).astype("float32")  # B T N H
    heads = block_loops.Heads(jnp.asarray(x), 1, 2, 2)
    assert np.array_equal(heads.rows(at), x[1, 1:3, 2:].swapaxes(0, 1).reshape(4, 3))
    assert np.array_equal(heads.cols(at), x[1, 2:5, 2])
    lines = block_loops.Heads(jnp.asarray(x[..., 0].swapaxes(1, 2)), 1, 2, 2)  # B N T
    assert np.array_equal(lines.rows(at), x[1, 1:3, 2:, 0].T.reshape(4))
    more, want = normal(2, 2, 3).astype("float32"), np.ones((2, 6), "float32")
    sums = online_softmax._accumulate_kv(jnp.ones((2, 6)), jnp.asarray(more), at)
    want[:, 2:5] += more
    assert np.array_equal(sums, want)


def test_the_scale_goes_where_it_rounds_nothing_away():
    at, rules = Block(0, 0, 0, 0, 2, 2, 3), Rules(scale=3.0)
    q, k = normal(3, 4, 5), normal(4, 3, 5)
    for dtype in ("float32", "bfloat16"):
        a, b = (jnp.asarray(x, dtype) for x in (q, k))
        x = online_softmax._logits(a, b, rules, at)
        assert x.shape == (2, 2, 3) and x.dtype == jnp.float32
        want = 3 * np.asarray(a, float) @ np.asarray(b, float).T
        plain = 3 * np.asarray(a, "float32") @ np.asarray(b, "float32").T
        assert judge.no_worse(x.reshape(4, 3), plain, want, "float32").ok
