"""Competitors for one decoding step: a whole layer, projections included, with its cache.

Every step is identical: the lengths are reset before it, so that the token is written to the same
slot and attends to the same number of tokens. Caches are donated. Before timing, a competitor's
output is verified at the same sizes, against the plain formula over all tokens in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..cache import Cache, Int8
from .competitor import OWN_FAMILY, Competitor
from .decode_torch import grown, static
from .machine import available_memory
from .program import Program
from .proof import Proof
from .result import LIMIT
from .step import Step, keys_and_values, layer_of
from .task import Arrays

RECOMPUTED = 2**11  # tokens: recomputing a longer prefix takes seconds per step
COPIES = 5  # of all tokens, keys and values, while a competitor is built and verified
ONES = 1024  # columns of the matrix whose matvec reads as many bytes as the cache


def competitors() -> list[Competitor]:
    """Returns this library's step, then the others, then the lower bound."""
    return [
        Competitor(OWN_FAMILY, OWN_FAMILY, _flax_attn, _too_large),
        Competitor("torch, static cache", "torch", static, _no_twin),
        Competitor("torch, growing cache", "torch", grown, _no_twin),
        Competitor("flax.nnx", "flax.nnx", _nnx, _nnx_refusal),
        Competitor("prefix recomputed", OWN_FAMILY, _recomputed, _recomputed_refusal),
        Competitor(LIMIT, OWN_FAMILY, _read, _too_large, prove=lambda task: Proof(0.0, 1.0)),
    ]


def _too_large(task: Step) -> str | None:
    tokens = 4 * task.batch * task.length
    need = COPIES * tokens * (task.features + 2 * (task.kv_heads or task.heads) * task.width)
    if need > available_memory():
        return f"its tokens, keys and values would take {need / 2**30:.0f} GiB while it is proven"
    return None


def _no_twin(task: Step) -> str | None:
    if task.store:
        return f"it has no {'int8' if task.store == 'int8' else 'latent'} cache"
    return _too_large(task)


def _nnx_refusal(task: Step) -> str | None:
    if task.store or task.window:
        return f"it has no {task.store + ' cache' if task.store else 'ring'}"
    if task.batch > 1:
        return "its cache has one length for all rows"
    return _too_large(task)


def _recomputed_refusal(task: Step) -> str | None:
    if task.batch * task.stored > RECOMPUTED:
        return f"{task.batch * task.stored} tokens in every step would take seconds"
    return None if task.store == "" else "the same as without this store"


class StepProgram(Program):
    """Jitted `call(fixed, state) -> (y, state)` with the state donated.

    Args:
      call: the step.
      pack: maps arrays by name to the fixed arguments and the state.
    """

    def __init__(self, call: Callable, pack: Callable):
        self.call, self.pack = call, pack
        self.compiled: Any = None

    def place(self, inputs: Arrays) -> Any:
        return list(jax.block_until_ready(self.pack(inputs)))

    def compile(self, placed: Any) -> None:
        lowered = jax.jit(self.call, donate_argnums=1).lower(*placed)
        self.compiled = lowered.compile()
        self.temporary = int(self.compiled.memory_analysis().temp_size_in_bytes)

    def run(self, placed: Any) -> Any:
        y, placed[1] = self.compiled(*placed)
        return y


def tokens_of(task: Step, arrays: Any) -> np.ndarray:
    """The new token of each row, `B 1 D`."""
    return arrays["x"][np.arange(task.batch), task.lengths - 1][:, None]


def _flax_attn(task: Step) -> StepProgram:
    def pack(arrays: Any) -> Any:
        graph, params = nnx.split(layer_of(task, arrays))
        store = Int8() if task.store == "int8" else None
        layer = nnx.merge(graph, params)
        empty = layer.init_cache(task.batch, task.length, window=task.window, store=store)
        past, places = task.lengths[:, None] - 1, np.arange(task.stored)[None]
        in_window = (places < past) & (places >= past - (task.window or task.length))
        places = jnp.asarray(np.where(in_window, places, -1), jnp.int32)
        full = jax.jit(Cache.append)(empty, *keys_and_values(task, arrays), places)
        graphs.append(graph)
        length = jnp.asarray(past[:, 0], jnp.int32)
        return (params, jnp.asarray(tokens_of(task, arrays)), length), full

    def call(fixed: Any, state: Cache) -> Any:
        params, x, length = fixed
        return nnx.merge(graphs[-1], params)(x, cache=replace(state, length=length))

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _nnx(task: Step) -> StepProgram:
    def pack(arrays: Any) -> Any:
        shared: dict[str, Any] = {"num_kv_heads": task.kv_heads} if task.kv_heads else {}
        sizes: dict[str, Any] = {"num_heads": task.heads, "in_features": task.features, **shared}
        module: Any = nnx.MultiHeadAttention(**sizes, use_bias=False, decode=True, rngs=nnx.Rngs(0))
        for name in ("query", "key", "value", "out"):
            kernel = getattr(module, name).kernel
            kernel[...] = jnp.asarray(arrays[f"{name}.weight"]).reshape(kernel.shape)
        module.init_cache((task.batch, task.length, task.features))
        past = task.stored - 1
        stored = module.cached_key, module.cached_value
        for slots, new in zip(stored, keys_and_values(task, arrays), strict=True):
            slots[...] = slots[...].at[:, :past].set(new[:, :past])
        graph, params, state = nnx.split(module, nnx.Param, ...)
        graphs.append(graph)
        return (params, jnp.asarray(tokens_of(task, arrays))), state

    def call(fixed: Any, state: Any) -> Any:
        module = nnx.merge(graphs[-1], fixed[0], state)
        module.cache_index[...] = jnp.full_like(module.cache_index[...], task.stored - 1)
        y = module(fixed[1])
        return y, nnx.split(module, nnx.Param, ...)[2]

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _recomputed(task: Step) -> StepProgram:
    def pack(arrays: Any) -> Any:
        graph, params = nnx.split(layer_of(task, arrays))
        graphs.append(graph)
        return (params, jnp.asarray(arrays["x"])), jnp.zeros(())

    def call(fixed: Any, state: Any) -> Any:
        y = nnx.merge(graphs[-1], fixed[0])(fixed[1])
        return y[np.arange(task.batch), task.lengths - 1][:, None], state

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _read(task: Step) -> StepProgram:
    """A matvec that reads, in float32, as many bytes as a step reads from the cache, once each."""
    rows = max(1, task.bytes // 4 // ONES)
    return StepProgram(
        lambda fixed, state: (fixed[0] @ fixed[1], state),
        lambda arrays: ((jnp.ones((rows, ONES)), jnp.ones(ONES)), jnp.zeros(())),
    )
