"""Inputs shared by self and cross attention: source of the keys, and padding."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_input
from ..cache import Cache, Memory, PagedCache
from ..cache.checks import check_kind
from ..masks import Mask, as_mask
from ..scores import IDENTITY, Score
from ._common import check_tokens
from ._token_indices import (
    TokenIndices,
    indices_in_cache,
    indices_of,
    one_per_token,
    padding_mask,
)


def tokens(
    x: Float[Array, "*B T D"],
    memory: Float[Array, "*B S E"] | None,
    layer_mask: Mask,
    mask: Mask | Array | None,
    valid: Bool[Array, "*#B T"] | Mask | None,
    widths: tuple[int, int],
    cache: Cache | PagedCache | Memory | None = None,
    positions: Int[Array, "*#B T"] | None = None,
    score: Score = IDENTITY,
) -> tuple[Float[Array, "*B T D"], Float[Array, "*B S E"], Mask, TokenIndices]:
    """Returns x, the source of keys and values, the attention mask and the token indices.

    Args:
      x: the tokens.
      memory: source of keys and values; None for x itself.
      layer_mask: the layer's mask.
      mask: replaces it; None keeps it.
      valid: which tokens of x are real. Padding becomes zero, and is masked unless there is a
        memory, whose padding must be in the mask.
      widths: of a token of x and of the memory.
      cache: that of the call; a cache excludes padding itself.
      positions: positions of the tokens of x, for masks and scores that read them.
      score: that of the layer; the caller binds it to the indices.

    Raises:
      TypeError: if x or memory are not floating, or mask or valid not boolean.
      ValueError: if their shapes do not fit, or for a cache with a memory.

    >>> from flax_attn import FULL
    >>> x, memory, visible, indices = tokens(jnp.ones((3, 4)), None, FULL, None, None, (4, 4))
    >>> memory is x
    True
    """
    visible = layer_mask if mask is None else as_mask(mask)
    x, real = check_input("x", x, widths[0]), None
    if valid is not None:
        real = check_tokens("valid", valid, x)
        x = jnp.where(real[..., None], x, 0)
    positions = one_per_token(x, positions, None)
    if memory is not None:
        _check_no_cache(cache)
        memory = check_input("memory", memory, widths[1])
        indices = indices_of(x, real, positions, keys=memory.shape[-2], valid=valid)
        return x, memory, indices.mask(visible), indices
    if widths[0] != widths[1] and not isinstance(cache, Memory):
        raise ValueError(
            f"The layer attends to a memory of width {widths[1]}, and x has width {widths[0]}; "
            "pass it a Memory."
        )
    if cache is None:
        indices = indices_of(x, real, positions, valid=valid)
        shown = visible if real is None else visible & padding_mask(valid, real)
        return x, x, indices.mask(shown), indices
    if isinstance(cache, Cache | PagedCache):
        check_kind(cache, x)
    indices = indices_in_cache(cache, x, real, positions, (visible, score))
    return x, x, indices.mask(visible), indices


def _check_no_cache(cache: Any) -> None:
    if cache is not None:
        raise ValueError(
            "Pass a memory, or store it once: layer(x, memory), or once "
            "memory = layer.remember(memory) and then layer(x, cache=memory)."
        )


def zero_padding(
    y: Float[Array, "*B T D"], valid: Bool[Array, "*#B T"] | Mask | None
) -> Float[Array, "*B T D"]:
    """Returns y with zeros at padding.

    >>> zero_padding(jnp.ones((2, 1)), jnp.asarray([True, False])).tolist()
    [[1.0], [0.0]]
    """
    return y if valid is None else jnp.where(check_tokens("valid", valid, y)[..., None], y, 0)
