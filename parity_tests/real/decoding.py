"""A whole decoder word after word: its prompt read in pieces, then greedy tokens beside caches.

Pieces are padded to one length, so that whatever the cut two programs are compiled: one reads
pieces, the other a token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Row, judge
from flax_attn.parity.sides.torch.float64 import lifted
from parity_tests.models import llama

PIECE = 16  # the most tokens of a prompt that are read at once
NEW = 64  # tokens that follow
Step = Callable[..., tuple[jax.Array, Any]]


def cuts(length: int) -> tuple[tuple[int, ...], ...]:
    """Five ways to cut a prompt into pieces.

    >>> cuts(20)[:3]
    ((16, 4), (4, 16), (10, 10))
    """
    whole, rest = divmod(length, PIECE)
    first = (*[PIECE] * whole, *[rest] * (rest > 0))
    tens, ones = divmod(length, 10)
    odd = (1, 2, 3)
    return (
        first,
        first[::-1],
        (*[10] * tens, *[ones] * (ones > 0)),
        (1,) * length,
        (*odd, *_pieces(length - sum(odd), 7)),
    )


def _pieces(length: int, each: int) -> tuple[int, ...]:
    return tuple(min(each, length - start) for start in range(0, length, each))


def step_of(mine: llama.Llama, traces: list[tuple[int, ...]]) -> Step:
    """`step(ids, valid, caches)` in float64: logits and the caches after; notes what is traced."""
    graph, params, rest = nnx.split(mine, nnx.Param, ...)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)

    @jax.jit
    def run(params: Any, ids: jax.Array, valid: jax.Array, caches: Any) -> tuple[jax.Array, Any]:
        traces.append(ids.shape)
        model, after = nnx.merge(graph, params, rest), []
        x = model.embed_tokens(ids)  # B T D
        for layer, cache in zip(model.layers, caches, strict=True):
            y, cache = layer.self_attn(layer.input_layernorm(x), cache=cache, valid=valid)
            x = x + y
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            after.append(cache)
        return model.norm(x) @ model.embed_tokens.embedding[...].T, after

    return lambda ids, valid, caches: run(params, jnp.asarray(ids), jnp.asarray(valid), caches)


def read(step: Step, ids: np.ndarray, cut: Sequence[int], caches: Any) -> tuple[jax.Array, Any]:
    """The logits behind a prompt that is read in pieces, B V, and the caches."""
    start, logits = 0, jnp.zeros(())
    for length in cut:
        piece = np.zeros((len(ids), PIECE), ids.dtype)
        piece[:, :length] = ids[:, start : start + length]
        valid = np.broadcast_to(np.arange(PIECE) < length, piece.shape)
        every, caches = step(piece, valid, caches)
        start, logits = start + length, every[:, length - 1]
    return logits, caches


def follow(step: Step, logits: jax.Array, caches: Any) -> np.ndarray:
    """The tokens that follow, each the likeliest: B NEW."""
    words = []
    for _ in range(NEW):
        words.append(np.asarray(logits.argmax(-1)))
        every, caches = step(words[-1][:, None], np.ones((len(words[-1]), 1), bool), caches)
        logits = every[:, 0]
    return np.stack(words, axis=1)


def rows(theirs: Any, mine: llama.Llama, ids: np.ndarray) -> list[Row]:
    """Logits behind the prompt in every cut, the tokens that follow, and how many programs ran.

    Args:
      theirs: the LlamaForCausalLM in float64, its rotary too.
      mine: the same in Flax.
      ids: the prompts.
    """
    first, words = told(theirs, ids)
    traces = list[tuple[int, ...]]()
    step, every, logits, caches = step_of(mine, traces), cuts(ids.shape[1]), None, None
    result = []
    for cut in every:
        empty = [x.self_attn.init_cache(len(ids), ids.shape[1] + NEW) for x in mine.layers]
        empty = jax.tree.map(_wide, empty)
        logits, caches = read(step, ids, cut, empty)
        verdict = judge.same_function(np.asarray(logits), first)
        result.append(Row(f"prompt in {len(cut)} pieces", "output", "float64", "jit", verdict))
    verdict = judge.exact(follow(step, logits, caches), words)
    result.append(Row(f"{NEW} tokens", "output", "float64", "jit", verdict))
    verdict = judge.exact(np.asarray(len(traces)), np.asarray(2))
    return [*result, Row("programs", "output", "float64", "jit", verdict)]


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def told(theirs: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of the model in torch: the logits behind the prompts, and the tokens that follow."""
    import torch
    from transformers import DynamicCache

    past, new, logits, words = DynamicCache(), torch.from_numpy(ids), [], []
    with torch.no_grad(), lifted():
        for _ in range(NEW + 1):
            logits.append(theirs(new, cache=past, use_cache=True).logits[:, -1])
            new = logits[-1].argmax(-1, keepdim=True)
            words.append(new[:, 0].numpy())
    return logits[0].numpy(), np.stack(words[:NEW], axis=1)
