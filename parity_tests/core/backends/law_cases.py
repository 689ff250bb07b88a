"""What the laws of attention in blocks are held against: masks, rules, and what is right."""

from functools import cache, partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import reference
from flax_attn._internal.types import Sizes
from flax_attn.dropout import Dropout, DropoutMask
from flax_attn.masks import (
    CAUSAL,
    FULL,
    Causal,
    Chunked,
    Dense,
    Lengths,
    Mask,
    MaskFn,
    Prefix,
    Segments,
    Window,
)
from flax_attn.parity import judge
from flax_attn.rules import Rules
from flax_attn.scores import Additive, Alibi, ScoreFn, Softcap
from parity_tests.core.drawing import normal as normal
from parity_tests.requests import masks as random_masks


def eager64(law):
    """A law in float64."""

    @wraps(law)
    def wide():
        with jax.enable_x64(True):
            law()

    return wide


def one_program(run: Any, *columns: Any) -> list[Any]:
    """`map`, all of it in one program, as numpy arrays."""
    return jax.device_get(jax.jit(lambda *columns: list(map(run, *columns)))(*columns))


class Drawn(NamedTuple):
    """A bound mask and who sees what, B N T S."""

    mask: Mask
    seen: np.ndarray
    sizes: Sizes


@cache
def drawn_masks(count: int, *shapes: tuple[int, int], seed: int = 0) -> list[Drawn]:
    """Random masks with offsets of their own for every batch entry, in these T and S by turns."""
    drawn = []
    for i in range(count):
        sizes = Sizes((2,), 2, *shapes[i % len(shapes)])
        mask, seen = random_masks.masks(seed + i, sizes)
        drawn.append(Drawn(mask.bind(sizes), seen, sizes))
    return drawn


# Whole attentions: the rules, the arrays and what the plain formula makes of them.

B, T, S, N, K, H, h = 2, 3, 5, 4, 2, 3, 2
TABLE = jnp.asarray(np.random.RandomState(4).rand(N, T, S) < 0.6)


def by_table(b, n, q, k):
    return TABLE[n, q, k] | ((b == 1) & (k > 1))


def bent(params, x, b, n, q, k):
    far = jnp.abs(q - k).astype(x.dtype)
    return x * params["gain"] - params["slope"][n] * far * (1 + b).astype(x.dtype)


def ragged() -> np.ndarray:
    seen = np.random.RandomState(3).rand(B, N, T, S) < 0.6
    seen[0, 1, 2] = seen[1, :, 1] = False  # queries that see nothing
    seen[1, :2, :, 3] = seen[0, :, :, 4] = False  # keys that nobody sees
    return seen


def sunk(*rows: tuple[int, int], fill: float) -> np.ndarray:
    """A bias with rows of this number, head by query, and one more such number."""
    bias = normal(11, N, T, S)
    for n, t in rows:
        bias[n, t] = fill
    bias[0, 0, 1] = fill
    return bias


LOWEST = float(np.finfo(np.float64).min)
SINKS = np.asarray([0.5, -np.inf, -1.0, 2.0])
IDS = np.asarray([[0, 1, 2], [3, 3, 5]]), np.asarray([[0, 0, 1, 1, 4], [3] * 5])
RULES = {
    "plain": lambda: Rules(),
    "causal": lambda: Rules(CAUSAL, Softcap(jnp.asarray(1.5)), jnp.asarray(0.7)),
    "lengths": lambda: Rules(
        CAUSAL | Lengths(np.asarray([4, 2]), q=np.asarray([3, 0])),
        Alibi(jnp.arange(1.0, N + 1) / 7),
        sinks=SINKS,
        dropout=Dropout(0.4, jax.random.key(1)),
    ),
    "padding": lambda: Rules(Lengths(np.asarray([4, 2]), q=np.asarray([3, 1])), scale=0.3),
    "table": lambda: Rules(
        Dense(ragged()),
        Softcap(2.0) >> Additive(normal(12, B, 1, 1, S)),
        jnp.asarray(0.9),
        SINKS[::-1].copy(),
        DropoutMask(np.random.RandomState(6).rand(B, N, T, S) < 0.7, 0.3),
    ),
    "table alone": lambda: Rules(Dense(ragged())),
    "window": lambda: Rules(
        Window(1, 0), ScoreFn(bent, {"slope": normal(13, N), "gain": normal(14)})
    ),
    "lowest": lambda: Rules(score=Additive(sunk((1, 2), (3, 1), fill=LOWEST))),
    "masked out by a bias": lambda: Rules(
        score=Additive(sunk((1, 2), (3, 1), fill=-np.inf)), sinks=SINKS
    ),
    "huge": lambda: Rules(score=Additive(sunk((1, 2), (3, 1), fill=-1e9)), sinks=SINKS - 1e9),
    "documents": lambda: Rules(
        Causal("end") & Segments(q_ids=IDS[0], kv_ids=IDS[1]), sinks=SINKS[:1].repeat(N)
    ),
    "function": lambda: Rules(MaskFn(by_table) & ~Window(0, 0, np.asarray([0, 3]))),
    "chunks": lambda: Rules(Chunked(3) | Prefix(1), Additive(normal(15, N, T, S)) >> Softcap(3.0)),
    "own offsets": lambda: Rules(Causal(np.asarray([0, 3])), Alibi(np.ones((B, N)) / 3, "end")),
    "blind": lambda: Rules(~FULL, sinks=SINKS),
    "all dropped": lambda: Rules(dropout=Dropout(1.0, jax.random.key(3))),
}
SILENT = {  # queries that see nothing and keys that nobody sees: what stands there is NaN
    "padding": (((1, slice(1, None)),), ((0, 4), (1, slice(2, None)))),
    "table alone": (((1, 1),), ((0, 4), (1, 3, 0))),
    "window": ((), ((slice(None), slice(3, None)),)),
    "blind": ((slice(None),), (slice(None),)),
}


class Case(NamedTuple):
    """An attention as arrays, with cotangents, and all that the plain formula makes of it."""

    given: tuple[Any, ...]
    cotangents: tuple[Any, Any]
    want: list[np.ndarray]


def outcome(forward: Any, given: tuple, cotangents: tuple, **how: Any) -> list[np.ndarray]:
    """Output, lse and the gradients of all that is floating, by one program."""

    @jax.jit
    def run(given, cotangents):
        out, back = jax.vjp(partial(forward, **how), *given)
        leaves = jax.tree.leaves((out, back(cotangents)))
        return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    return list(map(np.asarray, run(given, cotangents)))


@cache
def case(name: str, dtype: str = "float64") -> Case:
    with jax.enable_x64(True):
        q, k, v = normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, h)
        do, dlse = normal(8, B, T, N, h), normal(9, B, N, T)
        for at in SILENT.get(name, ((), ()))[0]:
            q[at] = np.nan
        for at in SILENT.get(name, ((), ()))[1]:
            k[at] = v[at] = np.nan
        q, k, v, do = (jnp.asarray(x, dtype) for x in (q, k, v, do))
        wide = "float64" if dtype == "float64" else "float32"
        given = q, k, v, RULES[name]().bind(Sizes((B,), N, T, S), H)
        dead = np.isneginf(np.asarray(jax.jit(reference.forward)(*given)[1]))
        do = jnp.where(np.swapaxes(dead, 1, 2)[..., None], jnp.nan, do)
        cotangents = do, jnp.asarray(dlse, wide)
        return Case(given, cotangents, outcome(reference.forward, given, cotangents))


def check(forward: Any, name: str, **how: Any) -> None:
    """`forward` is the plain formula, in float64."""
    given, cotangents, want = case(name)
    same(outcome(forward, given, cotangents, **how), want, name)


def same(got: list[np.ndarray], want: list[np.ndarray], name: str) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = judge.gradient_scale(want[2:], b) if i > 1 else None
        verdict = judge.same_function(a, b, scale, zero=True)
        assert verdict.ok and a.dtype == b.dtype, (name, i, verdict)
