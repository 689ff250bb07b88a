"""What the models share: an embedding, and the loss over the labels that count."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

IGNORED = -100


def embed(number: int, width: int, rngs: nnx.Rngs) -> nnx.Embed:
    """An `nnx.Embed` in its table's dtype, now and later; by itself it keeps the first one."""
    table = nnx.Embed(number, width, rngs=rngs)
    table.dtype = None
    return table


def cross_entropy(logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Float[Array, ""]:
    """The mean of `-log softmax(logits)[label]` over all labels but -100, as torch takes it.

    >>> logits = jnp.log(jnp.asarray([[1.0, 3.0], [1.0, 1.0]]))
    >>> round(float(cross_entropy(logits, jnp.asarray([0, IGNORED]))), 4)
    1.3863
    """
    counts = labels != IGNORED
    of_label = jnp.take_along_axis(
        jax.nn.log_softmax(logits), jnp.where(counts, labels, 0)[..., None], axis=-1
    )[..., 0]
    return -jnp.where(counts, of_label, 0).sum() / counts.sum().astype(logits.dtype)


def next_token_loss(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
    """`cross_entropy` of each token's logits and the label after it."""
    return cross_entropy(logits[:, :-1], labels[:, 1:])
