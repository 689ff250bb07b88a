"""Queries and keys at positions: what masks, scores and dropout are asked, beside numpy."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from flax_attn import Rules, attend
from flax_attn.parity import judge
from flax_attn.places import Positions
from parity_tests.core import oracle, random_masks
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.fuzz.backends import planned, quickly
from parity_tests.core.random_masks import Node, Random, Sizes

SIZES, K, H, h = Sizes((2,), 4, 9, 13), 2, 3, 5
B, N, T, S = 2, *SIZES[1:]
FURTHEST = 20  # of the positions that are drawn
PLANS = {
    "reference": None,
    "loops": {"unrolled": False, "rows": 4, "cols": 3},
    "unrolled": {"unrolled": True, "rows": 5, "cols": 4},
    "batched": {"unrolled": False, "batched": True, "rows": 2, "cols": 5},
    "rows of one": {"unrolled": False, "rows": 1, "cols": 4},
}
KINDS = (
    *(random_masks.causal, random_masks.window, random_masks.chunked, random_masks.prefix),
    *(random_masks.lengths, random_masks.function, random_masks.full),
)
NOT_ALONE = ('"end"', "table")  # count slots


def tree(seed: int) -> Node:
    """A random mask, three deep, of those that go by position."""
    drawn = Random(seed)
    while True:
        node = random_masks._tree(drawn, SIZES, KINDS, 3)
        if not any(word in node.words for word in NOT_ALONE):
            return node


class Where(NamedTuple):
    """Positions of queries, `B T`, and of keys, `B S`, or without B where all entries share them.

    As a cache holds them: in any order, with gaps, some absent, in some rows all of a block.
    """

    q: np.ndarray
    k: np.ndarray

    @property
    def at(self) -> tuple[np.ndarray, ...]:
        """Index arrays b, n, q, k that broadcast to B N T S, of positions."""
        b, n, _, _ = SIZES.grid()
        q, k = (np.broadcast_to(x, (B, x.shape[-1])) for x in self)
        return b, n, q[:, None, :, None], k[:, None, None, :]

    def seen(self, mask: np.ndarray) -> np.ndarray:
        """What a mask shows of what is present."""
        _, _, q, k = self.at
        return np.broadcast_to(mask & (q >= 0) & (k >= 0), (B, N, T, S))


def where(seed: int, lead: tuple[int, ...] = (B,)) -> Where:
    drawn = Random(seed)
    rows = []
    for length, start in ((T, 4), (S, 0)):
        x = np.stack([start + drawn.permutation(FURTHEST)[:length] for _ in range(B)])
        way = seed % 4
        x = np.sort(x, axis=1) if way in (0, 1) else x
        if way == 1:  # a ring
            x = np.roll(x, drawn.randint(length), axis=1)
        x[drawn.rand(*x.shape) < 0.2] = -1 - drawn.randint(3)
        if drawn.rand() < 0.3:
            x[drawn.randint(B), length // 2 :] = -1
        rows.append(x if lead else x[0])
    return Where(*rows)


class Drawn(NamedTuple):
    """What is differentiated, and the cotangents of output and lse."""

    floats: dict[str, np.ndarray]
    do: np.ndarray
    dlse: np.ndarray


def drawn(seed: int) -> Drawn:
    r = Random([seed, 1])
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, h)}
    shapes |= {"sinks": (N,)} if seed % 2 else {}
    floats = {name: r.standard_normal(shape) for name, shape in shapes.items()}
    return Drawn(floats, r.standard_normal((B, T, N, h)), r.standard_normal((B, T, N)))


def expected(x: Drawn, seen: np.ndarray, keep: Any = None) -> dict[str, Any]:
    """Output, lse and gradients by numpy, with `keep` after a dropout of one half."""
    steps: dict[str, Any] = {name: [] for name in ("steps", "floats", "ints")}
    more = {"at": None, "scale": H**-0.5, "keep": keep, "rate": 0.5, "do": x.do, "dlse": x.dlse}
    return oracle.attention(
        oracle.Inputs(**{"sinks": None, **x.floats}, seen=seen, **steps, **more)
    )


def poisoned(x: Drawn, at: Where) -> Drawn:
    """NaN in queries and keys that are absent."""
    floats = {name: value.copy() for name, value in x.floats.items()}
    floats["q"][np.broadcast_to(at.q, (B, T)) < 0] = np.nan
    floats["k"][np.broadcast_to(at.k, (B, S)) < 0] = np.nan
    floats["v"][np.broadcast_to(at.k, (B, S)) < 0] = np.inf
    return x._replace(floats=floats)


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


@pytest.mark.parametrize("seed", range(10))
def test_masks_at_positions(seed):
    node, lead = tree(seed), ((B,), ())[seed % 3 == 2]
    plan = list(PLANS.values())[seed % len(PLANS)]
    run = compiled(plan, lambda data: {"mask": node.build(data)})
    for i in range(8):
        at, x, data = where(100 * seed + i, lead), drawn(seed), node.draw(Random([seed, i]))
        want = expected(x, at.seen(node.seen(data, at.at)))
        check(run(poisoned(x, at).floats, data, at, x.do, x.dlse), want)


def test_all_that_is_seen_differs():
    """The programs above show something, and hide something that is present."""
    shares = []
    for seed in range(10):
        at, node = where(100 * seed), tree(seed)
        seen = at.seen(node.seen(node.draw(Random([seed, 0])), at.at))
        shares.append(seen.sum() / at.seen(np.True_).sum())
    assert sum(0.1 < share < 1 for share in shares) >= 6, shares
