"""Grouped-query attention whose keys are its values too, or are shared with other layers."""

from typing import Any, Unpack, get_args, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_choice
from ..attend import Empty
from ..masks import Mask
from ._cached import AnyCache, C, Call, attended, with_cache
from ._common import check_tokens, split_heads
from ._grouped import DecodingHeads, Grouped, Norm, grouped_signature

Pair = tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]]


class SharedKeyValueAttention(DecodingHeads):
    """`o_proj(attend(q, rotary(k_norm(k)), v_norm(k)))`, `k = k_proj(x)`: there is no `v_proj`.

    The values are the keys before norm and rotary, or `v_norm(v_proj(x))` with `own_values`. With
    `across_layers` there is no `k_proj` either: the layer reads keys and values of an earlier
    layer, which has made them by `earlier.keys_and_values_of(x)`.

    Gemma leaves the logits as they are: hand in `rules=Rules(scale=1.0)`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as of `GroupedQueryAttention`.
      v_norm: a norm of the values, such as `RMSNorm(None, eps=1e-6)`; None for none.
      own_values: whether there is a `v_proj`.
      across_layers: whether keys and values are handed in at the call.
      grouped: the keywords of `GroupedQueryAttention`.

    Raises:
      ValueError: for a k_norm, v_norm or own_values beside across_layers; in the call, if keys and
        values are handed in and not expected, or the other way round, or not `*B T K H`; and as
        `GroupedQueryAttention` does.
      TypeError: as `GroupedQueryAttention` does.

    Source: the code of Gemma 4, and for across_layers of Gemma 3n; Brandon et al., "Reducing
    Transformer Key-Value Cache Size with Cross-Layer Attention", 2024.

    >>> from flax import nnx
    >>> first = SharedKeyValueAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> later = SharedKeyValueAttention(12, 6, 3, 4, across_layers=True, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((2, 5, 12))
    >>> later(x + first(x), keys_and_values=first.keys_and_values_of(x)).shape
    (2, 5, 12)
    """

    @grouped_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_norm: Norm | None = None,
        own_values: bool = False,
        across_layers: bool = False,
        **grouped: Unpack[Grouped],
    ):
        if across_layers and not (v_norm is None and grouped.get("k_norm") is None):
            raise ValueError(
                "across_layers=True reads keys and values that another layer has normed; leave "
                "k_norm and v_norm out."
            )
        if across_layers and own_values:
            raise ValueError(
                "across_layers=True reads the values of another layer; leave own_values=True out."
            )
        made = ("k_proj", "v_proj") if own_values else ("k_proj",)
        self.kv_projections = () if across_layers else made
        self.v_norm, self.num_kv_heads = v_norm, num_kv_heads
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: None = None,
        keys_and_values: Pair | None = None,
        **call: Unpack[Call],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: C,
        keys_and_values: Pair | None = None,
        **call: Unpack[Call],
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        keys_and_values: Pair | None = None,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | None = None,
    ) -> Any:
        """Attention of x over itself; `keys_and_values` are an earlier layer's, by across_layers.

        The other arguments are as of `GroupedQueryAttention`.
        """
        check_choice("empty", empty, *get_args(Empty))
        x, seen = self.tokens(x, mask, valid, cache)
        positions = self.places(x, positions, valid, cache)
        k, v = self._made_or_given(x, positions, valid, keys_and_values)  # *B T K H
        q = split_heads(self.q_proj(x), self.head_dim)  # *B T N H
        q = self.placed(q, self.q_norm, positions)  # *B T N H
        how = {"mask": seen, "valid": valid, "empty": empty, **self.how(deterministic)}
        o, cache = attended(q, k, v, cache, **how)  # *B T N H
        return with_cache(self.output(o, valid), cache)  # *B T D

    def keys_and_values_of(
        self,
        x: Float[Array, "*B T D"],
        *,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
    ) -> Pair:
        """What this layer makes of x, for layers after it; arguments as of the call."""
        return self.keys_and_values(self.tokens(x, None, valid)[0], positions)

    def keys_and_values(
        self, x: Float[Array, "*B T D"], positions: Int[Array, "... T"] | None
    ) -> Pair:
        """Keys, normed and turned, and values: the same projection, unless there are two."""
        if not self.kv_projections:
            raise ValueError(
                "The layer was built with across_layers=True and makes no keys and values; hand in "
                "keys_and_values=, of an earlier layer."
            )
        k = split_heads(self.k_proj(x), self.head_dim)  # *B T K H
        has_values = "v_proj" in self.kv_projections
        v = split_heads(self.v_proj(x), self.head_dim) if has_values else k  # *B T K H
        v = v if self.v_norm is None else self.v_norm(v)  # *B T K H
        return self.placed(k, self.k_norm, positions), v

    def _made_or_given(
        self, x: Array, positions: Array | None, valid: Array | None, keys_and_values: Pair | None
    ) -> Pair:
        if keys_and_values is None:
            return self.keys_and_values(x, positions)
        if self.kv_projections:
            raise ValueError(
                "The layer makes its own keys and values; build it with across_layers=True to hand "
                "in those of an earlier layer."
            )
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        if any(jnp.shape(part) != shape for part in keys_and_values):
            shapes = ", ".join(str(jnp.shape(part)) for part in keys_and_values)
            raise ValueError(f"keys_and_values must be two of *B T K H = {shape}; got {shapes}.")
        is_valid = check_tokens("valid", valid, x)[..., None, None]  # *B T 1 1
        k, v = (jnp.where(is_valid, part, 0) for part in keys_and_values)
        return k, v
