"""Value residual attention: values mixed with those of the first layer."""

from typing import Any, Unpack, get_args, overload

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._checks import check_choice
from ..attend import Empty
from ..masks import Mask
from ._cached import AnyCache, C, Call, attended, with_cache
from ._common import check_tokens, split_heads
from ._grouped import DecodingHeads, Grouped, grouped_signature, linears_of


class ValueResidualAttention(DecodingHeads):
    """`o_proj(attend(q, k, first + mix * (v - first)))`, `first` the values of the first layer.

    Runs through `attend`. The first layer of a model is called without `values`, and the others
    with `values=first.values(x)`, x being what the first was given.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as of `GroupedQueryAttention`.
      learned_mix: whether `mix_proj`, with a sigmoid, says of each token and key/value head how
        much is its own; if not, the mix is a half.
      grouped: the other arguments of `GroupedQueryAttention`.

    Raises:
      ValueError: as of `GroupedQueryAttention`, and if `values` are not `*B T K H`.
      TypeError: as of `GroupedQueryAttention`.

    Source: Zhou et al., "Value Residual Learning", 2024.

    >>> first, second = (ValueResidualAttention(12, 6, 3, 4, rngs=nnx.Rngs(i)) for i in (0, 1))
    >>> x = jnp.ones((2, 5, 12))
    >>> second(x + first(x), values=first.values(x)).shape
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
        learned_mix: bool = False,
        **grouped: Unpack[Grouped],
    ):
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)
        self.mix_proj = linears_of(grouped)(in_features, num_kv_heads) if learned_mix else None

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: None = None,
        values: Array | None = None,
        **call: Unpack[Call],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        cache: C,
        values: Array | None = None,
        **call: Unpack[Call],
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        values: Float[Array, "*B T K H"] | None = None,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | None = None,
        empty: Empty = "zero",
        deterministic: bool | None = None,
        cache: AnyCache | None = None,
    ) -> Any:
        """Attention of x over itself; `values` are the first layer's, None if this is the first.

        The other arguments are as of `GroupedQueryAttention`.
        """
        check_choice("empty", empty, *get_args(Empty))
        x, seen = self.tokens(x, mask, valid, cache)
        positions = self.places(x, positions, valid, cache)
        q, k, v = self.heads(x, positions)  # *B T N H, *B T K H, *B T K H
        v = self._mixed(x, v, values, valid)  # *B T K H
        how = {"mask": seen, "valid": valid, "empty": empty, **self.how(deterministic)}
        o, cache = attended(q, k, v, cache, **how)  # *B T N H
        return with_cache(self.output(o, valid), cache)  # *B T D

    def values(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T K H"]:
        """The values of this layer, for the layers after it."""
        x, _ = self.tokens(x, None, None)
        return split_heads(self.v_proj(x), self.head_dim)

    def _mixed(self, x: Array, v: Array, first: Array | None, valid: Array | None) -> Array:
        """Values between the first layer's and its own."""
        if first is None:
            return v
        if jnp.shape(first) != v.shape:
            raise ValueError(f"values must be *B T K H = {v.shape}; got {jnp.shape(first)}.")
        mix = 0.5 if self.mix_proj is None else nnx.sigmoid(self.mix_proj(x))[..., None]
        if valid is not None:
            first = jnp.where(check_tokens("valid", valid, x)[..., None, None], first, 0)
        return first + mix * (v - first)
