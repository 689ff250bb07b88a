"""Blocks of generative models: Chameleon's quantizer, a diffusion transformer's adaptive norm."""

import jax
import jax.numpy as jnp
from flax import nnx

from .mistake import Block, Mistake, normal


def chameleon():
    from transformers import ChameleonVQVAEConfig
    from transformers.models.chameleon.modeling_chameleon import ChameleonVQVAEVectorQuantizer

    return ChameleonVQVAEVectorQuantizer(ChameleonVQVAEConfig(num_embeddings=11, embed_dim=5))


class Quantizer(nnx.Module):
    """The nearest row of a codebook for each pixel, with gradients straight through."""

    def __init__(self, *, rngs):
        self.embedding = nnx.Embed(11, 5, rngs=rngs)

    def loss(self, rows, x):
        stop = jax.lax.stop_gradient
        return jnp.mean((stop(rows) - x) ** 2) + 0.25 * jnp.mean((rows - stop(x)) ** 2)

    def through(self, rows, x):
        return x + jax.lax.stop_gradient(rows - x)

    def __call__(self, x):  # B H W C
        flat, table = x.reshape(-1, x.shape[-1]), self.embedding.embedding[...]
        gaps = (flat**2).sum(1, keepdims=True) + (table**2).sum(1) - 2 * flat @ table.T
        ids = jnp.argmin(gaps, 1)
        rows = self.embedding(ids).reshape(x.shape)
        return self.through(rows, x), self.loss(rows, x), ids


class NotThrough(Quantizer):
    def through(self, rows, x):
        return rows


class PaperLoss(Quantizer):
    """Beta at the commitment, as the paper has it."""

    def loss(self, rows, x):
        stop = jax.lax.stop_gradient
        return jnp.mean((rows - stop(x)) ** 2) + 0.25 * jnp.mean((stop(rows) - x) ** 2)


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

    def six(self, y):
        return jnp.split(y, 6, axis=-1)

    def modulated(self, x, scale, shift):
        return x * (1 + scale[:, None]) + shift[:, None]

    def __call__(self, x, condition):  # B T D, B D
        shift, scale, gate, *rest = self.six(self.linear(nnx.silu(condition)))
        return self.modulated(self.norm(x), scale, shift), gate, *rest


class ScaleFirst(AdaLayerNormZero):
    """In the order of the same file's final norm."""

    def six(self, y):
        scale, shift, *rest = jnp.split(y, 6, axis=-1)
        return shift, scale, *rest


class NoOne(AdaLayerNormZero):
    def modulated(self, x, scale, shift):
        return x * scale[:, None] + shift[:, None]


CHAMELEON = Block(
    "ChameleonVQVAEVectorQuantizer",
    chameleon,
    Quantizer,
    (normal("chameleon", 2, 3, 4, 5),),
    options={"torch_call": _pixels_last},
)
OMNI = Block(
    "Qwen2_5_OmniAdaLayerNormZero",
    omni,
    AdaLayerNormZero,
    (normal("omni", 2, 5, 7), normal("condition", 2, 7)),
)
FIRST = "output[0]"
GRADIENTS = "input 0|embedding.embedding|embedding"
MISTAKES = [
    Mistake(
        "the codebook's rows returned, without the straight-through gradient",
        CHAMELEON,
        GRADIENTS,
        "stop|detach|straight|blocked|cut|zero|missing",
        port=NotThrough,
    ),
    Mistake(
        "beta on the wrong one of the two losses",
        CHAMELEON,
        GRADIENTS,
        "stop|detach|factor|scale|exchang|swap|times|0.25",
        port=PaperLoss,
    ),
    Mistake(
        "scale before shift",
        OMNI,
        FIRST,
        "order|exchang|swap|permut|chunk|part",
        port=ScaleFirst,
    ),
    Mistake(
        "a factor of scale, where torch has 1 + scale",
        OMNI,
        FIRST,
        "1 +|gain|plus 1|1 more|left out|not added|without norm",
        port=NoOne,
    ),
]
