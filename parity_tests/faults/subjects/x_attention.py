"""Attention of the package x-transformers: two key heads for six query heads, and a port."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_attn.taps import tap

from ...port import Port

WIDTH, HEADS, KV_HEADS, HEAD_DIM, DROPOUT = 20, 6, 2, 5, 0.3


def theirs() -> torch.nn.Module:
    """`x_transformers.x_transformers.Attention`, causal; importing it warns of `torch.jit`."""
    pytest.importorskip("x_transformers", reason="its attention is the original")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from x_transformers.x_transformers import Attention

    return Attention(
        WIDTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        dim_head=HEAD_DIM,
        dropout=DROPOUT,
        causal=True,
        flash=False,
        qk_norm=False,
    )


class Ours(nnx.Module):
    """The same; names are theirs, and so are the taps'."""

    def __init__(self, *, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)

        self.to_q = linear(WIDTH, HEADS * HEAD_DIM)
        self.to_k = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.to_v = linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.to_out = linear(HEADS * HEAD_DIM, WIDTH)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)

    def tiled(self, x: jax.Array) -> jax.Array:
        return jnp.tile(x, (1, HEADS // KV_HEADS, 1, 1))  # query head i looks at key head i % 2

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        def split(y: jax.Array) -> jax.Array:
            return y.reshape(*y.shape[:-1], -1, HEAD_DIM).swapaxes(1, 2)

        q, k, v = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))  # B N T H
        scores = q @ self.tiled(k).mT * HEAD_DIM**-0.5  # B N T S
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool), 0)
        seen = past[None, None] & mask[:, None, None]
        scores = tap("attend.scores", jnp.where(seen, scores, -jnp.inf))
        weights = tap("attend.weights", jax.nn.softmax(scores, axis=-1))
        out = tap("attend.context", self.dropout(weights) @ self.tiled(v))  # B N T H
        out = self.to_out(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))  # B T D
        return jnp.where(mask[..., None], out, 0)  # theirs hides padded queries too


def inputs() -> dict[str, np.ndarray]:
    """Three sequences of seven, padded at their ends."""
    x = np.random.RandomState(0).standard_normal((3, 7, WIDTH))
    return {"x": x, "mask": np.arange(7) < np.array([[7], [4], [5]])}


PORTS = [
    Port("x-transformers", theirs, Ours, lambda seed: inputs()),
    Port("x-transformers in training", theirs, Ours, lambda seed: inputs(), (), {"train": True}),
]
