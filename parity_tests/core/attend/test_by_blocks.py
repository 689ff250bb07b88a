"""Weights that are no softmax, and SAM's bias, in blocks of queries: as by the whole."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn import by_weights
from flax_attn.layers import decomposed_relative
from flax_attn.parity import judge

pytestmark = pytest.mark.nightly

B, T, N, K, H, WIDTH = 2, 140, 4, 2, 5, 3
ENTRIES = jnp.asarray([100, 133])
RULES = {
    "causal": lambda x: {"mask": fa.CAUSAL & fa.Lengths(ENTRIES)},
    "the end": lambda x: {"mask": fa.Window(5, 3, "end"), "scale": x["number"]},
    "a table": lambda x: {"mask": fa.CAUSAL, "score": fa.Additive(x["table"]) >> fa.Softcap(3.0)},
    "slopes": lambda x: {"score": fa.Alibi(x["slopes"]), "mask": fa.Segments(jnp.arange(T) // 70)},
    "functions": lambda x: {
        "mask": fa.MaskFn(lambda b, n, q, k: (q + k + n) % 3 > 0),
        "score": fa.ScoreFn(lambda p, y, b, n, q, k: y * p + q * 0.01, x["number"]),
    },
    "dropout": lambda x: {"dropout": fa.Dropout(0.4, jax.random.key(9))},
    "a drawn one": lambda x: {
        "dropout": fa.DropoutMask(jax.random.bernoulli(jax.random.key(8), 0.6, (N, T, T)), 0.4)
    },
}
SHAPES = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, WIDTH)}
SHAPES |= {"table": (N, T, T), "slopes": (N,), "number": ()}
KEYS = dict(zip(SHAPES, jax.random.split(jax.random.key(0), len(SHAPES)), strict=True))
ARRAYS = {name: jax.random.normal(KEYS[name], shape) for name, shape in SHAPES.items()}


def both_ways(f, *args):
    """Output and gradients of a new program."""

    def run(cotangent, *args):
        o, back = jax.vjp(f, *args)
        return o, back(cotangent)

    o = jax.eval_shape(f, *args)
    return jax.jit(run)(jax.random.normal(jax.random.key(7), o.shape), *args)


@pytest.mark.parametrize("rows", [50, 64])
@pytest.mark.parametrize("name", RULES)
def test_blocks_of_queries_are_the_whole(name, rows, monkeypatch):
    def f(x):
        rules = {**RULES[name](x), "normalise": fa.sigmoid}
        return fa.attend_by_weights(x["q"], x["k"], x["v"], **rules)

    monkeypatch.setattr(by_weights, "ROWS", 10 * T)
    whole = both_ways(f, ARRAYS)
    monkeypatch.setattr(by_weights, "ROWS", rows)
    for one, want in zip(*map(jax.tree.leaves, (both_ways(f, ARRAYS), whole)), strict=True):
        assert judge.error(one, want) < 1e-4


def test_what_nobody_sees_in_blocks_reaches_nothing(monkeypatch):
    monkeypatch.setattr(by_weights, "ROWS", 50)
    gone = (jnp.arange(T)[None] >= ENTRIES[:, None])[..., None, None]
    q, k, v = ARRAYS["q"], *(jnp.where(gone, jnp.nan, ARRAYS[name]) for name in "kv")

    def f(q, k, v):
        return fa.attend_by_weights(q, k, v, mask=fa.Lengths(ENTRIES), normalise=fa.sigmoid)

    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(both_ways(f, q, k, v)))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_blocks_of_an_image_are_the_whole(dropout, monkeypatch):
    layer = fa.DecomposedRelativeAttention(6, 2, (7, 6), dropout=dropout, rngs=nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = structure.unflatten(
        [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    )
    x = jax.random.normal(jax.random.key(5), (2, 3, 7, 6, 6))
    valid = jax.random.bernoulli(jax.random.key(6), 0.8, x.shape[:-1])

    def f(params, x):
        return nnx.merge(graph, params, rest, copy=True)(x, valid=valid)

    whole = both_ways(f, params, x)
    monkeypatch.setattr(by_weights, "ROWS", 16)
    monkeypatch.setattr(decomposed_relative, "ROWS", 16)
    for one, want in zip(*map(jax.tree.leaves, (both_ways(f, params, x), whole)), strict=True):
        assert judge.error(one, want) < 1e-4
