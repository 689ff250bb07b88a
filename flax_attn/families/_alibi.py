"""ALiBi by the position of the key, as in Bloom and Falcon, instead of by the distance.

Under a causal mask both give the same weights, since they differ by a constant for each query.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .._internal.types import frozen
from ..positions import alibi_slopes
from ..scores import Score


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
