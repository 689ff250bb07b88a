"""Norms of queries and keys, computed in float32 or wider: functions and modules.

The variance is never computed as `mean(x ** 2) - mean(x) ** 2`, which loses precision for large
means. An eps is required, since the defaults of torch, Flax and published models differ.
"""

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Float

from ._internal.arrays import aligned
from ._internal.checks import check_choice, check_positive
from ._internal.types import wide

Cast = Literal["before", "after"]


def rms_norm(
    x: Float[Array, "*X H"],
    scale: Float[Array, "*G"] | None = None,
    *,
    eps: float,
    plus_one: bool = False,
    cast: Cast = "after",
) -> Float[Array, "*X H"]:
    """`x / sqrt(mean(x ** 2) + eps) * scale` over the last axis, in the dtype of x.

    Args:
      x: the input.
      scale: broadcasts to the last axes of x; None for no scale.
      eps: added to the mean of squares.
      plus_one: whether to multiply by `1 + scale` (Gemma, Qwen3-Next).
      cast: whether to cast to the dtype of x "before" (Llama, Qwen3, T5) or "after" multiplying by
        the scale (Gemma, OLMo2, gpt-oss). Both are the same in float32 and float64.

    Raises:
      ValueError: for another cast, or plus_one without a scale.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    >>> rms_norm(jnp.asarray([2.0, -2.0]), eps=0.0).tolist()
    [1.0, -1.0]
    """
    check_choice("cast", cast, "before", "after")
    if plus_one and scale is None:
        raise ValueError("plus_one=True says that the gain is 1 + scale; pass a scale.")
    z = x.astype(wide(x.dtype))
    z = z * jnp.reciprocal(jnp.sqrt((z**2).mean(-1, keepdims=True) + eps))
    if scale is None:
        return z.astype(x.dtype)
    z = z.astype(x.dtype) if cast == "before" else z
    gain = aligned(scale, z)
    return (z * (1 + gain if plus_one else gain)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*X H"],
    scale: Float[Array, "*G"] | None = None,
    bias: Float[Array, "*G"] | None = None,
    *,
    eps: float,
) -> Float[Array, "*X H"]:
    """`(x - mean) / sqrt(mean((x - mean) ** 2) + eps) * scale + bias` over the last axis.

    Args:
      x: the input.
      scale, bias: broadcast to the last axes of x, such as `N H` for x of `*B T N H`; None for
        none.
      eps: added to the variance.

    Raises:
      TypeError: if scale or bias do not broadcast.

    Source: Ba et al., "Layer Normalization", 2016.

    >>> layer_norm(jnp.asarray([1.0, 3.0]), eps=0.0).tolist()
    [-1.0, 1.0]
    """
    z = x.astype(wide(x.dtype))
    z = z - z.mean(-1, keepdims=True)
    z = z * jnp.reciprocal(jnp.sqrt((z**2).mean(-1, keepdims=True) + eps))
    z = z if scale is None else z * aligned(scale, z)
    return (z if bias is None else z + aligned(bias, z)).astype(x.dtype)


def l2_norm(x: Float[Array, "*X H"], *, eps: float, floor: bool = False) -> Float[Array, "*X H"]:
    """`x / sqrt(sum(x ** 2) + eps)` over the last axis, in the dtype of x.

    Llama 4's class of this name is `rms_norm` without a scale instead.

    Args:
      x: the input.
      eps: added to the sum of squares (Qwen3-Next).
      floor: whether eps is a lower bound of the norm instead, `x / max(norm, eps)`
        (torch's `normalize`, Swin v2).

    Raises:
      ValueError: for a negative eps.

    Source: `torch.nn.functional.normalize`, and the code of Qwen3-Next.

    >>> l2_norm(jnp.asarray([0.0, 4.0]), eps=9.0).tolist()
    [0.0, 0.800000011920929]
    """
    _check_eps(eps)
    z = x.astype(wide(x.dtype))
    squares = (z**2).sum(-1, keepdims=True)
    if floor:  # sqrt is not differentiable at zero
        least = jnp.asarray(eps, z.dtype)
        small = squares <= least**2
        norm = jnp.where(small, least, jnp.sqrt(jnp.where(small, 1.0, squares)))
    else:
        norm = jnp.sqrt(squares + eps)
    return (z / norm).astype(x.dtype)


class RMSNorm(nnx.Module):
    """`rms_norm(x, scale)` with a trained `scale`, for `q_norm=` and `k_norm=`.

    Shapes: x `*X H` -> `*X H`; with `over_heads` `*B T N H` -> `*B T N H`.

    Args:
      features: H; with `over_heads` N H; None for no scale (Llama 4, NanoChat, Gemma 4's values).
      eps: added to the mean of squares.
      plus_one: whether to multiply by `1 + scale`, with a scale from zero (Gemma, Qwen3-Next).
      cast: "before" or "after" the scale, see `rms_norm`.
      over_heads: whether all heads of a token are normalised as one vector (OLMo2).
      scale_init: initializer of the scale; None for a factor of one.
      rngs: random keys for scale_init; otherwise not needed.
      param_dtype: of the scale.

    Raises:
      ValueError: for features below 1, another cast, a negative eps, plus_one or scale_init without
        features; in the call, for x of another width.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.

    >>> norm = RMSNorm(4, eps=1e-6)
    >>> norm(jnp.ones((2, 5, 3, 4))).shape
    (2, 5, 3, 4)
    """

    def __init__(
        self,
        features: int | None,
        *,
        eps: float,
        plus_one: bool = False,
        cast: Cast = "after",
        over_heads: bool = False,
        scale_init: Initializer | None = None,
        rngs: nnx.Rngs | None = None,
        param_dtype: Any = jnp.float32,
    ):
        check_choice("cast", cast, "before", "after")
        _check_eps(eps)
        if features is None and (plus_one or scale_init is not None):
            raise ValueError("plus_one and scale_init are of a gain; RMSNorm(None) has none.")
        shape = None if features is None else _shape(features)
        start = jnp.zeros if plus_one else jnp.ones
        self.scale = _param(shape, scale_init, start, rngs, param_dtype)
        self.eps, self.plus_one, self.over_heads = eps, plus_one, over_heads
        self.cast: Cast = cast

    def __call__(self, x: Float[Array, "*X H"]) -> Float[Array, "*X H"]:
        """Normalises x over H, or over N H with `over_heads`."""
        z = x.reshape(*x.shape[:-2], -1) if self.over_heads else x
        scale = None if self.scale is None else _gain_for(self.scale[...], z)
        z = rms_norm(z, scale, eps=self.eps, plus_one=self.plus_one, cast=self.cast)
        return z.reshape(x.shape)


class LayerNorm(nnx.Module):
    """`layer_norm(x, scale, bias)` with trained `scale` and `bias`, for `q_norm=` and `k_norm=`.

    Shapes: x `*B T N H` -> `*B T N H`.

    Args:
      features: H, or `(N, H)` for a separate scale per head (Cohere); None for no scale.
      eps: added to the variance.
      use_bias: whether there is a bias.
      scale_init: initializer of the scale; None for ones.
      rngs: random keys for scale_init; otherwise not needed.
      param_dtype: of scale and bias.

    Raises:
      ValueError: for features below 1, a negative eps, use_bias or scale_init without features; in
        the call, for x of another width.

    Source: Ba et al., "Layer Normalization", 2016.

    >>> norm = LayerNorm((3, 4), eps=1e-5)
    >>> norm(jnp.ones((2, 5, 3, 4))).shape
    (2, 5, 3, 4)
    """

    def __init__(
        self,
        features: int | tuple[int, ...] | None,
        *,
        eps: float,
        use_bias: bool = False,
        scale_init: Initializer | None = None,
        rngs: nnx.Rngs | None = None,
        param_dtype: Any = jnp.float32,
    ):
        _check_eps(eps)
        if features is None and (use_bias or scale_init is not None):
            raise ValueError("use_bias and scale_init need features; LayerNorm(None) has none.")
        shape = None if features is None else _shape(features)
        self.scale = _param(shape, scale_init, jnp.ones, rngs, param_dtype)
        self.bias = _param(shape if use_bias else None, None, jnp.zeros, rngs, param_dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B T N H"]) -> Float[Array, "*B T N H"]:
        """Normalises x over H."""
        scale = None if self.scale is None else _gain_for(self.scale[...], x)
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, scale, bias, eps=self.eps)


def _shape(features: int | tuple[int, ...]) -> tuple[int, ...]:
    shape = (features,) if isinstance(features, int) else tuple(features)
    check_positive(**{f"features[{i}]": n for i, n in enumerate(shape)})
    return shape


def _param(
    shape: tuple[int, ...] | None, init: Any, start: Any, rngs: nnx.Rngs | None, dtype: Any
) -> nnx.Param | None:
    if shape is None:
        return None
    if init is None:
        return nnx.Param(start(shape, dtype))
    if rngs is None:
        raise ValueError("scale_init draws initial values; pass rngs=.")
    return nnx.Param(init(rngs.params(), shape, dtype))


def _gain_for(scale: Array, z: Array) -> Array:
    if z.shape[z.ndim - scale.ndim :] != scale.shape:
        raise ValueError(f"The norm has a gain of shape {scale.shape}; got x of shape {z.shape}.")
    return scale


def _check_eps(eps: float) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must be zero or more; got {eps!r}.")
