"""Scores of published models: ALiBi by the position of the key, and logits that grow with it.

ALiBi by key position (Bloom, Falcon, MPT) and by distance give the same weights under a causal
mask, since they differ by a constant for each query.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.types import frozen
from ..positions import alibi_slopes
from ..scores import Score
from ._config import Config
from ._rope import Rope, original

_BETA = "llama_4_scaling_beta"
# Rotary parameters of Mistral's models with a temperature; the second is ignored there.
TEMPERATURE_FIELDS = (_BETA, "max_position_embeddings")


@frozen
class KeyAlibi(Score):
    """`logit + slopes[n] * k`, where k is the position of the key.

    Args:
      num_heads: N, which determines the slopes.

    >>> score = KeyAlibi(3)
    >>> float(score(jnp.asarray(1.0), 0, 2, 0, 4))
    2.0
    """

    num_heads: int

    def __call__(self, logits, b, n, q, k):
        slopes = jnp.asarray(alibi_slopes(self.num_heads), logits.dtype)
        return logits + slopes[n] * jnp.asarray(k).astype(logits.dtype)


@frozen
class RoundedKeyAlibi(Score):
    """`logit + factor * bfloat16(slopes[n] * k)`, with slopes and positions rounded first.

    Args:
      num_heads: N, which determines the slopes.
      factor: multiplier of the rounded bias.

    >>> score = RoundedKeyAlibi(3, 0.5)
    >>> float(score(jnp.asarray(1.0), 0, 2, 0, 257))  # in bfloat16 257 is 256
    33.0
    """

    num_heads: int
    factor: float

    def __call__(self, logits, b, n, q, k):
        slopes = bfloat16(jnp.asarray(np.float32(alibi_slopes(self.num_heads))))
        bias = bfloat16(slopes[n] * bfloat16(jnp.asarray(k).astype(jnp.float32)))
        return logits + bias.astype(logits.dtype) * jnp.asarray(self.factor, logits.dtype)


def bfloat16(x: jax.Array) -> jax.Array:
    """Rounds `x` to bfloat16, even where a compiler would keep more digits."""
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


@frozen
class Temperature(Score):
    """`logit * (1 + attn_scale * log(1 + floor((q + first) / floor_scale)))`, q the query's place.

    Args:
      floor_scale: how many places have the same factor.
      attn_scale: of the logarithm.
      first: the number of the first place, 1 in Llama 4 and 0 in Ministral 3.

    Source: Nakanishi, "Scalable-Softmax Is Superior for Attention", 2025, as Llama 4 uses it.

    >>> score = Temperature(floor_scale=2, attn_scale=1.0)
    >>> float(score(jnp.asarray(3.0), 0, 0, jnp.asarray(0), 0))
    3.0
    """

    floor_scale: float
    attn_scale: float
    first: int = 1

    AXES: ClassVar = {}
    reads = "query position"

    def __call__(self, logits, b, n, q, k):
        steps = jnp.floor((jnp.asarray(q).astype(logits.dtype) + self.first) / self.floor_scale)
        return logits * (1 + self.attn_scale * jnp.log1p(steps))


def temperature(config: Config, rope: Rope) -> Temperature:
    """`logit * (1 + beta log(1 + floor(q / length)))`, where `length` is the training length.

    Raises:
      ValueError: if the rotary parameters lack beta or the length.
    """
    beta, length = rope.get(_BETA), rope.get("original_max_position_embeddings")
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ValueError(f"{_BETA} must be a number in the rotary parameters; got {beta!r}.")
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        length = original(rope, config)
    if isinstance(length, bool) or not isinstance(length, int | float) or length <= 0:
        raise ValueError(
            "original_max_position_embeddings must be a length in the rotary parameters, which "
            f"the logits' temperature is counted by; got {length!r}."
        )
    return Temperature(length, beta, first=0)
