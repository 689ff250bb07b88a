"""Arrays of keys and values in eight bits, with one scale for each token and head."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import frozen, wide


@frozen
class Quantized:
    """`values * scale`: eight bits a number, and one scale for all numbers of a token and a head.

    Attributes:
      values: `... H`, int8 or float8_e4m3fn.
      scale: `...`, float32 or wider.

    >>> Int8().quantize(jnp.asarray([[1.0, -2.0]])).dequantized(jnp.float32).round(2).tolist()
    [[1.01, -2.0]]
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that it stands for."""
        return self.values.shape

    def dequantized(self, dtype: Any) -> jax.Array:
        """The numbers that it stands for."""
        kind = self.scale.dtype
        return (self.values.astype(kind) * self.scale[..., None]).astype(dtype)


@frozen
class Int8:
    """Stores whole numbers from -127 to 127. Raises nothing.

    Source: Dettmers et al., "LLM.int8()", 2022, section 2.1, by tokens and heads.

    >>> Int8().quantize(jnp.zeros((5, 4))).scale.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """

    def quantize(self, x: Float[Array, "... H"]) -> Quantized:
        """`x` with a scale of max |x| / 127, or of 1 where all is zero; NaN stays in the scale."""
        scale = _scale(x, 127)
        return Quantized(jnp.round(x / scale[..., None]).astype(jnp.int8), scale)


@frozen
class Float8:
    """Stores floats of four bits of exponent and three of mantissa, up to 448. Raises nothing.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    >>> Float8().quantize(jnp.ones((5, 4))).values.dtype.name
    'float8_e4m3fn'
    """

    def quantize(self, x: Float[Array, "... H"]) -> Quantized:
        """`x` with a scale of max |x| / 448, or of 1 where all is zero; NaN stays in the scale."""
        scale = _scale(x, 448)
        return Quantized((x / scale[..., None]).astype(jnp.float8_e4m3fn), scale)


def _scale(x: jax.Array, most: int) -> jax.Array:
    largest = jnp.max(jnp.abs(x.astype(wide(x.dtype))), axis=-1)
    return jnp.where(largest == 0, 1, largest / most)
