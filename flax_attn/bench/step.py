"""One decoding step of a whole layer with its cache: the task and its truth."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..cache import Int8
from ..layers import GroupedQueryAttention, LatentAttention
from ..masks import CAUSAL, Window
from .task import Arrays, Task


@dataclass(frozen=True)
class Step(Task):
    """One decoding step of a causal layer without biases, in a cache of `length` slots.

    Attributes:
      stored: number of tokens in the longest row, including the new one; row b of B has a share of
        `(b + 1) / B`.
      kv_heads: K, 0 for N.
      window: number of visible keys, including the new one; None for all.
      store: "int8", or "latent" for keys and values from one latent; else "".
    """

    stored: int = 1
    kv_heads: int = 0
    window: int | None = None
    store: str = ""

    by_least = True  # the least timing is the least affected by other work on the machine

    @property
    def table(self) -> str:
        return f"one step of a whole layer, {self.heads} heads of width {self.width}, {self.dtype}"

    @property
    def cells(self) -> dict[str, str]:
        kind = self.store or (f"ring of {self.window}" if self.window else "static")
        least, most = self.lengths[[0, -1]]
        stored = str(most) if self.batch == 1 else f"{least} .. {most}"
        sizes = {"slots": str(self.length), "stored": stored, "B": str(self.batch)}
        return {**sizes, "K": str(self.kv_heads or self.heads), "cache": kind}

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each row, including the new one, `B`."""
        return np.maximum(1, self.stored * np.arange(1, self.batch + 1) // self.batch)

    @property
    def bytes(self) -> int:
        """Bytes of the cache read in one step: keys and values of all visible tokens."""
        heads = self.kv_heads or self.heads
        token = {"": 8 * heads * self.width, "int8": 2 * heads * (self.width + 4)}
        token["latent"] = 4 * sum(self.latent_widths)
        return int(np.minimum(self.lengths, self.window or self.length).sum()) * token[self.store]

    @property
    def latent_widths(self) -> tuple[int, int]:
        """L and P: a third of the model width for the latent, half a head for the shared key."""
        return max(2, self.features // 3), max(2, self.width // 2)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        D, kv = self.features, (self.kv_heads or self.heads) * self.width
        shapes = {"x": (self.batch, self.stored, D), "query.weight": (D, D)}
        return {**shapes, "key.weight": (D, kv), "value.weight": (D, kv), "out.weight": (D, D)}

    @property
    def rows(self) -> np.ndarray:
        """Batch entries that are verified."""
        return np.unique([0, self.batch // 2, self.batch - 1])

    def verified(self, results: Arrays) -> Arrays:
        return {"output": results["output"][self.rows]}

    def references(self) -> tuple[Arrays, Arrays]:
        return _outputs(self)


def layer_of(task: Step, arrays: Any) -> Any:
    """Returns this library's layer; its weights are from `arrays`, a latent one's from the seed."""
    mask = CAUSAL if task.window is None else Window(task.window - 1, 0)
    D, N, H = task.features, task.heads, task.width
    if task.store == "latent":
        L, P = task.latent_widths
        return LatentAttention(D, N, L, H, P, H, rngs=nnx.Rngs(task.seed), mask=mask)
    K = task.kv_heads or N
    layer = GroupedQueryAttention(D, N, K, H, rngs=nnx.Rngs(task.seed), mask=mask)
    for name, path in (("query", "q"), ("key", "k"), ("value", "v"), ("out", "o")):
        kernel = getattr(layer, f"{path}_proj").kernel
        kernel[...] = jnp.asarray(arrays[f"{name}.weight"])
    return layer


def keys_and_values(task: Step, arrays: Any) -> tuple[Any, Any]:
    """Keys and values of all tokens, `B T K H`; for a latent cache, the latent and None."""
    layer, x = layer_of(task, arrays), jnp.asarray(arrays["x"])
    if isinstance(layer, LatentAttention):
        latent, shared = layer.kv_latent(x, None)
        return jnp.concatenate([latent, shared[..., 0, :]], -1)[..., None, :], None
    shape = (*x.shape[:2], -1, task.width)
    return layer.k_proj(x).reshape(shape), layer.v_proj(x).reshape(shape)


@cache
def _outputs(task: Step) -> tuple[Arrays, Arrays]:
    """The plain formula's output in the verified rows, in float32 and in float64."""
    arrays, rows = task.inputs(), task.rows
    few = {**arrays, "x": arrays["x"][rows]}
    keys_values = keys_and_values(task, few) if task.store == "int8" else None
    if keys_values is not None:  # the cache rounds what it stores: compare rounded
        rounded = (Int8().quantize(x) for x in keys_values)
        keys_values = tuple(np.asarray(x.dequantized(jnp.float32)) for x in rounded)
    plain = _formula(task, few, keys_values, np.float32)
    with jax.enable_x64(True):
        truth = _formula(task, few, keys_values, np.float64)
    return {"output": plain}, {"output": truth}


def _formula(task: Step, arrays: Any, keys_values: Any, dtype: Any) -> np.ndarray:
    """`softmax(q k / sqrt(H)) v` of the last token of each row, after the output projection."""
    outputs = []
    wide = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    for i, length in enumerate(task.lengths[task.rows]):
        x = wide["x"][i : i + 1, max(0, length - (task.window or length)) : length]
        if task.store == "latent":
            layer = layer_of(task, arrays)
            nnx.update(layer, jax.tree.map(lambda p: p.astype(dtype), nnx.state(layer)))
            queries = layer.queries(layer.q_latent(x), None)
            q, k, v = layer.heads(queries, layer.kv_latent(x, None), False)
            q, out = q[:, -1], layer.o_proj.kernel[...]
        else:
            part = slice(max(0, length - (task.window or length)), length)
            shape = (1, x.shape[1], -1, task.width)
            q = (x[:, -1] @ wide["query.weight"]).reshape(1, -1, task.width)
            if keys_values is None:
                k, v = ((x @ wide[f"{name}.weight"]).reshape(shape) for name in ("key", "value"))
            else:
                k, v = (jnp.asarray(y[i : i + 1, part], dtype) for y in keys_values)
            k, v = (jnp.repeat(y, task.heads // y.shape[2], 2) for y in (k, v))
            out = wide["out.weight"]
        logits = jnp.einsum("bnh,bsnh->bns", q, k) / np.sqrt(q.shape[-1]).astype(dtype)
        o = jnp.einsum("bns,bsnh->bnh", jax.nn.softmax(logits), v)
        outputs.append(np.asarray(o.reshape(1, 1, -1) @ out))
    return np.concatenate(outputs)
