"""Spatial-reduction attention to a downsampled image (PVT, Wang et al., 2021)."""

from functools import partial
from typing import Unpack

from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_image, check_positive
from ..attend import attend
from ..masks import FULL, Mask, as_mask
from ..norms import LayerNorm
from ._common import as_module_data, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._layer import Layer


class SpatialReductionAttention(Layer):
    """`dense(attend(query(x), key(z), value(z)))`, z = layer_norm(sequence_reduction(x)).

    Also called: spatial-reduction attention (SRA), PVT attention.

    The reduction is a convolution with kernel and stride ratio x ratio, so that there are
    ratio ** 2 times fewer keys than queries. Remaining rows and columns are dropped, as in PVT.
    With ratio=1 there is neither convolution nor norm, and z is x.

    Shapes: x `*B Y X dim`, an image of Y rows and X columns -> `*B Y X dim`.

    Args:
      dim: width of a pixel, D.
      num_heads: number of heads, of width D / N; must divide dim.
      ratio: kernel size and stride of the convolution.
      qkv_bias: whether `query`, `key` and `value` have biases; `dense` and `sequence_reduction`
        always have one.
      eps: of the norm; 1e-6 in PVT's published configs, 1e-5 in the paper's code.
      mask: the default mask of a call, with Y X queries and (Y // ratio) (X // ratio) keys, both in
        row-major order; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of projections and convolution; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x or a mask do not fit, or x is smaller than ratio x ratio.
      TypeError: if x is not floating, or a mask not boolean.

    Source: Wang et al., "Pyramid Vision Transformer", 2021, section 3.3; names as in the published
    checkpoints, without `self` and `output`.

    >>> import jax.numpy as jnp
    >>> layer = SpatialReductionAttention(12, 3, ratio=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 4, 6, 12))).shape
    (2, 4, 6, 12)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        ratio: int,
        *,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads, ratio=ratio)
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        self.ratio, self.mask = ratio, as_module_data(as_mask(mask))
        init = LayerInit(**more)
        self.query = init.linear(dim, dim, use_bias=qkv_bias)
        self.key = init.linear(dim, dim, use_bias=qkv_bias)
        self.value = init.linear(dim, dim, use_bias=qkv_bias)
        self.dense = init.linear(dim, dim)
        norm = partial(LayerNorm, eps=eps, use_bias=True, param_dtype=init.param_dtype)
        self.sequence_reduction = _of_squares(dim, ratio, init) if ratio > 1 else None
        self.layer_norm = norm(dim) if ratio > 1 else None
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B Y X D"],
        *,
        mask: Mask | Array | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B Y X D"]:
        """Attention of x over its downsampled copy.

        Args:
          x: the image.
          mask: replaces the layer's; None keeps the layer's.
          deterministic: overrides `train()` and `eval()`.
        """
        x = check_image("x", x, self.query.in_features)
        pixels = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])  # *B T D
        z = self.reduced(x)  # *B S D
        q = split_heads(self.query(pixels), self.head_dim)  # *B T N H
        k = split_heads(self.key(z), self.head_dim)  # *B S N H
        v = split_heads(self.value(z), self.head_dim)  # *B S N H
        visible = self.mask if mask is None else as_mask(mask)
        drop = None if self.dropout is None else self.dropout(deterministic)
        o = attend(q, k, v, mask=visible, dropout=drop)  # *B T N H
        return self.dense(merge_heads(o)).reshape(x.shape)  # *B Y X D

    def reduced(self, x: Float[Array, "*B Y X D"]) -> Float[Array, "*B S D"]:
        """Downsampled x, the source of keys and values, in row-major order."""
        *batch, rows, columns, width = x.shape
        if min(rows, columns) < self.ratio:
            raise ValueError(
                f"x must have at least ratio rows and columns; got ratio={self.ratio} and an image "
                f"of {rows} x {columns}."
            )
        if self.sequence_reduction is None or self.layer_norm is None:
            return x.reshape(*batch, rows * columns, width)
        z = self.layer_norm(self.sequence_reduction(x))  # *B Y' X' D
        return z.reshape(*batch, z.shape[-3] * z.shape[-2], width)  # *B S D


def _of_squares(dim: int, ratio: int, init: LayerInit) -> nnx.Conv:
    """Convolution with stride equal to kernel size, initialized as in PyTorch."""
    conv_kwargs = {"strides": ratio, "padding": "VALID", **init.torch_initializers(dim * ratio**2)}
    return nnx.Conv(dim, dim, (ratio, ratio), **conv_kwargs)
