"""SAM's attention over an image, with row and column biases (Kirillov et al., 2023)."""

from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from .._internal.checks import check_divides, check_image, check_positive
from ..attend import attend
from ..by_weights import ROWS, in_blocks
from ..dropout import Drop
from ..masks import FULL, Dense
from ..positions.relative import decomposed_bias, resized_rows
from ..scores import Additive
from ..taps import listening
from ..where import mesh_of
from ._common import check_tokens, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import zero_padding
from ._layer import Layer


class DecomposedRelativeAttention(Layer):
    """`proj(softmax(q.k / sqrt(H) + q.rows[dy] + q.columns[dx]) v)`: the bias uses q unscaled.

    Also called: attention with decomposed relative positions, SAM attention.

    `rel_pos_h` and `rel_pos_w` hold a vector for each distance along a side of an image of the
    layer's size; they are interpolated for other sizes. The bias of T = Y X tokens is computed for
    128 queries at a time, so that memory grows linearly in T; it is materialized, `*B N T T`, while
    `taps.listen` records weights and on several devices. `attend` does the rest.

    Shapes: x `*B Y X dim` -> `*B Y X dim`.

    Args:
      dim: width of a token, C.
      num_heads: number of heads; must divide dim.
      size: height and width of the image for which the tables are built.
      qkv_bias: whether `qkv` has a bias.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections, the first also of the tables; None
        for PyTorch's, and zeros for the tables.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x or valid do not fit.
      TypeError: if x is not floating, or valid not boolean.

    Source: Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and
    Detection", 2022; Kirillov et al., "Segment Anything", 2023; names as in SAM's checkpoints.

    >>> layer = DecomposedRelativeAttention(6, 2, (4, 5), rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 4, 5, 6))).shape
    (3, 4, 5, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        size: tuple[int, int],
        *,
        qkv_bias: bool = True,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads)
        check_positive(**{f"size[{i}]": side for i, side in enumerate(size)})
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        init = LayerInit(**more)
        self.qkv, self.proj = init.linear(dim, 3 * dim, use_bias=qkv_bias), init.linear(dim, dim)
        self.rel_pos_h, self.rel_pos_w = (
            init.param((2 * side - 1, self.head_dim), nnx.initializers.zeros) for side in size
        )
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B Y X C"],
        *,
        valid: Bool[Array, "*#B Y X"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B Y X C"]:
        """Attention of all tokens of an image over each other.

        Args:
          x: the image's tokens.
          valid: which tokens are real. Padding is masked out, and its outputs are zero.
          deterministic: overrides `train()` and `eval()`.
        """
        x, visible = check_image("x", x, self.qkv.in_features), FULL
        if valid is not None:
            is_valid = check_tokens("valid", valid, x)  # *B Y X
            x = jnp.where(is_valid[..., None], x, 0)
            *batch, Y, X = is_valid.shape
            flat = is_valid.reshape(*batch, Y * X)  # *B T
            visible = Dense(flat[..., None, None, :])
        tokens = x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])  # *B T C
        made = self.qkv(tokens)  # *B T 3C
        q, k, v = (split_heads(y, self.head_dim) for y in jnp.split(made, 3, axis=-1))
        rows = resized_rows(self.rel_pos_h[...].astype(q.dtype), *x.shape[-3:-2] * 2)  # Y Y H
        columns = resized_rows(self.rel_pos_w[...].astype(q.dtype), *x.shape[-2:-1] * 2)  # X X H
        drop = None if self.dropout is None else self.dropout(deterministic)
        o = _attended(q, k, v, rows, columns, visible, drop)  # *B T N H
        y = self.proj(merge_heads(o)).reshape(x.shape)  # *B Y X C
        return zero_padding(y, valid)


def _attended(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B T N H"],
    v: Float[Array, "*B T N H"],
    rows: Float[Array, "Y Y H"],
    columns: Float[Array, "X X H"],
    visible: Any,
    drop: Drop | None,
) -> Float[Array, "*B T N H"]:
    """Attention with the bias, block by block for many queries."""
    if q.shape[-3] <= ROWS or listening() or mesh_of(q).size > 1:
        bias = Additive(decomposed_bias(q, rows, columns))  # *B N T T
        return attend(q, k, v, mask=visible, score=bias, dropout=drop)
    batch, width = q.shape[:-3], columns.shape[0]

    def of_queries(some: Array, at: Array) -> Array:
        some = some.reshape(*batch, *some.shape[1:])  # *B t N H
        by_row = jnp.einsum("...tnh,tyh->...nty", some, rows[at // width])
        by_column = jnp.einsum("...tnh,txh->...ntx", some, columns[at % width])
        bias = by_row[..., :, None] + by_column[..., None, :]  # *B N t Y X
        bias = Additive(bias.reshape(*by_row.shape[:-1], -1))
        places = None if drop is None else at  # indices of the dropout mask
        o = attend(some, k, v, mask=visible, score=bias, dropout=drop, q_positions=places)
        return o.reshape(-1, *o.shape[-3:])

    return in_blocks(of_queries, q.reshape(-1, *q.shape[-3:])).reshape(q.shape)
