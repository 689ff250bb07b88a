"""Few queries on many keys: equal to the plain formula, only as far as is seen, without a copy."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Causal, Lengths, Window, attend
from flax_attn._internal.types import wide
from flax_attn.backends import blockwise
from flax_attn.backends.blockwise import decode
from flax_attn.backends.blockwise.plan import make_plan
from flax_attn.backends.hoist import hoist
from flax_attn.parity import judge
from flax_attn.rules import Rules, sizes_of
from parity_tests.core.backends import law_cases
from parity_tests.core.backends.law_cases import eager64, normal
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

NEVER, ALWAYS = 2.0, 0.0  # the share of the keys from which on they are one block


def as_stored(q, k, v, rules, **how):
    """`blockwise.forward` on keys and values that lie as a cache stores them."""
    plan = make_plan(sizes_of(q, k), k.shape[-2], rules, "cpu", **how)._replace(
        layout="heads first"
    )
    rules = hoist(rules, wide(q.dtype), frozenset())
    o, stats = blockwise.run(plan, q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), rules)
    return o, stats.lse


WAYS = {
    "block by block": (blockwise.forward, NEVER),
    "as stored": (as_stored, NEVER),
    "as one block": (as_stored, ALWAYS),
    "all entries at once": (blockwise.forward, NEVER),
}


AT_ONCE = [
    ("table", "block by block"),
    ("padding", "as one block"),
    ("documents", "all entries at once"),
    ("lengths", "as stored"),
    ("huge", "all entries at once"),
]


@pytest.mark.parametrize(
    ("name", "way"), with_nightly(itertools.product(law_cases.RULES, WAYS), commit=AT_ONCE)
)
def test_every_rule_has_the_plain_formulas_outputs_and_gradients(name, way, monkeypatch):
    """Blocks of two on five keys, the last of which reaches back; NaN where nobody looks."""
    forward, most = WAYS[way]
    monkeypatch.setattr(decode, "MIN_KEY_SHARE", most)
    how = {"few": True, "cols": 2, "batched": way == "all entries at once"}
    eager64(lambda: law_cases.check(forward, name, **how))()


# Whole sizes, by numpy.


def by_numpy(q, k, v, seen):
    """Output and lse; `seen` broadcasts to *B N T S."""
    k, v = (np.repeat(x, q.shape[-2] // k.shape[-2], axis=-2) for x in (k, v))
    x = np.einsum("...tnh,...snh->...nts", q, k) / math.sqrt(q.shape[-1])
    x = np.where(seen, x, -np.inf)
    m = x.max(-1, keepdims=True)
    p = np.where(seen, np.exp(x - m), 0)
    l = p.sum(-1, keepdims=True)
    lse = np.moveaxis((m + np.log(l))[..., 0], -2, -1)
    return np.einsum("...nts,...snh->...tnh", p / l, v), lse


SIZES = [  # batch, T, K, G, S: below a block, one, beyond it, and many
    ((), 1, 3, 1, 300),
    ((3,), 3, 2, 2, 512),
    ((2, 3), 16, 1, 4, 700),
    ((2,), 1, 2, 1, 1537),
]


@pytest.mark.parametrize(("batch", "T", "K", "G", "S"), SIZES)
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_whole_sizes_with_a_length_for_each_row_and_nan_behind_it(share, batch, T, K, G, S):
    """Once a part of the slots is stored, once most of them; the last query is the last key."""
    shapes = (T, G * K, 4), (S, K, 4), (S, K, 5)
    q, k, v = (normal(i, *batch, *shape) for i, shape in enumerate(shapes))
    stored = np.random.RandomState(S).randint(T + 1, 30, batch) + int(share * (S - 30))
    at = (np.arange(T) + stored[..., None] - T)[..., None]  # *B T 1
    seen = (np.arange(S) <= at, (np.arange(S) <= at) & (np.arange(S) >= at - 40))
    absent = (np.arange(S) >= stored[..., None])[..., None, None]
    given = q, *(np.where(absent, np.nan, x) for x in (k, v))
    for shown, mask in zip(seen, (Causal(stored - T), Window(40, 0, stored - T)), strict=True):
        run = jax.jit(lambda *x, mask=mask: attend(*x, mask=mask, return_lse=True))
        want = by_numpy(q, k, v, shown[..., None, :, :])
        for got, wanted in zip(run(*given), want, strict=True):
            assert judge.same_function(np.asarray(got), wanted).ok


# Where it is taken, and how far it goes.


def plan(T, S, N, K, mask=CAUSAL, **how):
    q, k = jnp.ones((1, T, N, 2)), jnp.ones((1, S, K, 2))
    return make_plan(sizes_of(q, k), K, Rules(mask).bind(sizes_of(q, k), 2), "cpu", **how)


def test_it_is_taken_up_to_64_queries_a_key_head():
    assert plan(64, 9, 1, 1).few and plan(16, 9, 8, 2).few and plan(8, 9, 8, 1).few
    assert not plan(65, 9, 1, 1).few and not plan(16, 9, 10, 2).few
    assert not plan(1, 9, 1, 1, cols=4).few  # who asks for blocks is given them
    assert plan(1, 9, 1, 1, cols=4, few=True).cols == 4


@pytest.mark.parametrize(("way", "blocks"), [("block by block", 6), ("as one block", 1)])
def test_a_row_takes_as_many_blocks_as_it_sees(way, blocks, monkeypatch):
    """Keys in blocks of two: none for a row of 0, two for 4, one for 1, three for 6 to 11."""
    steps, take = [], decode._step
    forward, most = WAYS[way]
    monkeypatch.setattr(decode, "MIN_KEY_SHARE", most)
    monkeypatch.setattr(decode, "_step", lambda *given: (steps.append(1), take(*given))[1])
    q, k = jnp.ones((4, 1, 2, 3)), jnp.ones((4, 13, 1, 3))
    seen = Lengths(jnp.asarray([0, 4, 1, 11])) & Window(5, None, jnp.asarray([0, 0, 0, 11]))
    rules = Rules(seen).bind(sizes_of(q, k), 3)
    with jax.disable_jit():
        forward(q, k, k, rules, few=True, cols=2)
    assert len(steps) == blocks


# What is compiled.


def cache_step(batch, T, S, K=3, H=16):
    """The program of one step: writes to a cache that is given away, then attends to it."""
    rows = jnp.meshgrid(*map(jnp.arange, batch), indexing="ij")

    def step(q, keys, values, new, at):
        keys, values = (x.at[*rows, :, at].set(new) for x in (keys, values))
        k, v = (jnp.swapaxes(x, -3, -2) for x in (keys, values))
        return attend(q, k, v, mask=Lengths(at + 1), backend="blockwise"), keys, values

    shapes = (T, 2 * K, H), (K, S, H), (K, S, H), (K, H)
    given = [jax.ShapeDtypeStruct((*batch, *shape), jnp.float32) for shape in shapes]
    given.append(jax.ShapeDtypeStruct(batch, jnp.int32))
    return jax.jit(step, donate_argnums=(1, 2)).lower(*given).compile().as_text()


@pytest.mark.parametrize(("batch", "T", "S"), [((1,), 1, 1200), ((2, 3), 5, 400)])
def test_a_step_beside_a_cache_copies_none_of_it(batch, T, S):
    text = cache_step(batch, T, S)
    assert "{1}: (1, {}, may-alias)" in text and "{2}: (2, {}, may-alias)" in text
    size = math.prod(batch) * 3 * S * 16
    made = re.findall(r"= f32\[([\d,]+)\]\S* (copy|transpose|slice|gather|concatenate)\(", text)
    assert [op for shape, op in made if math.prod(map(int, shape.split(","))) >= size] == []
