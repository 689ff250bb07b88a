"""Masks, scores and dropout at given positions of queries and keys, against numpy."""

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Additive,
    Alibi,
    Dropout,
    DropoutMask,
    Mask,
    Rules,
    Score,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    attend,
    frozen,
)
from flax_attn.parity import judge
from flax_attn.places import Positions
from parity_tests.core.attend.at_positions import (
    SIZES,
    B,
    H,
    K,
    N,
    S,
    T,
    drawn,
    expected,
    poisoned,
    where,
)
from parity_tests.core.drawing import float64 as float64
from parity_tests.requests import masks as random_masks
from parity_tests.requests.backends import planned, quickly
from parity_tests.requests.masks import Node, Random
from parity_tests.tables import with_nightly

PLANS = {
    "reference": None,
    "loops": {"unrolled": False, "rows": 4, "cols": 3},
    "unrolled": {"unrolled": True, "rows": 5, "cols": 4},
    "batched": {"unrolled": False, "batched": True, "rows": 1, "cols": 5},
}
KINDS = (
    *(random_masks.causal, random_masks.window, random_masks.chunked, random_masks.prefix),
    *(random_masks.lengths, random_masks.function, random_masks.full),
)
SEEDS = (1, 4, 7, 9, 10, 11, 24, 26)  # whose masks hide some and show some
COUNT_SLOTS = ('"end"', "table")


def tree(seed: int) -> Node:
    """A random mask, three deep, of those that go by position."""
    drawn = Random(seed)
    while True:
        node = random_masks._tree(drawn, SIZES, KINDS, 3)
        if not any(word in node.words for word in COUNT_SLOTS):
            return node


def compiled(plan: dict[str, Any] | None, rules: Any) -> Any:
    """`(floats, data, at, do, dlse) -> results by name`, by the rules that `rules(data)` names."""

    def call(floats, data, at):
        arrays, how = [floats[x] for x in "qkv"], {**rules(data), "sinks": floats.get("sinks")}
        if plan is not None:
            return planned(*arrays, Rules(**how, positions=Positions(at.q, at.k)), plan)
        how |= {"q_positions": at.q, "kv_positions": at.k, "backend": "reference"}
        return attend(*arrays, **how, return_lse=True)

    def run(floats, data, at, do, dlse):
        (o, lse), back = jax.vjp(lambda floats: call(floats, data, at), floats)
        return {"o": o, "lse": lse, **back((do, dlse))[0]}

    return jax.jit(run, compiler_options=quickly())


def check(got: dict[str, Any], want: dict[str, Any]) -> None:
    grads = [want[name] for name in "qkv"]
    for name, x in got.items():
        scale = judge.gradient_scale(grads, want[name]) if name in (*"qkv", "sinks") else None
        verdict = judge.same_function(np.asarray(x), want[name], scale, zero=True)
        assert verdict.ok, (name, verdict)


@pytest.fixture(autouse=True)
def little_effort():
    """In compiling, which takes most of the time here."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


# Masks.


@pytest.mark.nightly
@pytest.mark.parametrize("seed", with_nightly(SEEDS, commit=[10, 24]))
def test_masks_at_positions(seed):
    node, lead = tree(seed), ((B,), ())[seed % 3 == 2]
    plan = list(PLANS.values())[seed % len(PLANS)]
    run = compiled(plan, lambda data: {"mask": node.build(data)})
    for i in range(10):
        at, x, data = where(100 * seed + i, lead), drawn(seed), node.draw(Random([seed, i]))
        want = expected(x, at.seen(node.seen(data, at.at)))
        check(run(poisoned(x, at).floats, data, at, x.do, x.dlse), want)


def test_the_drawn_masks_hide_some_keys_and_show_some():
    shares = []
    for seed in SEEDS:
        at, node = where(100 * seed), tree(seed)
        seen = at.seen(node.seen(node.draw(Random([seed, 0])), at.at))
        shares.append(seen.sum() / at.seen(np.True_).sum())
    assert all(0.1 < share < 0.9 for share in shares), shares


@frozen
class Links(Mask):
    """A user's class whose array lies along queries and keys: it is asked by slot."""

    table: Any

    AXES: ClassVar = {"table": "bqk"}

    def __call__(self, b, n, q, k):
        return jnp.asarray(self.table)[b, q, k]


@frozen
class Even(Mask):
    """A user's class that is asked by position, of an array that all share."""

    table: Any

    def __call__(self, b, n, q, k):
        return jnp.asarray(self.table)[(q + k) % 7]


@pytest.mark.nightly(but=["reference"])
@pytest.mark.parametrize("plan", ["reference", "batched"])
def test_arrays_go_by_slot_beside_masks_that_go_by_position(plan):
    def rules(data):
        ids, dense, links, even, keep = data
        mask = (CAUSAL & ~Segments(q_ids=ids[:, :T], kv_ids=ids)) | (dense & Links(links))
        return {"mask": mask & Even(even), "dropout": DropoutMask(keep, 0.5)}

    r, run = Random(7), compiled(PLANS[plan], rules)
    for i in range(4):
        at, x = where(900 + i), drawn(2 * i + 1)
        ids = np.sort(r.randint(0, 4, (B, S)), axis=1)
        dense, links, keep = (r.rand(B, *n, T, S) < 0.6 for n in ((N,), (), (1,)))
        even = r.rand(7) < 0.8
        _, _, q, k = at.at
        apart = (ids[:, :T, None] != ids[:, None])[:, None]
        seen = ((k <= q) & apart) | (dense & links[:, None])
        want = expected(x, at.seen(seen & even[(q + k) % 7]), np.broadcast_to(keep, (B, N, T, S)))
        check(run(poisoned(x, at).floats, (ids, dense, links, even, keep), at, x.do, x.dlse), want)


# Scores, and their parameters.


def bend(params, x, b, n, q, k):
    """Of the positions 0 to `FURTHEST`, where alone it is finite."""
    return x * params[n] + jnp.log(1.0 + q) / (2.0 + k) + b  # attend lets dtypes mix in here


@frozen
class Warmth(Score):
    """A user's score of the query's position."""

    by_head: Any

    def __call__(self, logits, b, n, q, k):
        return logits * jnp.sqrt(jnp.asarray(q, logits.dtype) + self.by_head[n])


def score_of(p):
    score = Softcap(p["cap"]) >> Alibi(p["slopes"]) >> ScoreFn(bend, p["gain"])
    score = score >> Additive(p["bias"]) >> Warmth(p["warmth"])
    return score >> T5Bias(p["table"], buckets=8, max_distance=12)


def plainly(floats, seen, places):
    """Output and lse written out, so that `jax.vjp` gives the gradients of all parameters."""
    p, n, (b, q, k) = floats, SIZES.grid()[1], places
    keys, values = (jnp.repeat(p[x], N // K, axis=2) for x in "kv")
    x = jnp.einsum("btnh,bsnh->bnts", p["q"], keys) * H**-0.5
    x = p["cap"] * jnp.tanh(x / p["cap"])
    x = x - p["slopes"].reshape(1, N, 1, 1) * abs(q - k)
    q, k = jnp.maximum(q, 0), jnp.maximum(k, 0)
    x = x * p["gain"].reshape(1, N, 1, 1) + jnp.log(1.0 + q) / (2.0 + k) + b + p["bias"][None]
    x = x * jnp.sqrt(q + p["warmth"].reshape(1, N, 1, 1))
    distance = k - q
    far = jnp.minimum(2 + (jnp.log(jnp.maximum(abs(distance), 1) / 2) / np.log(6) * 2), 3)
    near = jnp.where(abs(distance) < 2, abs(distance), jnp.floor(far))
    x = x + p["table"][(near + jnp.where(distance > 0, 4.0, 0.0)).astype(int), n]
    dead = ~seen.any(-1)
    x = jnp.where(seen, x, jnp.where(dead[..., None], 0, -jnp.inf))
    lse = jnp.where(dead, -jnp.inf, jax.nn.logsumexp(x, axis=-1))
    w = jnp.where(dead[..., None], 0, jax.nn.softmax(x, axis=-1))
    return jnp.einsum("bnts,bsnh->btnh", w, values), jnp.swapaxes(lse, 1, 2)


@jax.jit
def differentiated(floats, seen, places, do, dlse):
    """Output, lse and gradients by name; no cotangent of an lse of -inf."""
    (o, lse), back = jax.vjp(lambda floats: plainly(floats, seen, places), floats)
    return {"o": o, "lse": lse, **back((do, jnp.where(jnp.isneginf(lse), 0, dlse)))[0]}


def parameters(seed):
    r = Random(seed)
    shapes = {"slopes": (N,), "gain": (N,), "bias": (N, T, S), "table": (8, N)}
    found = {name: r.standard_normal(shape) for name, shape in shapes.items()}
    return {**found, "cap": np.asarray(2.0), "warmth": 1 + r.rand(N)}


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["reference", "loops"])
def test_scores_at_positions(plan):
    def call(floats, at):
        how = {"mask": CAUSAL, "score": score_of(floats)}
        if PLANS[plan] is None:
            at = {"q_positions": at.q, "kv_positions": at.k, "backend": plan, "return_lse": True}
            return attend(*(floats[x] for x in "qkv"), **how, **at)
        rules = Rules(**how, positions=Positions(at.q, at.k))
        return planned(*(floats[x] for x in "qkv"), rules, PLANS[plan])

    @partial(jax.jit, compiler_options=quickly())
    def run(floats, at, do, dlse):
        found, back = jax.vjp(lambda floats: call(floats, at), floats)
        return *found, back((do, dlse))[0]

    for seed in (3, 0):
        at, x = where(seed), drawn(seed)
        floats = {**x.floats, **parameters(seed)}
        floats.pop("sinks", None)
        b, _, q, k = at.at
        places = [np.asarray(x, float) for x in (b, q, k)]
        want = differentiated(floats, at.seen(k <= q), places, x.do, x.dlse)
        dlse = np.where(np.isneginf(want["lse"]), 0, x.dlse)
        clean = {**floats, **poisoned(x._replace(floats=x.floats), at).floats}
        o, lse, grads = run({name: clean[name] for name in floats}, at, x.do, dlse)
        for name, got in {"o": o, "lse": lse, **grads}.items():
            scale = None if name in ("o", "lse") else judge.gradient_scale([*want.values()], got)
            verdict = judge.same_function(np.asarray(got), np.asarray(want[name]), scale, zero=True)
            assert verdict.ok, (name, verdict)


# Dropout.


@pytest.mark.nightly(but=["reference-True"])
@pytest.mark.parametrize("sinks", with_nightly([True, False], commit=[True]))
@pytest.mark.parametrize("plan", ["reference", "loops"])
def test_dropout_of_a_part_at_positions_equals_that_of_the_whole(plan, sinks):
    key = jax.random.key(5)
    whole = np.asarray(Dropout(0.5, key).keep(*np.ogrid[:B, :N, :30, :30]))
    run = compiled(PLANS[plan], lambda key: {"mask": CAUSAL, "dropout": Dropout(0.5, key)})
    for i in range(3):
        at, x = where(40 + i), drawn(2 * i + sinks)
        keep = np.broadcast_to(whole[at.at], (B, N, T, S))
        _, _, q, k = at.at
        want = expected(x, at.seen(k <= q), keep)
        check(run(poisoned(x, at).floats, key, at, x.do, x.dlse), want)
