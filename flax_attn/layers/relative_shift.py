"""Transformer-XL's attention: a bias by distance, gathered by a shift (Dai et al., 2019)."""

from typing import Any, Literal, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import aligned
from .._internal.checks import check_choice, check_positive
from .._internal.types import wide
from ..attend import attend
from ..masks import FULL, Mask, as_mask
from ..positions.relative import relative_shift, sinusoids
from ..scores import Additive
from ._common import as_module_data, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens, zero_padding
from ._layer import Layer


class RelativeShiftAttention(Layer):
    """`softmax(((q + u).k + (q + v).r[i - j] + (q + s).e[other]) / sqrt(H)) values`.

    Also called: Transformer-XL attention, relative multi-head attention.

    r is `r_proj` of the sinusoids of all distances; u is `r_w_bias` and v `r_r_bias`. With
    `biases="segment"`, as in XLNet, s is `r_s_bias` and e `seg_embed`, whose second row is for keys
    of another segment than the query's. The bias of distances and segments is an array `*B N T T`;
    `attend` does the rest.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token, D, even.
      num_heads: number of heads, N.
      head_dim: width of a head, H; N * H need not be in_features.
      biases: "shared" (Transformer-XL, the Conformer), or "segment", which adds XLNet's third.
      layout: of the sinusoids: "half" (Transformer-XL, XLNet) or "interleaved" (the Conformer).
      mask: the default mask of a call; kept as `layer.mask`.
      qkv_bias, out_bias: whether `q_proj`, `k_proj` and `v_proj`, and `o_proj`, have biases, as the
        Conformer's; `r_proj` has none.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; the first also of u, v, s and e,
        which default to zeros, and N(0, 0.02) for e.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, an odd width, other biases or another layout, a rate outside
        [0, 1]; in the call, if x, masks, segments or valid do not fit, or for segments in a
        layer without segment biases.
      TypeError: if x is not floating, segments are not integers, or a mask or valid not boolean.

    Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
    2019, section 3.3; Yang et al., "XLNet", 2019, section 2.5.

    >>> layer = RelativeShiftAttention(6, 2, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 6))).shape
    (3, 5, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        biases: Literal["shared", "segment"] = "shared",
        layout: Literal["half", "interleaved"] = "half",
        mask: Mask | Array = FULL,
        qkv_bias: bool = False,
        out_bias: bool = False,
        **more: Unpack[LayerInitKeywords],
    ):
        _check(in_features, num_heads, head_dim, biases, layout)
        self.head_dim, self.biases = head_dim, biases
        self.layout: Literal["half", "interleaved"] = layout
        self.mask = as_module_data(as_mask(mask))
        width, shape = num_heads * head_dim, (num_heads, head_dim)
        init = LayerInit(**more)
        self.q_proj, self.k_proj, self.v_proj = (
            init.linear(in_features, width, use_bias=qkv_bias) for _ in range(3)
        )
        self.r_proj = init.linear(in_features, width, use_bias=False)
        self.o_proj = init.linear(width, in_features, use_bias=out_bias)
        zeros = nnx.initializers.zeros
        self.r_w_bias, self.r_r_bias = init.param(shape, zeros), init.param(shape, zeros)
        if biases == "segment":
            self.r_s_bias = init.param(shape, zeros)
            self.seg_embed = init.param((2, *shape), nnx.initializers.normal(0.02))
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        segments: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions, for masks that read them; None counts the real tokens.
          segments: the segment of each token, for a layer with `biases="segment"`; None adds
            nothing.
          valid: which tokens are real. Padding is masked out, and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        width = self.q_proj.in_features
        call = {"mask": mask, "valid": valid, "positions": positions}
        x, _, visible, indices = tokens(x, None, self.mask, widths=(width, width), **call)
        other = self._other_segment(segments, x)  # *B 1 T T
        q = split_heads(self.q_proj(x), self.head_dim)  # *B T N H
        k = split_heads(self.k_proj(x), self.head_dim)  # *B T N H
        v = split_heads(self.v_proj(x), self.head_dim)  # *B T N H
        scale = self.head_dim**-0.5
        distances = self._by_distance(q, indices.distances())  # *B N T T
        bias = Additive(scale * (distances + self._by_segment(q, other)))
        drop = None if self.dropout is None else self.dropout(deterministic)
        q = q + aligned(self.r_w_bias[...], q)  # *B T N H
        o = attend(q, k, v, mask=visible, score=bias, scale=scale, dropout=drop)  # *B T N H
        return zero_padding(self.o_proj(merge_heads(o)), valid)  # *B T D

    def _by_distance(
        self, q: Float[Array, "*B T N H"], distances: Int[Array, "*B T T"] | None
    ) -> Float[Array, "*B N T T"]:
        """`(q + v).r[i - j]`; `distances` default to those of the slots."""
        T, width = q.shape[-3], self.q_proj.in_features
        distance = jnp.arange(T - 1, -T, -1)  # R, from keys far before to keys far after the query
        sin_cos = sinusoids(distance, width, layout=self.layout, dtype=wide(q.dtype))  # R D
        r = split_heads(self.r_proj(sin_cos.astype(q.dtype)), self.head_dim)  # R N H
        scores = jnp.einsum("...tnh,rnh->...ntr", q + aligned(self.r_r_bias[...], q), r)
        if distances is None:
            return relative_shift(scores, T, pad=True)
        return jnp.take_along_axis(scores, T - 1 - distances[..., None, :, :], axis=-1)

    def _by_segment(self, q: Float[Array, "*B T N H"], other: Array | None) -> Any:
        """`(q + s).e[other]`."""
        if other is None:
            return jnp.zeros((), q.dtype)
        segment = self.seg_embed[...].astype(q.dtype)  # 2 N H
        both = jnp.einsum("...tnh,snh->...snt", q + aligned(self.r_s_bias[...], q), segment)
        same, different = both[..., 0, :, :, None], both[..., 1, :, :, None]  # *B N T 1
        return jnp.where(other, different, same)

    def _other_segment(self, segments: Array | None, x: Array) -> Bool[Array, "*B 1 T T"] | None:
        """Whether query and key belong to different segments."""
        if segments is None:
            return None
        if self.biases != "segment":
            raise ValueError(
                'segments need biases of their own; build the layer with biases="segment", or '
                "leave them out."
            )
        ids = jnp.asarray(segments)
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise TypeError(f"segments must be integers; got {ids.dtype}.")
        if ids.shape[-1:] != x.shape[-2:-1]:
            raise ValueError(f"segments must be *B T = {x.shape[:-1]}; got shape {ids.shape}.")
        ids = jnp.broadcast_to(ids, x.shape[:-1])[..., None, :]  # *B 1 T
        return ids[..., :, None] != ids[..., None, :]


def _check(in_features: int, num_heads: int, head_dim: int, biases: str, layout: str) -> None:
    check_positive(in_features=in_features, num_heads=num_heads, head_dim=head_dim)
    check_choice("biases", biases, "shared", "segment")
    check_choice("layout", layout, "half", "interleaved")
    if in_features % 2:
        raise ValueError(f"in_features must be even, for sines and cosines; got {in_features}.")
