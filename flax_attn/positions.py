"""Positions: rotary embeddings in both layouts, and ALiBi's slopes; functions and plain data."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._arrays import is_count
from ._types import frozen, wide

Layout = Literal["half", "interleaved"]


def rotary_angles(
    positions: Int[Array, "*B T"], width: int, base: float, dtype: Any
) -> Float[Array, "*B T P"]:
    """`position * base ** (-2 i / width)` for each of the P = width // 2 pairs, in radians.

    Args:
      positions: integers.
      width: how many components are turned; an even number.
      base: the longest wavelength is about 2 pi base.
      dtype: of the angles.

    Raises:
      TypeError: for a name that is no dtype.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    >>> import jax.numpy as jnp
    >>> rotary_angles(jnp.asarray([0, 2]), 4, 4.0, jnp.float32).tolist()
    [[0.0, 0.0], [2.0, 1.0]]
    """
    exponent = jnp.arange(0, width, 2, dtype=dtype) / width
    rates = (jnp.asarray(base, dtype) ** -exponent).reshape((1,) * positions.ndim + (-1,))
    return positions[..., None].astype(dtype) * rates


def rotate(
    x: Float[Array, "*B T N H"], angles: Float[Array, "*#B T P"], layout: Layout = "half"
) -> Float[Array, "*B T N H"]:
    """Turns each pair `(a, b)` into `(a cos - b sin, b cos + a sin)`; other components pass.

    Args:
      x: queries or keys; its first 2 P components are turned.
      angles: radians, from `rotary_angles`.
      layout: pairs are `(i, i + P)` for "half" (GPT-NeoX, Llama) and `(2 i, 2 i + 1)` for
        "interleaved" (the paper, GPT-J).

    Raises:
      TypeError: if x and the angles do not broadcast.

    Source: Su et al., RoFormer, 2021.

    >>> import jax.numpy as jnp
    >>> x = jnp.asarray([1.0, 0.0]).reshape(1, 1, 2)
    >>> rotate(x, jnp.asarray([[jnp.pi / 2]])).round(4).ravel().tolist()
    [-0.0, 1.0]
    """
    pairs = angles.shape[-1]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]  # *B T 1 P
    turned, passed = x[..., : 2 * pairs].astype(angles.dtype), x[..., 2 * pairs :]
    axis = -2 if layout == "half" else -1
    split = (2, pairs) if layout == "half" else (pairs, 2)
    a, b = jnp.moveaxis(turned.reshape(*x.shape[:-1], *split), axis, 0)
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(
        *x.shape[:-1], 2 * pairs
    )
    return jnp.concatenate([turned.astype(x.dtype), passed], axis=-1)


@frozen
class Rotary:
    """Rotary positions as an object to hand to a layer: `rotary(x, positions=None)`.

    Args:
      base: the longest wavelength is about 2 pi base.
      layout: "half" or "interleaved", see `rotate`.
      width: how many components are turned; None turns all of them.

    Angles are computed in float32, or in float64 for float64 inputs. x is `*B T N H`, positions are
    integers that broadcast to `*B T`.

    Raises:
      ValueError: for another layout, an odd width, a base of zero or less; in use, if the width
        exceeds H or the positions do not fit.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    >>> import jax.numpy as jnp
    >>> Rotary()(jnp.ones((5, 3, 4))).shape
    (5, 3, 4)
    """

    base: float = 10_000.0
    layout: Layout = "half"
    width: int | None = None

    def __post_init__(self):
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f'layout must be "half" or "interleaved"; got {self.layout!r}.')
        if self.width is not None and (self.width < 0 or self.width % 2):
            raise ValueError(f"width must be an even count of components; got {self.width}.")
        if isinstance(self.base, int | float) and not self.base > 0:
            raise ValueError(f"base must be above zero; got {self.base}.")

    def __call__(
        self, x: Float[Array, "*B T N H"], positions: Int[Array, "*#B T"] | None = None
    ) -> Float[Array, "*B T N H"]:
        """`x` turned at `positions`, which are 0, 1, ... T - 1 unless given."""
        width = x.shape[-1] if self.width is None else self.width
        if width > x.shape[-1] or width % 2:
            raise ValueError(
                f"Rotary turns an even count of components; got {width} of width {x.shape[-1]}."
            )
        positions = jnp.asarray(np.arange(x.shape[-3]) if positions is None else positions)
        positions = _aligned(positions, x.shape[:-2])
        dtype = wide(x.dtype)
        return rotate(x, rotary_angles(positions, width, self.base, dtype), self.layout)


def _aligned(positions: Array, whole: tuple[int, ...]) -> Array:
    """`positions` with as many axes as `*B T`; ValueError unless it broadcasts over `*B`."""
    shape = (1,) * (len(whole) - positions.ndim) + positions.shape
    fits = len(shape) == len(whole) and shape[-1] == whole[-1]
    if not fits or any(n not in (1, of) for n, of in zip(shape, whole, strict=True)):
        raise ValueError(
            f"positions must broadcast to (*batch, length) = {whole}; got shape {positions.shape}."
        )
    return positions.reshape(shape)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, " N"]:
    """`2 ** (-8 i / n)`, i = 1 ... n; where N is no power of two, the odd ones of 2 n fill up.

    n is the largest power of two that is at most N. In float64 by numpy, and cast where they are
    used: with 12 heads the powers are no float32 numbers.

    Args:
      num_heads: N.

    Raises:
      ValueError: if `num_heads` is no whole number of at least 1.

    Source: Press et al., "Train Short, Test Long", 2022, and its code.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    if not is_count(num_heads, 1):
        raise ValueError(f"alibi_slopes needs a count of heads, 1 or more; got {num_heads!r}.")
    n = 2 ** (int(num_heads).bit_length() - 1)
    whole = 2.0 ** (-8.0 * np.arange(1, n + 1) / n)
    between = 2.0 ** (-8.0 * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([whole, between])[:num_heads]
