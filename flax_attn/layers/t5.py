"""T5's attention: unscaled, with a learned bias by distance bucket (Raffel et al., 2020)."""

from typing import Any, Unpack, overload

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_positive
from ..attend import Empty
from ..cache import Memory
from ..masks import FULL, Mask, as_mask
from ..scores import IDENTITY, Additive, Score, T5Bias
from ._cached import AnyCache, CrossCall, M
from ._common import as_module_data
from ._cross_attention import CrossForward
from ._init import LayerInit, LayerInitKeywords, layer_init_signature


class T5Attention(CrossForward):
    """`o(attend(q(x), k(memory), v(memory), scale=1.0, score=T5Bias(table)))`.

    Also called: attention with a relative position bias.

    In T5 the first layer of a stack owns the table, `has_bias=True`, and the others take its bias:
    `layer(x, bias=first.score)`, or `bias=first.position_bias(T, S)` as an array. Cross attention
    has no bias. A decoder layer has `bidirectional=False, mask=CAUSAL`.

    Shapes: x `*B T in_features`, memory `*B S in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of heads, N.
      head_dim: width of a head, H; N * H need not be in_features.
      buckets, max_distance, bidirectional: as in `positions.relative.t5_buckets`.
      has_bias: whether the layer owns a table, `relative_attention_bias`.
      mask: the default mask of a call; kept as `layer.mask`.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init: initializer of the projections and the table; None for PyTorch's.
      bias_init: accepted by every layer; no projection has a bias.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, a rate outside [0, 1], buckets that `t5_buckets` refuses; in
        the call, if x, memory, masks, valid or bias do not fit, for an unknown `empty`, or in a
        layer without a table for `score`, or for self attention without a bias.
      TypeError: if x, memory or bias are not floating, or a mask or valid not boolean.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, section 2.1; names as in T5's published checkpoints.

    >>> first = T5Attention(6, 2, 4, rngs=nnx.Rngs(0))
    >>> then = T5Attention(6, 2, 4, has_bias=False, rngs=nnx.Rngs(1))
    >>> then(first(jnp.ones((3, 5, 6))), bias=first.score).shape
    (3, 5, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        has_bias: bool = True,
        mask: Mask | Array = FULL,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, head_dim=head_dim)
        check_positive(buckets=buckets, max_distance=max_distance)
        self.buckets, self.max_distance = buckets, max_distance
        self.bidirectional = bidirectional
        self._of(jnp.zeros((buckets, num_heads)))  # raises ValueError for invalid buckets
        self.head_dim, self.mask = head_dim, as_module_data(as_mask(mask))
        init = LayerInit(**more)
        self.q = init.linear(in_features, num_heads * head_dim, use_bias=False)
        self.k = init.linear(in_features, num_heads * head_dim, use_bias=False)
        self.v = init.linear(in_features, num_heads * head_dim, use_bias=False)
        self.o = init.linear(num_heads * head_dim, in_features, use_bias=False)
        start = nnx.initializers.normal(1.0) if init.kernel_init is None else init.kernel_init
        embed_kwargs = {"embedding_init": start, "param_dtype": init.param_dtype, "rngs": init.rngs}
        self.relative_attention_bias = (
            nnx.Embed(buckets, num_heads, **embed_kwargs) if has_bias else None
        )
        self.dropout = init.attention_dropout()

    def projections(self) -> tuple[nnx.Linear, nnx.Linear, nnx.Linear, nnx.Linear]:
        """The projections of queries, keys, values and output."""
        return self.q, self.k, self.v, self.o

    @property
    def score(self) -> T5Bias:
        """The layer's bias as a score, for this layer and for those that share it."""
        if self.relative_attention_bias is None:
            raise ValueError(
                "This layer was built with has_bias=False and owns no table; ask the first layer "
                "of its stack, which has one."
            )
        return self._of(self.relative_attention_bias.embedding[...])

    def _of(self, table: Float[Array, "R N"]) -> T5Bias:
        bias_kwargs = {"max_distance": self.max_distance, "bidirectional": self.bidirectional}
        return T5Bias(table, buckets=self.buckets, **bias_kwargs)

    def position_bias(self, queries: int, keys: int) -> Float[Array, "N T S"]:
        """The layer's bias as an array, for T queries and S keys from the same position."""
        q, k = jnp.arange(queries)[:, None], jnp.arange(keys)[None]
        table = self.score.table
        heads = jnp.arange(table.shape[1])[:, None, None]
        return self.score(jnp.zeros((), table.dtype), 0, heads, q[None], k[None])

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"] | None = None,
        *,
        cache: None = None,
        bias: Score | Array | None = None,
        **call: Unpack[CrossCall],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: M,
        bias: Score | Array | None = None,
        **call: Unpack[CrossCall],
    ) -> tuple[Float[Array, "*B T D"], M]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        memory: Float[Array, "*B S D"] | None = None,
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        bias: Score | Float[Array, "... #T #S"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | Memory | None = None,
    ) -> Any:
        """Attention of x over memory, or over itself; arguments as in `CrossAttention`.

        Args:
          bias: replaces the layer's bias: another layer's `score`, or an array that broadcasts to
            `*B N T S`. Self attention without a table requires it; `IDENTITY` for no bias.
        """
        crosses = memory is not None or isinstance(cache, Memory)
        attend_kwargs = {"score": self._score(bias, crosses), "scale": 1.0}
        call = {"mask": mask, "positions": positions, "valid": valid}
        call |= {"empty": empty, "cache": cache}
        return self.forward(attend_kwargs, x, memory, deterministic=deterministic, **call)

    def _score(self, bias: Score | Array | None, crosses: bool) -> Score:
        if bias is not None:
            return bias if isinstance(bias, Score) else Additive(bias)
        if self.relative_attention_bias is not None:
            return self.score
        if not crosses:
            raise ValueError(
                "A layer with has_bias=False has no positions of its own; pass bias=first.score of "
                "the first layer of its stack, or bias=IDENTITY for none."
            )
        return IDENTITY
