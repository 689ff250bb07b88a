"""Grouped-query attention with one projection for keys and values."""

from dataclasses import replace
from typing import Any, Unpack

from jaxtyping import Array, Bool, Float, Int

from ..cache.attention import store
from ..masks import Mask
from ._cached import AnyCache, Call
from ._common import split_heads
from ._self_attention import (
    DecodingHeads,
    Grouped,
    NormFn,
    SelfAttention,
    Tokens,
    grouped_signature,
)
from .cross_layer import KeysAndValues


class SharedKeyValueAttention(DecodingHeads, SelfAttention):
    """`o_proj(attend(q, rotary(k_norm(k)), v_norm(k)))`, `k = k_proj(x)`: there is no `v_proj`.

    Also called: attention with keys as values, `attention_k_eq_v`.

    The values are the keys before norm and rotary, or `v_norm(v_proj(x))` with `own_values`. A
    later `CrossLayerAttention` can reuse its keys and values, see `with_keys_and_values`.

    For Gemma, which does not scale logits, pass `rules=Rules(scale=1.0)`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      v_norm: a norm of the values, such as `RMSNorm(None, eps=1e-6)`; None for none.
      own_values: whether there is a `v_proj`.
      grouped: the keywords of `GroupedQueryAttention`, except `clip_qkv` and `o_norm`.

    Raises:
      ValueError, TypeError: as `GroupedQueryAttention` does.

    Source: the code of Gemma 4.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = SharedKeyValueAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
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
        v_norm: NormFn | None = None,
        own_values: bool = False,
        **grouped: Unpack[Grouped],
    ):
        self.kv_projections = ("k_proj", "v_proj") if own_values else ("k_proj",)
        self.v_norm = v_norm
        super().__init__(in_features, num_heads, num_kv_heads, head_dim, **grouped)

    def with_keys_and_values(
        self, x: Float[Array, "*B T D"], *, cache: Any = None, **call: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], Any, KeysAndValues]:
        """The call, and what it attended over: `y, cache, shared`, cache None if there is none.

        Later layers read the same keys: `later(x, keys_and_values=shared)`. They store nothing.
        """
        arguments = {name: call.get(name) for name in ("mask", "positions", "valid")}
        shared = self.keys_and_values_of(x, cache=cache, **arguments)
        if cache is not None:
            stored = store(shared.k, shared.v, cache, call.get("valid"))
            cache, shared = stored.cache, replace(shared, stored=stored)
        tokens = self.tokens(x, cache=shared.stored, **call)  # *B T D
        q = split_heads(self.q_proj(tokens.x), self.head_dim)  # *B T N H
        q = self.norm_and_rotate(q, self.q_norm, tokens.positions)
        o, _ = self.attention(q, shared.k, shared.v, tokens)  # *B T N H
        return self.output(o, tokens), cache, shared

    def keys_and_values_of(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Array | None = None,
        positions: Int[Array, "... T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        cache: AnyCache | None = None,
    ) -> KeysAndValues:
        """This layer's keys and values of x, for later layers; arguments as in the call.

        Only `Segments` in the mask are used, by a rotary that depends on document lengths. With a
        cache they are those of the tokens that it stores next; it stores nothing here.
        """
        call: dict[str, Any] = {"mask": mask, "positions": positions, "valid": valid}
        tokens = self.tokens(x, cache=cache, deterministic=True, **call)
        next_positions = None if cache is None else cache.next_positions(x.shape[-2], valid)
        return KeysAndValues(*self.keys_and_values(tokens), next_positions)

    def keys_and_values(self, tokens: Tokens) -> tuple[Array, Array]:
        """Keys, normalised and rotated, and values, from one projection or two."""
        k = split_heads(self.k_proj(tokens.x), self.head_dim)  # *B T K H
        has_values = "v_proj" in self.kv_projections
        v = split_heads(self.v_proj(tokens.x), self.head_dim) if has_values else k  # *B T K H
        v = v if self.v_norm is None else self.v_norm(v)  # *B T K H
        return self.norm_and_rotate(k, self.k_norm, tokens.positions), v
