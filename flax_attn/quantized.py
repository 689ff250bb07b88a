"""8-bit quantization of cached keys and values, with one scale per token and head.

scale = max |x| / most                     *B K S, where most is 127, or 448 in float8
values = round(x / scale)                  *B K S H
x' = values * scale
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._internal.types import frozen, wide


@frozen
class Quantized:
    """Eight-bit values, and a scale for each token and head: `values * scale`. Raises nothing.

    Also called: quantized KV cache, INT8 or FP8 KV cache.

    Args:
      values: `... H`, in a cache `*B K S H`; int8 or float8_e4m3fn.
      scale: `...`, in float32 or wider.

    Source: Dettmers et al., "LLM.int8()", 2022, section 2.1.

    >>> store = Int8().quantize(jnp.asarray([[[1.0, -2.0]]]))
    >>> store.values.tolist(), store.shape
    ([[[64, -127]]], (1, 1, 2))
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values, `*B K S H`."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.values.dtype

    def dequantized(self, dtype: Any) -> jax.Array:
        """`values * scale`, multiplied in float32 or wider."""
        kind = self.scale.dtype
        return (self.values.astype(kind) * self.scale[..., None]).astype(dtype)


class Store:
    """Base class of 8-bit formats for keys and values."""

    dtype: ClassVar[Any]
    most: ClassVar[float]

    def quantize(self, x: Float[Array, "... H"]) -> Quantized:
        """Rounds x to the nearest multiples of each token's scale.

        Zeros, and values too small for a scale, become zeros. If a head of a token contains NaN or
        infinity, all of it becomes NaN, since its scale is not finite.

        Raises:
          TypeError: if `x` is not floating.
        """
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{type(self).__name__} stores floating arrays; got {x.dtype}.")
        x = x.astype(wide(x.dtype))
        scale = jnp.max(jnp.abs(x), axis=-1) / self.most
        scale = jnp.where(scale < jnp.finfo(scale.dtype).tiny, 1, scale)
        finite = jnp.isfinite(scale)
        values = jnp.where(finite[..., None], x / jnp.where(finite, scale, 1)[..., None], 0)
        values = jnp.clip(values, -self.most, self.most)
        if jnp.issubdtype(self.dtype, jnp.integer):
            values = jnp.round(values)
        return Quantized(values.astype(self.dtype), scale)


@frozen
class Int8(Store):
    """Integers in [-127, 127] times the scale, with an error of at most half a scale.

    Also called: INT8 KV cache.

    Raises:
      TypeError: by `quantize`, for arrays that are not floating.

    Source: Dettmers et al., "LLM.int8()", 2022, whose vectors are rows of activations.

    >>> store = Int8().quantize(jnp.asarray([[[0.0, 0.0]]]))
    >>> store.scale.tolist(), store.dequantized(jnp.float32).tolist()
    ([[1.0]], [[[0.0, 0.0]]])
    """

    dtype: ClassVar = jnp.dtype(jnp.int8)
    most: ClassVar = 127.0


@frozen
class Float8(Store):
    """float8_e4m3fn: four significant bits, values up to 448.

    Also called: FP8 KV cache, E4M3.

    It saves memory, not time: on a CPU attention takes several times as long as in float32, since
    XLA's conversion is slow.

    Raises:
      TypeError: by `quantize`, for arrays that are not floating.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022.

    >>> Float8().quantize(jnp.ones((1, 2, 4))).values.dtype.name
    'float8_e4m3fn'
    """

    dtype: ClassVar = jnp.dtype(jnp.float8_e4m3fn)
    most: ClassVar = 448.0
