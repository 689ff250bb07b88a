"""Talking heads: scores and weights mixed over heads (Shazeer et al., 2020; CaiT, 2021)."""

from functools import partial
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_divides, check_positive
from ..by_weights import attend_by_weights
from ..masks import FULL, Mask, as_mask
from ._common import as_module_data, merge_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens, zero_padding
from ._layer import Layer


def over_heads(linear: nnx.Linear, x: Float[Array, "B N T S"]) -> Float[Array, "B N T S"]:
    """Applies `linear` along the axis of heads, in the dtype of x.

    >>> twice = nnx.Linear(3, 3, kernel_init=nnx.initializers.constant(2.0), rngs=nnx.Rngs(0))
    >>> over_heads(twice, jnp.ones((1, 3, 1, 1))).ravel().tolist()
    [6.0, 6.0, 6.0]
    """
    return jnp.moveaxis(linear(jnp.moveaxis(x, 1, -1)), -1, 1)


def in_dtype_of_first(arrays: Any, **_: Any) -> Any:
    """Casts the arrays to the dtype of the first, since scores are float32 or wider."""
    return tuple(None if x is None else x.astype(arrays[0].dtype) for x in arrays)


class TalkingHeadsAttention(Layer):
    """`proj(proj_w(softmax(proj_l(q k^T / sqrt(H)))) v)`, where proj_l and proj_w mix heads.

    The form of CaiT: heads are mixed before and after the softmax by an N x N matrix and a bias
    each. Shazeer et al. have no biases. The weights of all heads, T x T each, are materialized on
    every device, since mixing needs all of them.

    Masks apply to the output heads of `proj_l`, and again after `proj_w`, whose bias would
    otherwise give weight to masked keys. CaiT has no masks.

    Shapes: x `*B T dim` -> `*B T dim`.

    Args:
      dim: width of a token, D.
      num_heads: number of heads, N.
      head_dim: width of a head, H; None for dim / num_heads.
      qkv_bias: whether `qkv` has a bias; `proj` always has one. Layout [3, N, H].
      mix_bias: whether `proj_l` and `proj_w` have biases, as in CaiT.
      mask: the default mask of a call; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1, after `proj_w`.
      kernel_init, bias_init: initializers of all projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)), and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim where head_dim is None, a rate
        outside [0, 1]; in the call, if x, a mask or valid do not fit.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: Shazeer et al., "Talking-Heads Attention", 2020; Touvron et al., "Going deeper with
    Image Transformers", 2021, whose published checkpoints have these names.

    >>> layer = TalkingHeadsAttention(12, 3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12)), valid=jnp.arange(5) < 4).shape  # the last token is padding
    (2, 5, 12)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        mix_bias: bool = True,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads)
        if head_dim is None:
            head_dim = check_divides("num_heads", num_heads, "dim", dim)
        check_positive(head_dim=head_dim)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.mask = as_module_data(as_mask(mask))
        init = LayerInit(**more)
        self.qkv = init.linear(dim, 3 * num_heads * head_dim, use_bias=qkv_bias)
        self.proj_l = init.linear(num_heads, num_heads, use_bias=mix_bias)
        self.proj_w = init.linear(num_heads, num_heads, use_bias=mix_bias)
        self.proj_l.promote_dtype = self.proj_w.promote_dtype = in_dtype_of_first
        self.proj = init.linear(num_heads * head_dim, dim)
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself.

        Args:
          x: the tokens.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions, for masks that read them; None counts the real tokens.
          valid: which tokens are real. Padding is masked out, and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        width = self.qkv.in_features
        call = {"mask": mask, "valid": valid, "positions": positions}
        x, _, visible, _ = tokens(x, None, self.mask, widths=(width, width), **call)
        qkv = self.qkv(x).reshape(*x.shape[:-1], 3, self.num_heads, self.head_dim)  # *B T 3 N H
        q, k, v = jnp.moveaxis(qkv, -3, 0)  # *B T N H each
        o = attend_by_weights(
            q,
            k,
            v,
            mix_scores=partial(over_heads, self.proj_l),
            mix_weights=partial(over_heads, self.proj_w),
            mask=visible,
            dropout=None if self.dropout is None else self.dropout(deterministic),
        )  # *B T N H
        return zero_padding(self.proj(merge_heads(o)), valid)  # *B T D
