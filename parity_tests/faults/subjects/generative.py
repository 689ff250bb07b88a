"""Blocks of generative models: Chameleon's quantizer, a diffusion transformer's adaptive norm."""

import jax
import jax.numpy as jnp
from flax import nnx

from ...port import Port
from .draws import drawn


def chameleon():
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAEVectorQuantizer

    return ChameleonVQVAEVectorQuantizer(ChameleonVQVAEConfig(num_embeddings=11, embed_dim=5))


class Quantizer(nnx.Module):
    """The nearest row of a codebook for each pixel, with gradients straight through."""

    def __init__(self, *, rngs):
        self.embedding = nnx.Embed(11, 5, rngs=rngs)

    def __call__(self, x):  # B H W C
        flat, table = x.reshape(-1, x.shape[-1]), self.embedding.embedding[...]
        gaps = (flat**2).sum(1, keepdims=True) + (table**2).sum(1) - 2 * flat @ table.T
        ids = jnp.argmin(gaps, 1)
        rows = self.embedding(ids).reshape(x.shape)
        stop = jax.lax.stop_gradient
        loss = jnp.mean((stop(rows) - x) ** 2) + 0.25 * jnp.mean((rows - stop(x)) ** 2)
        return x + stop(rows - x), loss, ids


def _pixels_last(module, x):
    rows, loss, ids = module(x.movedim(-1, 1))
    return rows.movedim(1, -1), loss, ids


def omni():
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
        Qwen2_5_OmniAdaLayerNormZero,
    )

    return Qwen2_5_OmniAdaLayerNormZero(7)


class AdaLayerNormZero(nnx.Module):
    """A norm whose gain and bias come from a condition, and what the MLP behind it needs."""

    def __init__(self, *, rngs):
        self.linear = nnx.Linear(7, 42, rngs=rngs)
        self.norm = nnx.LayerNorm(7, epsilon=1e-6, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x, condition):  # B T D, B D
        shift, scale, gate, *rest = jnp.split(self.linear(nnx.silu(condition)), 6, axis=-1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate, *rest


PORTS = [
    Port(
        "ChameleonVQVAEVectorQuantizer",
        chameleon,
        Quantizer,
        drawn("chameleon", (2, 3, 4, 5)),
        options={"torch_call": _pixels_last},
    ),
    Port(
        "Qwen2_5_OmniAdaLayerNormZero",
        omni,
        AdaLayerNormZero,
        drawn("omni", (2, 5, 7), (2, 7)),
    ),
]
