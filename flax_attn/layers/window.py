"""Attention within the windows of an image, optionally shifted: Swin and Swin v2."""

from math import log
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from .._internal.arrays import aligned, is_count, reshaped
from .._internal.checks import check_choice, check_divides, check_image, check_positive
from ..attend import attend
from ..masks import FULL, Dense, Mask, Segments
from ..norms import l2_norm
from ..positions.relative import window_coordinates, window_rows
from ..scores import Additive
from ._common import check_tokens, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import zero_padding
from ._layer import Layer

Sides = tuple[int, int]


def to_windows(x: Shaped[Array, "*B Y X C"], window: Sides) -> Shaped[Array, "*B M T C"]:
    """Splits an image into M windows of T = height width tokens, both in row-major order.

    >>> to_windows(jnp.arange(8).reshape(2, 4, 1), (2, 2))[..., 0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    (*batch, Y, X, C), (y, x_) = x.shape, window
    x = jnp.swapaxes(reshaped(x, (*batch, Y // y, y, X // x_, x_, C)), -4, -3)
    return reshaped(x, (*batch, (Y // y) * (X // x_), y * x_, C))


def from_windows(
    x: Shaped[Array, "*B M T C"], window: Sides, height: int, width: int
) -> Shaped[Array, "*B Y X C"]:
    """Reassembles an image from its windows; inverse of `to_windows`.

    >>> windows = to_windows(jnp.arange(8).reshape(2, 4, 1), (2, 2))
    >>> from_windows(windows, (2, 2), 2, 4)[..., 0].tolist()
    [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    (*batch, _, _, C), (y, x_) = x.shape, window
    x = reshaped(x, (*batch, height // y, width // x_, y, x_, C))
    return reshaped(jnp.swapaxes(x, -4, -3), (*batch, height, width, C))


def shifted_regions(height: int, width: int, window: Sides, shift: Sides) -> Int[np.ndarray, "M T"]:
    """Region ids of the tokens in a shifted image's windows; equal for contiguous tokens.

    Rolling the image by `-shift` puts tokens of opposite borders into its last windows.

    >>> shifted_regions(2, 2, (1, 2), (0, 1)).tolist()
    [[1, 2], [4, 5]]
    """
    rows, columns = (
        (np.arange(side) >= side - w).astype(np.int32) + (np.arange(side) >= side - s)
        for side, w, s in zip((height, width), window, shift, strict=True)
    )
    regions = (3 * rows[:, None] + columns).reshape(
        height // window[0], window[0], width // window[1], window[1]
    )
    return regions.swapaxes(1, 2).reshape(-1, window[0] * window[1])


class WindowAttention(Layer):
    """Attention within each window of an image, with a relative position bias.

    Also called: Swin attention, shifted-window attention (W-MSA, SW-MSA).

    Version 1: `softmax(q k / sqrt(H) + table[rows])`. Version 2: `softmax(cos(q, k) exp(scale) +
    16 sigmoid(mlp(coordinates))[rows])`, the scale of each head at most log 100, and no key bias.
    With a shift the image is rolled first; tokens from opposite borders, which then share a window,
    are masked from each other. Published code adds -100 there (version 2: -200), which is zero
    after the softmax unless logits differ by as much.

    If the window does not divide the image's sides, zeros are padded on the right and below; these
    are not masked, as in the published code.

    Its weights are `q_proj`, `k_proj`, `v_proj`, `o_proj` and `relative_position_bias_table`, which
    is Swin's, `(2 h - 1) (2 w - 1)` rows of N; where it is zero, attention has no bias.

    Shapes: x `*B Y X dim` -> `*B Y X dim`.

    Args:
      dim: width of a token, C.
      window: height and width of a window.
      num_heads: number of heads, N; must divide dim.
      shift: rows and columns by which windows are moved; half a window in every second layer.
      version: 1 for Swin, 2 for Swin v2.
      pretrained: sides of the window used in training of version 2, if different.
      qkv_bias: whether queries and values have a bias, and in version 1 the keys.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections and the table; None for PyTorch's,
        and N(0, 0.02) for the table.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a shift that is no smaller than
        its window, another version, pretrained in version 1, a rate outside [0, 1]; in the call,
        if x or valid do not fit.
      TypeError: if x is not floating, or valid not boolean.

    Source: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
    2021, and "Swin Transformer V2: Scaling Up Capacity and Resolution", 2022.

    >>> layer = WindowAttention(6, (2, 3), 2, shift=(1, 1), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((5, 4, 9, 6))).shape
    (5, 4, 9, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        window: Sides,
        num_heads: int,
        *,
        shift: Sides = (0, 0),
        version: Literal[1, 2] = 1,
        pretrained: Sides | None = None,
        qkv_bias: bool = True,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads)
        check_choice("version", version, 1, 2)
        _check_sides(window, shift, version, pretrained)
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        self.window, self.shift, self.version, self.pretrained = window, shift, version, pretrained
        init = LayerInit(**more)
        self.q_proj = init.linear(dim, dim, use_bias=qkv_bias)
        self.k_proj = init.linear(dim, dim, use_bias=qkv_bias and version == 1)
        self.v_proj = init.linear(dim, dim, use_bias=qkv_bias)
        self.o_proj = init.linear(dim, dim)
        if version == 1:
            shape = ((2 * window[0] - 1) * (2 * window[1] - 1), num_heads)
            table = init.param(shape, nnx.initializers.normal(0.02))
            self.relative_position_bias_table = table
        else:
            self.logit_scale = nnx.Param(jnp.full((num_heads, 1, 1), log(10), init.param_dtype))
            self.mlp_in = init.linear(2, 512)
            self.mlp_out = init.linear(512, num_heads, use_bias=False)
        self.dropout = init.attention_dropout()

    def position_bias(self) -> Float[Array, "N T T"]:
        """Bias of each head by the position of a key relative to a query."""
        if self.version == 1:
            table = self.relative_position_bias_table[...]  # R N
            return jnp.moveaxis(table[window_rows(*self.window)], -1, 0)
        coordinates = window_coordinates(*self.window, pretrained=self.pretrained).reshape(-1, 2)
        coordinates = jnp.asarray(coordinates, self.mlp_in.kernel[...].dtype)  # R 2
        table = self.mlp_out(jax.nn.relu(self.mlp_in(coordinates)))  # R N
        return jnp.moveaxis(16 * jax.nn.sigmoid(table[window_rows(*self.window)]), -1, 0)

    def __call__(
        self,
        x: Float[Array, "*B Y X C"],
        *,
        valid: Bool[Array, "*#B Y X"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B Y X C"]:
        """Attention of each window of x over itself.

        Args:
          x: the image's tokens.
          valid: which tokens are real. Padding is masked out, and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        x = check_image("x", x, self.q_proj.in_features)
        windows, visible = self._windows(x, valid)  # *B M T C
        q = split_heads(self.q_proj(windows), self.head_dim)  # *B M T N H
        k = split_heads(self.k_proj(windows), self.head_dim)  # *B M T N H
        v = split_heads(self.v_proj(windows), self.head_dim)  # *B M T N H
        q, k, scale = self._similarity_inputs(q, k)
        drop = None if self.dropout is None else self.dropout(deterministic)
        bias = Additive(self.position_bias())
        o = attend(q, k, v, mask=visible, score=bias, scale=scale, dropout=drop)  # *B M T N H
        y = self._image(self.o_proj(merge_heads(o)), *x.shape[-3:-1])  # *B Y X C
        return zero_padding(y, valid)

    def _similarity_inputs(self, q: Array, k: Array) -> tuple[Array, Array, float]:
        """Queries, keys and scale; in version 2 normalised, with a learned scale per head."""
        if self.version == 1:
            return q, k, self.head_dim**-0.5
        by_head = jnp.exp(jnp.minimum(self.logit_scale[...], log(100)))[..., 0]  # N 1
        q, k = (l2_norm(x, eps=1e-12, floor=True) for x in (q, k))
        return q * aligned(by_head, q), k, 1.0

    def _windows(
        self, x: Float[Array, "*B Y X C"], valid: Array | None
    ) -> tuple[Float[Array, "*B M T C"], Mask]:
        """The windows of the padded and rolled image, and their attention mask."""
        height, width = x.shape[-3:-1]
        more = [-side % step for side, step in zip((height, width), self.window, strict=True)]
        pad = [(0, 0)] * (x.ndim - 3) + [(0, more[0]), (0, more[1])]
        back, visible = [-step for step in self.shift], FULL
        if any(self.shift):
            padded = height + more[0], width + more[1]
            visible = Segments(shifted_regions(*padded, self.window, self.shift))
        if valid is not None:
            is_valid = check_tokens("valid", valid, x)  # *B Y X
            x = jnp.where(is_valid[..., None], x, 0)
            is_valid = jnp.roll(jnp.pad(is_valid, pad, constant_values=True), back, (-2, -1))
            is_valid = to_windows(is_valid[..., None], self.window)[..., 0]  # *B M T
            visible = visible & Dense(is_valid[..., None, None, :])
        rolled = jnp.roll(jnp.pad(x, [*pad, (0, 0)]), back, (-3, -2))
        return to_windows(rolled, self.window), visible

    def _image(
        self, windows: Float[Array, "*B M T C"], height: int, width: int
    ) -> Float[Array, "*B Y X C"]:
        """The image of these windows, rolled back and cropped."""
        padded = (side + -side % n for side, n in zip((height, width), self.window, strict=True))
        image = jnp.roll(from_windows(windows, self.window, *padded), self.shift, (-3, -2))
        return image[..., :height, :width, :]


def _check_sides(window: Sides, shift: Sides, version: int, pretrained: Sides | None) -> None:
    check_positive(**{f"window[{i}]": side for i, side in enumerate(window)})
    if any(not is_count(s, 0) or s >= side for s, side in zip(shift, window, strict=True)):
        raise ValueError(f"shift must be counts below the window's sides; got {window=}, {shift=}.")
    if pretrained is not None and version == 1:
        raise ValueError(
            "pretrained scales the coordinates of version 2; version 1 has a table of its own "
            f"window. Leave it out, or say version=2; got {pretrained=}."
        )
