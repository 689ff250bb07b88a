"""What wrong texts need and right ones do not: the subjects import it for the rows' sake."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .blend import mix

Change = Callable[[jax.Array], jax.Array]


def arriving(x: jax.Array, change: Change) -> jax.Array:
    """`x`, its gradient changed on arrival."""

    @jax.custom_vjp
    def passes(y):
        return y

    passes.defvjp(lambda y: (y, None), lambda _, g: (change(g),))
    return passes(x)


def same(x: Any) -> Any:
    return x


def through(dtype: Any) -> Change:
    """A cast there and back."""
    return lambda x: x.astype(dtype).astype(x.dtype)


def linear_in_float32(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    narrow = [y.astype(jnp.float32) for y in (x, kernel, bias)]
    return (narrow[0] @ narrow[1] + narrow[2]).astype(x.dtype)


class Linear(nnx.Linear):
    """With gradients of kernel and bias that are changed on arrival."""

    def __init__(self, *sizes: int, rngs: nnx.Rngs, kernel: Change = same, bias: Change = same):
        super().__init__(*sizes, rngs=rngs)
        self.changes = (kernel, bias)

    def __call__(self, x):
        kernel, bias = self.changes
        return x @ arriving(self.kernel[...], kernel) + arriving(self.bias[...], bias)


class LayerNorm(nnx.LayerNorm):
    """With gradients of mean and variance, and of the gain, that are changed on arrival."""

    def __init__(
        self,
        width: int,
        epsilon: float,
        rngs: nnx.Rngs,
        statistics: Change = same,
        scale: Change = same,
    ):
        super().__init__(width, epsilon=epsilon, rngs=rngs)
        self.changes = (statistics, scale)

    def __call__(self, x):
        statistics, gain = self.changes
        mean = arriving(x.mean(-1, keepdims=True), statistics)
        var = arriving(x.var(-1, keepdims=True), statistics)
        root = jax.lax.rsqrt(var + self.epsilon)
        return (x - mean) * root * arriving(self.scale[...], gain) + self.bias[...]


class Dropout(nnx.Dropout):
    """Draws as `nnx.Dropout` does; `finish(x, keep)` makes what it will of the mask."""

    def __init__(
        self, rate: float, finish: Callable[..., jax.Array], rngs: nnx.Rngs, low: bool = False
    ):
        super().__init__(rate, rngs=rngs)
        self.finish, self.low = finish, low

    def __call__(self, x):
        keep = jax.random.bernoulli(self.rngs(), 1 - self.rate, x.shape)
        bad = self.finish(x, keep)
        right = jnp.where(keep, x / (1 - self.rate), 0.0)
        return mix(lambda: right, lambda: bad) if self.low else bad


def in_pairs(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Pairs of neighbours turned, not halves."""
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def repeated(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Halves turned by angles that are repeated as for pairs of neighbours."""
    angle = jnp.repeat(angle, 2, axis=-1)[..., None, :]
    x1, x2 = jnp.split(x, 2, axis=-1)
    return x * jnp.cos(angle) + jnp.concatenate([-x2, x1], axis=-1) * jnp.sin(angle)


def first(ids: jax.Array) -> jax.Array:
    """Where an id occurs for the first time."""
    found = jnp.argmax(ids[..., None] == ids.ravel(), axis=-1)
    return found == jnp.arange(ids.size).reshape(ids.shape)


def softmax_in_blocks(scores: jax.Array, size: int = 4) -> jax.Array:
    """Right, and online: the maximum and the sum are carried from block to block."""
    blocks = [scores[..., i : i + size] for i in range(0, scores.shape[-1], size)]
    top, total = jnp.full_like(scores[..., :1], -1e30), jnp.zeros_like(scores[..., :1])
    for block in blocks:
        new = jnp.maximum(top, block.max(-1, keepdims=True))
        total = total * jnp.exp(top - new) + jnp.exp(block - new).sum(-1, keepdims=True)
        top = new
    return jnp.exp(scores - top) / total


def exchanged(w: Mapping[str, np.ndarray], one: str, other: str) -> dict[str, np.ndarray]:
    """Weights by path, those with one name in it and those with another exchanged."""
    ones = {path.replace(one, other): x for path, x in w.items() if one in path}
    others = {path.replace(other, one): x for path, x in w.items() if other in path}
    return {**w, **ones, **others}


def by_head(array: np.ndarray, heads: int) -> np.ndarray:
    """The last axis as heads and their channels."""
    return array.reshape(*array.shape[:-1], heads, -1)


def split_by_heads(w: Mapping[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    """Kernels of queries, keys and values of a fused (3 n h) that was split as (n 3 h)."""
    paths = [f"layers.0.attn.{x}_proj.kernel" for x in "qkv"]
    fused = np.concatenate([w[path] for path in paths], axis=-1)
    parts = np.moveaxis(fused.reshape(len(fused), heads, 3, -1), 2, 0)
    return {**w, **{path: x.reshape(len(x), -1) for path, x in zip(paths, parts, strict=True)}}


def key_heads_reversed(w: Mapping[str, np.ndarray], heads: int) -> dict[str, np.ndarray]:
    """The same function: key heads in reverse order, and what belongs to each with it."""

    def change(path: str, x: np.ndarray) -> np.ndarray:
        if path.endswith("o_proj.kernel"):
            return by_head(x.T, heads)[:, ::-1].reshape(x.T.shape).T
        if any(name in path for name in ("q_proj", "k_proj", "v_proj")):
            return by_head(x, heads)[..., ::-1, :].reshape(x.shape)
        return x

    return {path: change(path, x) for path, x in w.items()}


def times(factor: float) -> Callable[..., dict[str, Any]]:
    """A call of torch's module whose logits are spoilt."""

    def call(module: Any, **inputs: Any) -> dict[str, Any]:
        out = module(**inputs)
        return {**out, "logits": out["logits"] * factor}

    return call


def results(module: Any, inputs: Mapping[str, np.ndarray]) -> jax.Array:
    """Logits of torch's module itself, in float64."""
    import torch

    with torch.no_grad():
        given = {name: torch.from_numpy(x) for name, x in inputs.items()}
        return jnp.asarray(copy.deepcopy(module).double()(**given)["logits"].numpy())
