"""DeBERTa's attention: separate vectors for content and distance (He et al., 2021)."""

from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import iota
from .._internal.checks import check_divides, check_input, check_positive
from ..attend import attend
from ..masks import FULL, Mask, as_mask
from ..positions.relative import Indices, deberta_rows_at
from ..scores import Additive
from ._common import as_module_data, merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens, zero_padding
from ._layer import Layer


class DisentangledAttention(Layer):
    """`softmax((q.k + q.pos_k[row] + k.pos_q[row]) / sqrt(H * terms)) v`, row depends on distance.

    Also called: DeBERTa attention.

    The vectors of distances are projections of `rel_embeddings`, which all layers of a model share
    as an argument. Their bias is an array `*B N T S`; `attend` does the rest. There is no output
    projection; in DeBERTa it belongs to another class.

    Shapes: x `*B T in_features`, rel_embeddings `R in_features` -> `*B T in_features`, with R twice
    the buckets, or twice max_positions without buckets.

    Args:
      in_features: width of a token, D.
      num_heads: number of heads, N; must divide D.
      terms: which of "c2p" (query and distance) and "p2c" (key and distance) are added.
      buckets: number of embedding rows for the distances on one side, even; None for one row per
        distance. `position_buckets` in configs.
      max_positions: larger distances share a row. `max_relative_positions` in configs.
      share: whether distances are projected by `query_proj` and `key_proj`, as in DeBERTa-v3
        (`share_att_key`), and not by separate projections.
      key_bias: whether `key_proj` and `pos_key_proj` have biases; False for DeBERTa v1.
      mask: the default mask of a call; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections; None for PyTorch's.
      rngs: source of the initial values, torch's U(+-1 / sqrt(D)), and of the dropout.
      dtype: of the arithmetic; None promotes inputs and weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide in_features, unknown or no terms,
        buckets that `deberta_buckets` refuses, a rate outside [0, 1]; in the call, if x,
        rel_embeddings, masks or valid do not fit.
      TypeError: if x or rel_embeddings are not floating, or a mask or valid not boolean.

    Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2021, and
    "DeBERTaV3", 2021; names as in DeBERTa-v2's published checkpoints.

    >>> from flax import nnx
    >>> layer = DisentangledAttention(6, 2, buckets=4, max_positions=16, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 6)), jnp.ones((8, 6))).shape
    (3, 5, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        terms: tuple[str, ...] = ("c2p", "p2c"),
        buckets: int | None,
        max_positions: int,
        share: bool = False,
        key_bias: bool = True,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, max_positions=max_positions)
        self.terms, self.buckets, self.max_positions = _known(terms), buckets, max_positions
        self.embeddings = 2 * (max_positions if buckets is None else buckets)
        self.rows(1, 1)  # raises ValueError for invalid buckets
        self.head_dim = check_divides("num_heads", num_heads, "in_features", in_features)
        self.mask = as_module_data(as_mask(mask))
        init = LayerInit(**more)
        self.query_proj = init.linear(in_features, in_features)
        self.key_proj = init.linear(in_features, in_features, key_bias)
        self.value_proj = init.linear(in_features, in_features)
        self.share = share
        if not share and "c2p" in terms:
            self.pos_key_proj = init.linear(in_features, in_features, key_bias)
        if not share and "p2c" in terms:
            self.pos_query_proj = init.linear(in_features, in_features)
        self.dropout = init.attention_dropout()

    def rows(self, queries: int, keys: int) -> Indices:
        """Embedding row for each query and key, `T S`."""
        return self._rows_at(iota(queries)[:, None] - iota(keys)[None])

    def _rows_of(self, distances: Int[Array, "*B T T"] | None, length: int) -> Any:
        """Embedding row for each pair; `distances` default to those of the slots."""
        return self.rows(length, length) if distances is None else self._rows_at(distances)

    def _rows_at(self, distance: Any) -> Any:
        """Embedding row for each distance from a key to its query."""
        if self.buckets is not None:
            bucket_kwargs = {"buckets": self.buckets, "max_distance": self.max_positions}
            return deberta_rows_at(distance, **bucket_kwargs)
        return (distance + self.max_positions).clip(0, self.embeddings - 1)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        rel_embeddings: Float[Array, "R D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself.

        Args:
          x: the tokens.
          rel_embeddings: one row per bucket, from keys far after to keys far before the query.
          mask: replaces the layer's; None keeps the layer's.
          positions: token positions, for masks that read them; None counts the real tokens.
          valid: which tokens are real. Padding is masked out, and its outputs are zero. Fully
            masked rows give zero too; DeBERTa's finfo.min gives the mean of v.
          deterministic: overrides `train()` and `eval()`.
        """
        width = self.query_proj.in_features
        call = {"mask": mask, "valid": valid, "positions": positions}
        x, _, visible, indices = tokens(x, None, self.mask, widths=(width, width), **call)
        rel_embeddings = self._checked(rel_embeddings)  # R D
        q = split_heads(self.query_proj(x), self.head_dim)  # *B T N H
        k = split_heads(self.key_proj(x), self.head_dim)  # *B T N H
        v = split_heads(self.value_proj(x), self.head_dim)  # *B T N H
        scale = (self.head_dim * (1 + len(self.terms))) ** -0.5
        rows = self._rows_of(indices.distances(), x.shape[-2])  # *#B T T
        bias = Additive(scale * self._by_distance(q, k, rel_embeddings, rows))  # *B N T T
        drop = None if self.dropout is None else self.dropout(deterministic)
        o = attend(q, k, v, mask=visible, score=bias, scale=scale, dropout=drop)  # *B T N H
        return zero_padding(merge_heads(o), valid)  # *B T D

    def _checked(self, rel_embeddings: Any) -> Float[Array, "R D"]:
        """Checks that the embeddings have a row for each bucket."""
        width = self.query_proj.in_features
        embeddings = check_input("rel_embeddings", rel_embeddings, width)
        if embeddings.shape != (self.embeddings, width):
            raise ValueError(
                f"rel_embeddings must have shape {(self.embeddings, width)}, two rows for each of "
                f"{self.embeddings // 2} buckets; got {embeddings.shape}."
            )
        return embeddings

    def _by_distance(
        self, q: Array, k: Array, rel_embeddings: Array, rows: Any
    ) -> Float[Array, "*B N T T"]:
        """The unscaled bias of the logits by the distance of query and key."""
        parts = []
        if "c2p" in self.terms:
            project = self.key_proj if self.share else self.pos_key_proj
            pos_k = split_heads(project(rel_embeddings), self.head_dim)  # R N H
            parts.append(_gather_rows(jnp.einsum("...tnh,rnh->...ntr", q, pos_k), rows))
        if "p2c" in self.terms:
            project = self.query_proj if self.share else self.pos_query_proj
            pos_q = split_heads(project(rel_embeddings), self.head_dim)  # R N H
            by_key = _gather_rows(jnp.einsum("...snh,rnh->...nsr", k, pos_q), rows.mT)
            parts.append(jnp.swapaxes(by_key, -1, -2))
        return sum(parts[1:], start=parts[0])


def _gather_rows(x: Float[Array, "*B N T R"], rows: Indices) -> Float[Array, "*B N T S"]:
    """`x[..., t, rows[t, s]]`, with rows shared or per batch entry."""
    if rows.ndim == 2:
        return x[..., iota(rows.shape[0])[:, None], rows]
    return jnp.take_along_axis(x, rows[..., None, :, :], axis=-1)


def _known(terms: tuple[str, ...]) -> tuple[str, ...]:
    if not terms or len({*terms}) < len(terms) or {*terms} - {"c2p", "p2c"}:
        raise ValueError(f"terms must be some of 'c2p', 'p2c', each once; got {terms!r}.")
    return tuple(terms)
