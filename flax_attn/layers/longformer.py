"""Longformer's attention: local windows and a few global tokens (Beltagy et al., 2020)."""

from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._internal.checks import check_divides, check_input, check_positive
from ..attend import attend
from ..masks import Dense, Mask, Window
from ._common import check_tokens, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import zero_padding
from ._layer import Layer
from ._token_indices import indices_of


class LongformerAttention(Layer):
    """Attention to a local window and to global tokens; global tokens have separate weights.

    Also called: sliding-window attention with global tokens, local and global attention.

    Global tokens attend to all tokens. The output is the sum of two calls of `attend`, one for
    local and one for global queries; the rows of the others are fully masked and give zero. There
    is no output projection; in Longformer it belongs to another class. Lengths need no padding.

    Shapes: x `*B T dim` -> `*B T dim`.

    Args:
      dim: width of a token, D.
      num_heads: number of heads; must divide dim.
      window: number of neighbours that a token attends to, half of them on each side; even.
      dropout, kernel_init, bias_init, rngs, dtype, param_dtype: as in `GroupedQueryAttention`.

    Raises:
      ValueError: for counts below 1, an odd window, heads that do not divide dim, a rate outside
        [0, 1]; in the call, if x, global_tokens or valid do not fit.
      TypeError: if x is not floating, or global_tokens or valid not boolean.

    Source: Beltagy et al., "Longformer: The Long-Document Transformer", 2020, section 3.1; names as
    in its published checkpoints.

    >>> from flax import nnx
    >>> layer = LongformerAttention(6, 2, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 9, 6)), global_tokens=jnp.arange(9) == 0).shape
    (3, 9, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        window: int,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads, window=window)
        if window % 2:
            raise ValueError(f"window must be even, for two sides of one length; got {window=}.")
        self.half = window // 2
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        init = LayerInit(**more)
        self.query, self.key, self.value = (init.linear(dim, dim) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (
            init.linear(dim, dim) for _ in range(3)
        )
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        global_tokens: Bool[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself.

        Args:
          x: the tokens.
          global_tokens: which tokens attend to all and are visible to all; None for none.
          valid: which tokens are real. Padding is masked out, and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        x = check_input("x", x, self.query.in_features)
        is_valid = check_tokens("valid", valid, x)  # *B T
        x = jnp.where(is_valid[..., None], x, 0)
        chosen = _global(global_tokens, x)  # *B T
        keys, rows = is_valid[..., None, None, :], chosen[..., None, :, None]
        local_mask = indices_of(x, is_valid).mask(Window(self.half, self.half))
        local_mask = local_mask | Dense(chosen[..., None, None, :])
        drops = [None if self.dropout is None else self.dropout(deterministic) for _ in range(2)]
        local = [self.query, self.key, self.value]
        q, k, v = (split_heads(project(x), self.head_dim) for project in local)  # *B T N H
        visible = local_mask & Dense(~rows) & Dense(keys)
        o = attend(q, k, v, mask=visible, dropout=drops[0])  # *B T N H
        wide = [self.query_global, self.key_global, self.value_global]
        q, k, v = (split_heads(project(x), self.head_dim) for project in wide)  # *B T N H
        o = o + attend(q, k, v, mask=Dense(rows) & Dense(keys), dropout=drops[1])  # *B T N H
        return zero_padding(merge_heads(o), valid)  # *B T D


def _global(tokens: Array | None, x: Float[Array, "*B T D"]) -> Bool[Array, "*B T"]:
    if tokens is None:
        return jnp.zeros(x.shape[:-1], bool)
    return check_tokens("global_tokens", tokens, x)
