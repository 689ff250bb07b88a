"""Axial attention: along each axis of an image or volume separately (Ho et al., 2019)."""

from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from .._internal.checks import check_divides, check_input, check_positive
from ..attend import attend
from ..masks import FULL, Dense
from ._common import check_tokens, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import zero_padding
from ._layer import Layer


class AxialAttention(Layer):
    """The sum over the axes of multi-head attention along each, with separate weights.

    Also called: row and column attention.

    Each line along an axis is a separate sequence, so that an image of Y X tokens costs
    Y X (Y + X) products instead of (Y X)^2. With `summed=False` the axes are applied in sequence,
    each to the output of the previous one.

    Shapes: x `*B A1 ... An dim` -> `*B A1 ... An dim`, with n axes.

    Args:
      dim: width of a token, C.
      num_heads: number of heads; must divide dim.
      axes: number of axes before the last one, 2 for an image.
      summed: whether the axes' results are added, or the axes applied in sequence.
      head_dim: width of a head; None for dim / num_heads.
      dropout, kernel_init, bias_init, rngs, dtype, param_dtype: as in `GroupedQueryAttention`.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x or valid do not fit.
      TypeError: if x is not floating, or valid not boolean.

    Source: Ho et al., "Axial Attention in Multidimensional Transformers", 2019; names as in the
    package axial-attention.

    >>> layer = AxialAttention(6, 2, 2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 4, 5, 6))).shape
    (3, 4, 5, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        axes: int,
        *,
        summed: bool = True,
        head_dim: int | None = None,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads, axes=axes)
        part = check_divides("num_heads", num_heads, "dim", dim)
        self.head_dim = part if head_dim is None else head_dim
        check_positive(head_dim=self.head_dim)
        self.axes, self.summed, width = axes, summed, num_heads * self.head_dim
        init = LayerInit(**more)
        self.to_q = nnx.List([init.linear(dim, width, use_bias=False) for _ in range(axes)])
        self.to_kv = nnx.List([init.linear(dim, 2 * width, use_bias=False) for _ in range(axes)])
        self.to_out = nnx.List([init.linear(width, dim) for _ in range(axes)])
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B C"],
        *,
        valid: Bool[Array, "*B"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B C"]:
        """Attention along each axis of x.

        Args:
          x: the tokens, `*B A1 ... An C`.
          valid: which tokens are real, `*B A1 ... An`. Padding is masked out,
            and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        x = _check_axes(x, self.to_q[0].in_features, self.axes)
        is_valid = None if valid is None else check_tokens("valid", valid, x)
        total = 0 * x
        for i in range(self.axes):
            x = zero_padding(x, is_valid)
            made = self._along(i, x, is_valid, deterministic)
            total = total + made
            x = x if self.summed else made
        return zero_padding(total if self.summed else x, is_valid)

    def _along(self, i: int, x: Array, is_valid: Array | None, deterministic: bool | None) -> Array:
        """Attention along axis i, which is moved to the second last axis."""
        axis = i - self.axes - 1
        lines = jnp.moveaxis(x, axis, -2)  # ... T C
        q, (k, v) = self.to_q[i](lines), jnp.split(self.to_kv[i](lines), 2, axis=-1)
        q, k, v = (split_heads(y, self.head_dim) for y in (q, k, v))  # ... T N H
        visible = FULL
        if is_valid is not None:
            visible = Dense(jnp.moveaxis(is_valid, axis + 1, -1)[..., None, None, :])
        drop = None if self.dropout is None else self.dropout(deterministic)
        o = attend(q, k, v, mask=visible, dropout=drop)  # ... T N H
        return jnp.moveaxis(self.to_out[i](merge_heads(o)), -2, axis)


def _check_axes(x: Any, width: int, axes: int) -> Array:
    if jnp.ndim(x) > 1 and (jnp.ndim(x) < axes + 1 or jnp.shape(x)[-1] != width):
        names = "".join(f"axis {i + 1}, " for i in range(axes))
        raise ValueError(f"x must have shape (*batch, {names}{width}); got {jnp.shape(x)}.")
    return check_input("x", x, width)
