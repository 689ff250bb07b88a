"""Whatever is done to a layer's cache, each row is what it is alone: sequences drawn with a seed.

Every layer that decodes is here, recurrences too, and models of Gemma whose later layers read the
keys of earlier ones. A row alone is a call without a cache over the tokens that it has kept.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, CausalAttention, MultiHeadAttention, families
from flax_attn.cache import State
from flax_attn.parity import judge
from parity_tests.core.drawing import float64 as float64
from parity_tests.core.layer_facts import CACHED, RECURRENT, D
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.usefixtures("float64")
ROWS, SLOTS, LONG = 3, 13, 4
WINDOW, FULL = "sliding_attention", "full_attention"
GEMMA = {
    **{"hidden_size": 10, "num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2},
    **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": LONG - 1},
    "layer_types": [WINDOW, FULL, WINDOW, WINDOW, FULL],
}
WIDE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 8}
CONFIGS = {
    "gemma3n": {"model_type": "gemma3n_text", **GEMMA},
    "gemma4": {"model_type": "gemma4_text", **GEMMA, **WIDE},
}


class Gemma(nnx.Module):
    """The attention of all layers; the last two read the keys and values of earlier ones."""

    def __init__(self, name, ring=None, **how):
        config, self.ring = CONFIGS[name], ring or {}
        self.layers = nnx.List(families.attention(config, i, **how) for i in range(5))
        self.sources = tuple(families.kv_shared_layer_index(config, i) for i in range(5))

    def init_cache(self, rows, length):
        layers = [x for x, source in zip(self.layers, self.sources, strict=True) if source is None]
        how = [{} if x.mask == CAUSAL else self.ring for x in layers]
        return tuple(x.init_cache(rows, length, **h) for x, h in zip(layers, how, strict=True))

    def __call__(self, x, cache=None, valid=None):
        caches, shared, after = iter(cache or ()), [], []
        for layer, source in zip(self.layers, self.sources, strict=True):
            if source is None:
                how = {"cache": next(caches, None), "valid": valid}
                y, cache, pair = layer.with_keys_and_values(x, **how)
                shared.append(pair)
                after.append(cache)
            else:
                y = layer(x, keys_and_values=shared[source], valid=valid)
            x = x + y
        return x if None in after else (x, tuple(after))


def of_table(row):
    kind, arguments, keywords, _ = row
    return lambda **how: kind(*arguments, **keywords, dtype=jnp.float64, **how)


RING = {"window": "mask", "spare": 2}  # with less room than a long call needs
LAYERS = {
    "gemma3n": lambda **how: Gemma("gemma3n", **how),
    "gemma4": lambda **how: Gemma("gemma4", **how),
    "gemma3n ring": lambda **how: Gemma("gemma3n", RING, **how),
    "gemma4 ring": lambda **how: Gemma("gemma4", RING, **how),
    **{name: of_table(row) for name, row in CACHED.items()},
    **RECURRENT,
}
step = nnx.jit(lambda module, x, cache, **valid: module(x, cache=cache, **valid))
alone = nnx.jit(lambda module, x, **valid: module(x, **valid))


@jax.jit
def changed(cache, rows, emptied, kept):
    """Rows as others were, some of them emptied, and only the first `kept` tokens of each."""
    cache = each(cache, lambda x: x.take(rows).reset(emptied))
    return cache if kept is None else each(cache, lambda x: x.truncate(kept))


def each(cache, function):
    """Of the cache, or of all caches of a model."""
    return jax.tree.map(function, cache, is_leaf=lambda x: hasattr(x, "reset"))


def made(name):
    """A layer with random parameters, without compiling its initializers."""
    module = nnx.eval_shape(lambda: LAYERS[name](rngs=nnx.Rngs(0), param_dtype=jnp.float64))
    draw, key = np.random.default_rng(4).normal, jax.random.key(0)

    def filled(x):
        if x.dtype == key.dtype:
            return key
        return draw(size=x.shape) / 3 if jnp.issubdtype(x.dtype, jnp.floating) else np.uint32(0)

    nnx.update(module, jax.tree.map(filled, nnx.state(module)))
    return module


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("seeds", with_nightly([range(8), range(8, 100)], commit=[range(8)]))
def test_each_row_of_a_layer_is_what_it_is_alone(name, seeds):
    module, how = made(name), CACHED[name][3] if name in CACHED else {}
    pads = not isinstance(module, CausalAttention | MultiHeadAttention)
    empty = module.init_cache(ROWS, SLOTS, **how)
    truncates = not how and not isinstance(empty, State)
    width = 10 if "gemma" in name else D if name in CACHED else 11
    for seed in seeds:
        random, cache, rows = np.random.default_rng(seed), empty, [[]] * ROWS
        kept = np.zeros(ROWS, np.int32)
        for _ in range(6):
            T = int(random.choice([1, LONG]))
            took = random.integers(0, ROWS, ROWS)
            emptied = [len(rows[i]) + T > SLOTS or random.random() < 0.1 for i in took]
            rows = [[] if gone else rows[i] for i, gone in zip(took, emptied, strict=True)]
            lengths = np.asarray([len(row) for row in rows], np.int32)
            # A ring takes back the tokens of the last call alone.
            least = np.minimum(lengths, kept[took]) if truncates else lengths
            kept = np.maximum(lengths - random.integers(0, 3, ROWS), least)
            rows = [row[:count] for row, count in zip(rows, kept, strict=True)]
            cache = changed(cache, took, np.asarray(emptied), kept if truncates else None)
            x = random.normal(size=(ROWS, T, width))
            valid = (random.random((ROWS, T)) < 0.7) | (random.random() < 0.4) | (not pads)
            x = np.where(valid[..., None], x, np.nan)
            y, cache = step(module, x, cache, **({"valid": valid} if pads else {}))
            y, rows = np.asarray(y), [[*row, *x[i][valid[i]]] for i, row in enumerate(rows)]
            stored = np.arange(SLOTS) < np.asarray([[len(row)] for row in rows])
            whole = np.zeros((ROWS, SLOTS, width))
            for i, row in enumerate(rows):
                whole[i, : len(row)] = np.reshape(row, (-1, width))
            want = np.asarray(alone(module, whole, **({"valid": stored} if pads else {})))
            for i, row in enumerate(rows):
                new = want[i, kept[i] : len(row)]
                assert judge.allclose(y[i, valid[i]], new), (seed, i)
            assert "gemma" in name or not y[~valid].any(), seed
            lengths = each(cache, lambda x: x.length.tolist())
            assert [len(row) for row in rows] in (lengths, lengths[-1]), seed


@pytest.mark.parametrize("name", ["gemma3n", "gemma3n ring"])
def test_layers_that_read_the_keys_of_others_take_no_memory(name):
    graph, state = nnx.split(made(name))
    cache = nnx.merge(graph, state).init_cache(1, 4096)
    calls = jax.jit(lambda state, x, cache: nnx.merge(graph, state)(x, cache), donate_argnums=2)
    memory = calls.lower(state, np.zeros((1, 1, 10)), cache).compile().memory_analysis()
    full = cache[1].keys.nbytes + cache[1].values.nbytes
    assert len(cache) == 3 and memory.temp_size_in_bytes < full
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000  # y alone
