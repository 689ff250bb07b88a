"""Competitors for one decoding step: a whole layer, projections included, with its cache.

Every step is identical: the lengths are reset before it, so that the token is written to the same
slot and attends to the same number of tokens. Caches are donated. Before timing, a competitor's
output is verified at the same sizes, against the plain formula over all tokens in float64.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..cache import Cache, Int8
from ..layers import GroupedQueryAttention, LatentAttention
from ..masks import CAUSAL
from ..parity import judge
from .competitor import OWN_FAMILY, Competitor
from .decode_torch import grown, static
from .program import TorchProgram
from .proof import Proof
from .settings import available_memory
from .workload import Workload

RECOMPUTED = 2**11  # tokens: recomputing a longer prefix takes seconds per step
COPIES = 5  # of all tokens, keys and values, while a competitor is built and verified
ONES = 1024  # columns of the matrix whose matvec reads as many bytes as the cache


def competitors() -> list[Competitor]:
    """Returns this library's step, then the others, then the lower bound."""

    def one(name: str, family: str, make: Callable, refusal: Callable = _too_large) -> Competitor:
        build = cache(partial(_built, make))
        return Competitor(name, family, build, refusal, prove=partial(_prove, build))

    return [
        one(OWN_FAMILY, OWN_FAMILY, _flax_attn),
        one("torch, static cache", "torch", static, _no_twin),
        one("torch, growing cache", "torch", grown, _no_twin),
        one("flax.nnx", "flax.nnx", _nnx, _nnx_refusal),
        one("prefix recomputed", OWN_FAMILY, _recomputed, _recomputed_refusal),
        Competitor("cache read once", OWN_FAMILY, _read, _too_large, prove=_no_proof),
    ]


def lengths(w: Workload) -> np.ndarray:
    """Number of tokens in each row, including the new one, `B`."""
    return np.maximum(1, w.stored * np.arange(1, w.batch + 1) // w.batch)


def bytes_read(w: Workload) -> int:
    """Bytes of the cache read in one step: keys and values of all visible tokens."""
    heads = w.kv_heads or w.heads
    token = {"": 8 * heads * w.width, "int8": 2 * heads * (w.width + 4)}
    token["latent"] = 4 * sum(latent_widths(w))
    return int(np.minimum(lengths(w), w.window or w.length).sum()) * token[w.store]


def latent_widths(w: Workload) -> tuple[int, int]:
    """L and P: a third of the model width for the latent, half a head for the shared key."""
    return max(2, w.features // 3), max(2, w.width // 2)


def _too_large(w: Workload, which: str) -> str | None:
    tokens = 4 * w.batch * w.length
    need = COPIES * tokens * (w.features + 2 * (w.kv_heads or w.heads) * w.width)
    if need > available_memory():
        return f"its tokens, keys and values would take {need / 2**30:.0f} GiB while it is proven"
    return None


def _no_twin(w: Workload, which: str) -> str | None:
    if w.store:
        return f"it has no {'int8' if w.store == 'int8' else 'latent'} cache"
    return _too_large(w, which)


def _nnx_refusal(w: Workload, which: str) -> str | None:
    if w.store or w.window:
        return f"it has no {w.store + ' cache' if w.store else 'ring'}"
    if w.batch > 1:
        return "its cache has one length for all rows"
    return _too_large(w, which)


def _recomputed_refusal(w: Workload, which: str) -> str | None:
    if w.batch * w.stored > RECOMPUTED:
        return f"{w.batch * w.stored} tokens in every step would take seconds"
    return None if w.store == "" else "the same as without this store"


def _no_proof(w: Workload, which: str) -> Proof:
    return Proof(0.0, 1.0)


class StepProgram:
    """Jitted `call(fixed, state) -> (y, state)` with the state donated.

    Args:
      call: the step.
      pack: maps arrays by name to the fixed arguments and the state.
    """

    def __init__(self, call: Callable, pack: Callable):
        self.call, self.pack = call, pack
        self.compile_seconds: float | None = None
        self.temporary: int | None = None
        self.compiled: Any = None

    def place(self, arrays: Any) -> Any:
        return list(jax.block_until_ready(self.pack(arrays)))

    def compile(self, placed: Any) -> None:
        lowered = jax.jit(self.call, donate_argnums=1).lower(*placed)
        self.compiled = lowered.compile()
        self.temporary = int(self.compiled.memory_analysis().temp_size_in_bytes)

    def run(self, placed: Any) -> Any:
        y, placed[1] = self.compiled(*placed)
        return y

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def take(self, result: Any) -> dict[str, np.ndarray]:
        return {"output": np.asarray(result)}

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        return None


def _built(make: Callable, w: Workload, which: str) -> Any:
    return make(w)


def layer_of(w: Workload, arrays: Any) -> Any:
    """Returns this library's layer; its weights are from `arrays`, a latent one's from the seed."""
    mask = CAUSAL if w.window is None else w.rule
    D, N, H = w.features, w.heads, w.width
    if w.store == "latent":
        L, P = latent_widths(w)
        return LatentAttention(D, N, L, H, P, H, rngs=nnx.Rngs(w.seed), mask=mask)
    K = w.kv_heads or N
    layer = GroupedQueryAttention(D, N, K, H, rngs=nnx.Rngs(w.seed), mask=mask)
    for name, path in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
        kernel = getattr(layer, f"{path}_proj").kernel
        kernel[...] = jnp.asarray(arrays[f"{name}.weight"])
    return layer


def keys_and_values(w: Workload, arrays: Any) -> tuple[Any, Any]:
    """Keys and values of all tokens, `B T K H`; for a latent cache, the latent and None."""
    layer, x = layer_of(w, arrays), jnp.asarray(arrays["x"])
    if isinstance(layer, LatentAttention):
        latent, shared = layer.kv_latent(x, None)
        return jnp.concatenate([latent, shared[..., 0, :]], -1)[..., None, :], None
    shape = (*x.shape[:2], -1, w.width)
    return layer.k_proj(x).reshape(shape), layer.v_proj(x).reshape(shape)


def tokens_of(w: Workload, arrays: Any) -> np.ndarray:
    """The new token of each row, `B 1 D`."""
    return arrays["x"][np.arange(w.batch), lengths(w) - 1][:, None]


def _flax_attn(w: Workload) -> StepProgram:
    def pack(arrays: Any) -> Any:
        graph, params = nnx.split(layer_of(w, arrays))
        store = Int8() if w.store == "int8" else None
        layer = nnx.merge(graph, params)
        empty = layer.init_cache(w.batch, w.length, window=w.window, store=store)
        past, places = lengths(w)[:, None] - 1, np.arange(w.stored)[None]
        in_window = (places < past) & (places >= past - (w.window or w.length))
        places = jnp.asarray(np.where(in_window, places, -1), jnp.int32)
        full = jax.jit(Cache.append)(empty, *keys_and_values(w, arrays), places)
        graphs.append(graph)
        return (params, jnp.asarray(tokens_of(w, arrays)), jnp.asarray(past[:, 0], jnp.int32)), full

    def call(fixed: Any, state: Cache) -> Any:
        params, x, length = fixed
        return nnx.merge(graphs[-1], params)(x, cache=replace(state, length=length))

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _nnx(w: Workload) -> StepProgram:
    def pack(arrays: Any) -> Any:
        shared: dict[str, Any] = {"num_kv_heads": w.kv_heads} if w.kv_heads else {}
        sizes: dict[str, Any] = {"num_heads": w.heads, "in_features": w.features, **shared}
        module: Any = nnx.MultiHeadAttention(**sizes, use_bias=False, decode=True, rngs=nnx.Rngs(0))
        for name in ("query", "key", "value", "out"):
            kernel = getattr(module, name).kernel
            kernel[...] = jnp.asarray(arrays[f"{name}.weight"]).reshape(kernel.shape)
        module.init_cache((w.batch, w.length, w.features))
        past = w.stored - 1
        for slots, new in zip(
            (module.cached_key, module.cached_value), keys_and_values(w, arrays), strict=True
        ):
            slots[...] = slots[...].at[:, :past].set(new[:, :past])
        graph, params, state = nnx.split(module, nnx.Param, ...)
        graphs.append(graph)
        return (params, jnp.asarray(tokens_of(w, arrays))), state

    def call(fixed: Any, state: Any) -> Any:
        module = nnx.merge(graphs[-1], fixed[0], state)
        module.cache_index[...] = jnp.full_like(module.cache_index[...], w.stored - 1)
        y = module(fixed[1])
        return y, nnx.split(module, nnx.Param, ...)[2]

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _recomputed(w: Workload) -> StepProgram:
    def pack(arrays: Any) -> Any:
        graph, params = nnx.split(layer_of(w, arrays))
        graphs.append(graph)
        return (params, jnp.asarray(arrays["x"])), jnp.zeros(())

    def call(fixed: Any, state: Any) -> Any:
        y = nnx.merge(graphs[-1], fixed[0])(fixed[1])
        return y[np.arange(w.batch), lengths(w) - 1][:, None], state

    graphs: list[Any] = []
    return StepProgram(call, pack)


def _read(w: Workload, which: str) -> StepProgram:
    """A matvec that reads, in float32, as many bytes as a step reads from the cache, once each."""
    rows = max(1, bytes_read(w) // 4 // ONES)
    return StepProgram(
        lambda fixed, state: (fixed[0] @ fixed[1], state),
        lambda arrays: ((jnp.ones((rows, ONES)), jnp.ones(ONES)), jnp.zeros(())),
    )


def _prove(build: Callable, w: Workload, which: str) -> Proof:
    """Verifies the step's output in a few rows against the plain formula in float64."""
    program: StepProgram | TorchProgram = build(w, which)
    placed = program.place(w.arrays())
    if program.compile_seconds is None:
        program.compile(placed)
    result = program.run(placed)
    program.wait(result)
    rows = np.unique([0, w.batch // 2, w.batch - 1])
    plain, truth = references(w)
    got = program.take(result)["output"][rows]
    verdict = judge.same_precision(got, plain, truth, w.dtype)
    wrong = f"the step is off by {verdict.error:.1e}, the limit is {verdict.limit:.1e}"
    return Proof(verdict.error, verdict.limit, "" if verdict.ok else wrong)


@cache
def references(w: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The plain formula's output in the verified rows, in float32 and in float64."""
    arrays = w.arrays()
    rows = np.unique([0, w.batch // 2, w.batch - 1])
    few = {**arrays, "x": arrays["x"][rows]}
    keys_values = keys_and_values(w, few) if w.store == "int8" else None
    if keys_values is not None:  # the cache rounds what it stores: compare rounded
        rounded = (Int8().quantize(x) for x in keys_values)
        keys_values = tuple(np.asarray(x.dequantized(jnp.float32)) for x in rounded)
    plain = _formula(w, few, rows, keys_values, np.float32)
    with jax.enable_x64(True):
        return plain, _formula(w, few, rows, keys_values, np.float64)


def _formula(
    w: Workload, arrays: Any, rows: np.ndarray, keys_values: Any, dtype: Any
) -> np.ndarray:
    """`softmax(q k / sqrt(H)) v` of the last token of each row, after the output projection."""
    outputs = []
    wide = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    for i, length in enumerate(lengths(w)[rows]):
        x = wide["x"][i : i + 1, max(0, length - (w.window or length)) : length]
        if w.store == "latent":
            layer = layer_of(w, arrays)
            nnx.update(layer, jax.tree.map(lambda p: p.astype(dtype), nnx.state(layer)))
            q, k, v = layer.heads(
                layer.queries(layer.q_latent(x), None), layer.kv_latent(x, None), False
            )
            q, out = q[:, -1], layer.o_proj.kernel[...]
        else:
            part = slice(max(0, length - (w.window or length)), length)
            shape = (1, x.shape[1], -1, w.width)
            q = (x[:, -1] @ wide["query.weight"]).reshape(1, -1, w.width)
            new = ((x @ wide[f"{name}.weight"]).reshape(shape) for name in ("key", "value"))
            k, v = (
                new
                if keys_values is None
                else (jnp.asarray(y[i : i + 1, part], dtype) for y in keys_values)
            )
            k, v = (jnp.repeat(y, w.heads // y.shape[2], 2) for y in (k, v))
            out = wide["out.weight"]
        logits = jnp.einsum("bnh,bsnh->bns", q, k) / np.sqrt(q.shape[-1]).astype(dtype)
        o = jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(logits), v)
        outputs.append(np.asarray(o.reshape(1, 1, -1) @ out))
    return np.concatenate(outputs)
