"""Class attention: the class token is the only query (CaiT, 2021)."""

from typing import Unpack

from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_divides, check_positive
from ..attend import attend
from ..masks import FULL, Mask, as_mask
from ._common import as_module_data, check_tokens, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens, zero_padding
from ._layer import Layer


class ClassAttention(Layer):
    """`proj(attend(q(x_0), k(x), v(x)))`: the only query is the first token, the class token.

    Also called: class-attention, CaiT attention.

    One query per sequence, so time and memory grow with T, not with its square.

    Shapes: x `*B T dim`, the class token first -> `*B 1 dim`.

    Args:
      dim: width of a token, D.
      num_heads: number of heads, of width D / N; must divide dim.
      qkv_bias: whether `q`, `k` and `v` have biases; `proj` always has one.
      mask: the default mask of a call, `*B N 1 T`; kept as `layer.mask`.
      dropout, kernel_init, bias_init, rngs, dtype, param_dtype: as in `GroupedQueryAttention`.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x has no token, or x, a mask or valid do not fit.
      TypeError: if x is not floating, or a mask or valid not boolean.

    Source: Touvron et al., "Going deeper with Image Transformers", 2021, section 3.2, whose
    published checkpoints have these names.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> layer = ClassAttention(12, 3, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 1, 12)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = False,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads)
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        self.mask = as_module_data(as_mask(mask))
        init = LayerInit(**more)
        self.q = init.linear(dim, dim, use_bias=qkv_bias)
        self.k = init.linear(dim, dim, use_bias=qkv_bias)
        self.v = init.linear(dim, dim, use_bias=qkv_bias)
        self.proj = init.linear(dim, dim)
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B 1 D"]:
        """Attention of the first token over all, itself included.

        Args:
          x: the tokens, the class token first.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions, for masks that read them; None counts the real tokens.
          valid: which tokens are real. Padding is masked out; a sequence without its class token
            gives zeros.
          deterministic: overrides `train()` and `eval()`.
        """
        width = self.q.in_features
        call = {"mask": FULL, "valid": valid, "positions": positions}
        x, _, real, indices = tokens(x, None, FULL, widths=(width, width), **call)
        _check_class_token(x)
        visible = indices.of_first(1).mask(self.mask if mask is None else as_mask(mask))
        visible = visible if valid is None else visible & real
        q = split_heads(self.q(x[..., :1, :]), self.head_dim)  # *B 1 N H
        k = split_heads(self.k(x), self.head_dim)  # *B T N H
        v = split_heads(self.v(x), self.head_dim)  # *B T N H
        drop = None if self.dropout is None else self.dropout(deterministic)
        o = attend(q, k, v, mask=visible, dropout=drop)  # *B 1 N H
        first = None if valid is None else check_tokens("valid", valid, x)[..., :1]
        return zero_padding(self.proj(merge_heads(o)), first)  # *B 1 D


def _check_class_token(x: Float[Array, "*B T D"]) -> None:
    if not x.shape[-2]:
        raise ValueError(f"x must hold the class token as its first token; got shape {x.shape}.")
