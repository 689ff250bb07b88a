"""Every layer that decodes gives what its full forward pass gives, however tokens are cut."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import (
    CAUSAL,
    CrossAttention,
    CrossLayerAttention,
    Dense,
    DifferentialAttention,
    GroupedQueryAttention,
    MaskFn,
    Rotary,
    Rules,
    ScoreFn,
    SharedKeyValueAttention,
    T5Attention,
)
from parity_tests.core import layer_facts
from parity_tests.core.drawing import float64 as float64

from .cuts import joined, pieces, same

pytestmark = pytest.mark.usefixtures("float64")
T, D = 13, layer_facts.D
CUTS = ((13,), (1,) * 13, (5, 1, 1, 6))
HOW = {"dtype": jnp.float64, "param_dtype": jnp.float64}
HEADS = (D, 6, 3, 4)

# The layer, its arguments and keywords, and the keywords of its cache.
LAYERS = layer_facts.CACHED


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A layer with random parameters, and the keywords of its cache."""
    kind, arguments, keywords, cache = LAYERS[name]
    layer = kind(*arguments, **keywords, **HOW, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(4).normal
    state = nnx.state(layer, nnx.Param)
    nnx.update(layer, jax.tree.map(lambda x: jax.device_put(draw(size=x.shape) / 3), state))
    return layer, cache


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def decoded(layer: Any, x: Any, cache: Any, cut: Any, step: Any, valid: Any = None) -> Any:
    """Outputs of all tokens, one call for each part, and the last cache."""
    there, out = None if valid is None else pieces(valid, cut, axis=-1), []
    for part in pieces(x, cut, axis=-2):
        how = {} if there is None else {"valid": next(there)}
        y, cache = step(layer, part, cache, **how)
        out.append(y)
    return joined(out, axis=-2), cache


def a_step() -> Any:
    return nnx.jit(lambda layer, x, cache, **how: layer(x, cache=cache, **how))


@pytest.mark.parametrize("name", ["latent", "latent absorbed"])
def test_a_latent_cache_keeps_the_latent_and_the_shared_key_alone(name):
    cache = jax.eval_shape(lambda: made(name)[0].init_cache(3, T))
    assert cache.values is None
    assert cache.keys.shape == (3, 1, T, 5 + 4)  # kv_rank + rotary_dim numbers a token


@pytest.mark.nightly
def test_values_of_the_first_layer_are_mixed_in_step_by_step():
    layer, _ = made("residual")
    x, first, cut = drawn(3, T, D), drawn(3, T, 3, 4, seed=1), CUTS[2]
    step = nnx.jit(lambda layer, x, values, cache: layer(x, values=values, cache=cache))
    cache, out = layer.init_cache(3, T), []
    for part, values in zip(pieces(x, cut, axis=-2), pieces(first, cut), strict=True):
        y, cache = step(layer, part, values, cache)
        out.append(y)
    whole = nnx.jit(lambda layer, x, values: layer(x, values=values))(layer, x, first)
    assert same(joined(out, axis=1), whole)


@pytest.mark.nightly
def test_keys_and_values_of_an_earlier_layer_are_stored_step_by_step():
    layer = CrossLayerAttention(*HEADS, rotary=Rotary(), **HOW, rngs=nnx.Rngs(0))
    x, cut = drawn(3, T, D), CUTS[2]
    pair = [drawn(3, T, layer.num_kv_heads, layer.head_dim, seed=seed) for seed in (1, 2)]
    step = nnx.jit(lambda layer, x, k, v, **how: layer(x, keys_and_values=(k, v), **how))
    cache, out, at = layer.init_cache(3, T), [], pieces(np.arange(T), cut, axis=0)
    for part, *both in zip(pieces(x, cut, axis=-2), *(pieces(y, cut) for y in pair), strict=True):
        y, cache = step(layer, part, *both, cache=cache, positions=next(at))
        out.append(y)
    assert same(joined(out, axis=1), step(layer, x, *pair))


def test_keys_of_an_earlier_layer_that_are_not_at_their_places_are_refused():
    """A second call whose keys count from 0, or are of other tokens; NaN under jit."""
    how = {"rotary": Rotary(), **HOW}
    kinds = SharedKeyValueAttention, CrossLayerAttention
    first, later = nnx.jit(lambda: tuple(kind(*HEADS, **how, rngs=nnx.Rngs(0)) for kind in kinds))()
    keys_of = nnx.jit(lambda layer, x, cache: layer.keys_and_values_of(x, cache=cache))
    step = nnx.jit(lambda layer, x, pair, cache: layer(x, keys_and_values=pair, cache=cache))
    x, cache = drawn(1, 2, D), later.init_cache(1, T)
    second, from_0 = keys_of(first, x, cache), keys_of(first, x, None)
    _, cache = step(later, x, second, cache)
    for pair in (from_0, tuple(from_0), second):
        with pytest.raises(ValueError, match="Row 0 of the cache stores other tokens next"):
            later(x, keys_and_values=pair, cache=cache)
        y, after = step(later, x, pair, cache)
        assert np.isnan(np.asarray(y)).all() and np.isnan(np.asarray(after.keys)[:, :, 2:4]).all()
    with pytest.raises(ValueError, match="keys of new tokens alone, for a cache of this layer"):
        later(x, keys_and_values=second)
    call = nnx.jit(lambda layer, x, cache: layer.with_keys_and_values(x, cache=cache))
    shared = call(first, x, later.init_cache(1, T))[2]
    longer = replace(shared, k=drawn(1, 3, 3, 4), v=drawn(1, 3, 3, 4))
    with pytest.raises(ValueError, match="of a call with 2 tokens; x has 3"):
        later(drawn(1, 3, D), keys_and_values=longer)
    with pytest.raises(TypeError, match="valid must be boolean"):
        later(x, keys_and_values=shared, valid=np.ones((1, 2), int))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [CrossAttention, T5Attention])
def test_a_memory_is_made_once(kind):
    arguments = (D, 3) if kind is CrossAttention else (D, 3, 5)
    layer = kind(*arguments, **({} if kind is CrossAttention else {"has_bias": False}), **HOW,
                 rngs=nnx.Rngs(0))  # fmt: skip
    x, context, step = drawn(3, T, D), drawn(3, 7, D, seed=1), a_step()
    valid = np.arange(7) >= np.asarray([0, 2, 5])[:, None]
    whole = nnx.jit(lambda layer, *x: layer(*x, mask=valid[:, None, None]))(layer, x, context)
    memory = layer.remember(np.where(valid[..., None], context, np.nan), valid)
    for cut in CUTS:
        y, same_memory = decoded(layer, x, memory, cut, step)
        assert same(y, whole), cut
        assert same_memory.keys.shape == memory.keys.shape == (3, 3, 7, len(memory.keys[0, 0, 0]))


@pytest.mark.nightly
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 4), (6, 2), (8, 8)])
def test_a_mask_by_pairs_of_heads_gives_the_same_with_a_cache(heads, kv_heads):
    how = {**layer_facts.DIFFERENCE, **HOW}
    layer = DifferentialAttention(D, heads, kv_heads, 4, **how, rngs=nnx.Rngs(0))
    by_head = CAUSAL & MaskFn(lambda b, n, q, k: q - k <= n)
    table = np.random.RandomState(0).rand(1, heads // 2, T, T) < 0.6
    table = np.tril(table) | np.eye(T, dtype=bool)
    x = jnp.asarray(drawn(2, T, D))
    for mask, cut_of in ((by_head, None), (Dense(table), table)):
        cache, out, at = layer.init_cache(2, T), [], 0
        for size in (5, 1, 7):
            rows = slice(at, at + size)
            part = mask if cut_of is None else Dense(cut_of[..., rows, :])
            y, cache = layer(x[:, rows], cache=cache, mask=part)
            out, at = [*out, y], at + size
        assert same(jnp.concatenate(out, axis=1), layer(x, mask=mask))


def test_a_score_reads_the_positions_of_a_call_beside_a_cache_too():
    score = ScoreFn(lambda x, b, n, q, k: x * (1 + q), reads="query position")
    layer = GroupedQueryAttention(D, 6, 3, 4, rules=Rules(score=score), **HOW, rngs=nnx.Rngs(0))
    x, at = drawn(2, 6, D), np.asarray([3, 4, 5, 6, 0, 1])  # the second call counts from 0

    def call(x, at, **cache):
        step = nnx.jit(lambda layer, x, **cache: layer(x, positions=at, **cache))
        return step(layer, x, **cache)

    _, cache = call(x[:, :4], at[:4], cache=layer.init_cache(2, 6))
    y, _ = call(x[:, 4:], at[4:], cache=cache)
    assert same(y, call(x, at)[:, 4:])
