"""Dropout in layers: the stream of keys, and the modules that draw from it."""

from flax import nnx

from .._internal.checks import check_rate
from ..dropout import Dropout


def dropout_stream(rngs: nnx.Rngs) -> nnx.RngStream | None:
    """The stream "dropout" of `rngs`, or its default stream; None if there is neither.

    >>> dropout_stream(nnx.Rngs(params=0)) is None, dropout_stream(nnx.Rngs(0)) is None
    (True, False)
    """
    try:
        return rngs["dropout"]
    except KeyError:
        return None


def check_stream(rate: float, stream: nnx.RngStream | None) -> nnx.RngStream:
    """Returns `stream`; raises ValueError if it is None."""
    if stream is None:
        raise ValueError(
            f"dropout={rate} needs a random key in training; the layer was built from rngs without "
            'a "dropout" or default stream. Build it with rngs=nnx.Rngs(params=0, dropout=1), or '
            "call it with deterministic=True."
        )
    return stream


class LayerDropout(nnx.Dropout):
    """`nnx.Dropout` that requires a "dropout" stream only when it draws.

    Args:
      rate: from 0 to 1.
      rngs: its "dropout" stream, or its default one, gives a new key at every call in training.

    Raises:
      ValueError: when called in training with a rate above 0, if `rngs` had neither stream.

    >>> import jax.numpy as jnp
    >>> LayerDropout(0.0, rngs=nnx.Rngs(params=0))(jnp.ones(2)).tolist()
    [1.0, 1.0]
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        super().__init__(rate, rngs=dropout_stream(rngs))

    def __call__(self, inputs, *, deterministic=None, rngs=None):
        """The inputs, dropped in training; `deterministic` overrides `train()` and `eval()`."""
        off = self.deterministic if deterministic is None else deterministic
        if rngs is None and not off and 0 < self.rate < 1:
            check_stream(self.rate, self.rngs)
        return super().__call__(inputs, deterministic=deterministic, rngs=rngs)


class AttentionDropout(nnx.Module):
    """Returns the `Dropout` of one call in training, and None otherwise.

    Follows `train()` and `eval()` as `nnx.Dropout` does; a rate of 0 draws no key.

    Args:
      rate: from 0 to 1.
      rngs: its "dropout" stream, or its default one, gives a new key at every call in training.

    Raises:
      ValueError: if the rate lies outside [0, 1]; when called in training with a rate above 0, if
        `rngs` had neither stream.

    >>> dropout = AttentionDropout(0.1, rngs=nnx.Rngs(0))
    >>> dropout.eval()
    >>> dropout() is None
    True
    """

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        self.rate = check_rate("dropout", rate)
        self.deterministic = False
        stream = dropout_stream(rngs)
        self.rngs = nnx.data(None) if stream is None else stream.fork()

    def __call__(self, deterministic: bool | None = None) -> Dropout | None:
        """The dropout to pass to `attend`; `deterministic` overrides `train()` and `eval()`."""
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic or self.rate == 0:
            return None
        return Dropout(self.rate, check_stream(self.rate, self.rngs)())
