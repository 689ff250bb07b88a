"""Cross-layer attention: reuses the keys and values of an earlier layer."""

from functools import partial
from typing import Any, Unpack, overload

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._internal.checks import check_input
from ._cached import C, Call
from ._common import check_tokens, split_heads
from ._forward import Forward
from ._grouped import DecodingHeads, NormFn
from ._init import keywords_of
from ._token_indices import RotaryPositions

Pair = tuple[Float[Array, "*B T K H"], Float[Array, "*B T K H"]]


class CrossLayerAttention(DecodingHeads, Forward):
    """`o_proj(attend(rotary(q_norm(q_proj(x))), k, v))`, k and v computed by an earlier layer.

    Also called: cross-layer attention (CLA), shared KV cache, KV sharing between layers.

    There is no `k_proj` and no `v_proj`. The earlier layer is a `SharedKeyValueAttention`, which
    computes both by `earlier.keys_and_values_of(x)`, where x is its own input, with the same
    `mask`, `positions` and `valid` as this layer's call.

    Shapes: x `*B T in_features`, keys and values `*B T K H` -> `*B T in_features`.

    Args:
      in_features, num_heads, num_kv_heads, head_dim: as in `GroupedQueryAttention`.
      grouped: the keywords of `GroupedQueryAttention`, except `k_norm`, `clip_qkv` and `o_norm`.

    Raises:
      ValueError: as in `GroupedQueryAttention`, and for a k_norm; in the call, if keys or values
        are not `*B T K H`.
      TypeError: as in `GroupedQueryAttention`, and in the call without keys and values.

    Source: Brandon et al., "Reducing Transformer Key-Value Cache Size with Cross-Layer Attention",
    2024; names as in Gemma 3n's published checkpoints.

    >>> from flax import nnx
    >>> from flax_attn import SharedKeyValueAttention
    >>> first = SharedKeyValueAttention(12, 6, 3, 4, rngs=nnx.Rngs(0))
    >>> later = CrossLayerAttention(12, 6, 3, 4, rngs=nnx.Rngs(1))
    >>> x = jnp.ones((2, 5, 12))
    >>> later(x + first(x), keys_and_values=first.keys_and_values_of(x)).shape
    (2, 5, 12)
    """

    kv_projections = ()

    def refuse(self, k_norm: NormFn | None, sinks: bool) -> None:
        """Raises ValueError for a norm of keys, which this layer does not compute."""
        if k_norm is not None:
            raise ValueError(
                "CrossLayerAttention reads keys that another layer has normed; leave k_norm out."
            )

    @overload
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        keys_and_values: Pair,
        cache: None = None,
        **call: Unpack[Call],
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, keys_and_values: Pair, cache: C, **call: Unpack[Call]
    ) -> tuple[Float[Array, "*B T D"], C]: ...
    @keywords_of(Forward.forward)
    def __call__(self, x: Float[Array, "*B T D"], *, keys_and_values: Pair, **call: Any) -> Any:
        """Attention of x over an earlier layer's `keys_and_values` of the same tokens.

        The other arguments are as in `GroupedQueryAttention`.
        """
        project = partial(self.project_with_shared_kv, keys_and_values, call.get("valid"))
        return self.forward(project, x, **call)

    def project_with_shared_kv(
        self,
        pair: Pair,
        valid: Bool[Array, "*#B T"] | None,
        x: Float[Array, "*B T D"],
        positions: RotaryPositions,
        cached: bool,
    ) -> tuple[Float[Array, "*B T N H"], Array, Array, None]:
        """Queries of x, and the keys and values of an earlier layer."""
        k, v = self.check_shared_kv(x, pair, valid)  # *B T K H
        q = split_heads(self.q_proj(x), self.head_dim)  # *B T N H
        return self.norm_and_rotate(q, self.q_norm, positions), k, v, None

    def check_shared_kv(
        self, x: Float[Array, "*B T D"], pair: Pair, valid: Bool[Array, "*#B T"] | None
    ) -> Pair:
        """Checks the keys and values of an earlier layer, and zeros them at padding."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        if any(jnp.shape(part) != shape for part in pair):
            shapes = ", ".join(str(jnp.shape(part)) for part in pair)
            raise ValueError(f"keys_and_values must be two of *B T K H = {shape}; got {shapes}.")
        is_valid = check_tokens("valid", valid, x)[..., None, None]  # *B T 1 1
        k, v = (jnp.where(is_valid, check_input("keys_and_values", part), 0) for part in pair)
        return k, v
