"""What the models share: an embedding, and the loss over the labels that count."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

IGNORED = -100


class Embed(nnx.Embed):
    """A table of vectors, in whatever dtype it is held; `padding` is a row that no lookup teaches.

    An `nnx.Embed` by itself computes in the dtype that it started with, also after a cast.
    """

    def __init__(self, number: int, width: int, rngs: nnx.Rngs, padding: int | None = None):
        super().__init__(number, width, rngs=rngs)
        self.dtype, self.padding = None, padding

    def __call__(self, ids: Int[Array, "*B"]) -> Float[Array, "*B D"]:
        x = super().__call__(ids)
        if self.padding is None:
            return x
        return jnp.where((ids == self.padding)[..., None], jax.lax.stop_gradient(x), x)


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
