"""Softmax pooling for scores that are no dot product: weights from any logits, by any mask."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._types import Sizes
from .masks import Mask, as_mask
from .reference import softmax
from .taps import tap


def visible(
    mask: Mask | Array, h: Float[Array, "*B S E"], s: Float[Array, "*B T F"]
) -> Bool[Array, "*B T S"]:
    """Which of the S states each of the T queries may look at; one head, so N is 1.

    Raises:
      ValueError: if `h` and `s` have other batch axes, or the mask does not broadcast.

    >>> from flax_attn import Causal
    >>> visible(Causal(), jnp.ones((3, 4)), jnp.ones((2, 5))).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    if h.shape[:-2] != s.shape[:-2]:
        raise ValueError(f"h and s must share their batch axes; got h {h.shape}, s {s.shape}.")
    sizes = Sizes(h.shape[:-2], 1, s.shape[-2], h.shape[-2])
    seen = as_mask(mask).bind(sizes).grid(sizes)
    seen = jnp.broadcast_to(seen, (sizes.B, 1, sizes.T, sizes.S))
    return seen.reshape(*sizes.batch, sizes.T, sizes.S)


def zero_unseen(
    h: Float[Array, "*B S E"], s: Float[Array, "*B T F"], seen: Bool[Array, "*B T S"]
) -> tuple[Float[Array, "*B S E"], Float[Array, "*B T F"]]:
    """Zeros for states that nobody sees and queries that see nothing: NaN there is inert."""
    h = jnp.where(seen.any(axis=-2)[..., None], h, 0)
    return h, jnp.where(seen.any(axis=-1)[..., None], s, 0)


def pool(
    logits: Float[Array, "*B T S"], h: Float[Array, "*B S E"], seen: Bool[Array, "*B T S"]
) -> Float[Array, "*B T E"]:
    """`softmax(logits where seen) . h`; a query that sees nothing gets zeros.

    >>> pool(jnp.zeros((1, 2)), jnp.asarray([[1.0], [3.0]]), jnp.ones((1, 2), bool)).tolist()
    [[2.0]]
    """
    scores = tap("scores", jnp.where(seen, logits, -jnp.inf))  # *B T S
    weights = tap("weights", softmax(scores))  # *B T S
    return tap("context", weights @ h.astype(weights.dtype))  # *B T E
