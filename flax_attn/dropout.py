"""Dropout on attention weights, drawn by index, so that every backend drops the same elements."""

import math
from importlib import import_module
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from ._internal.arrays import check_boolean, look_up, to_grid, unify_varying
from ._internal.checks import check_rate
from ._internal.types import Sizes, frozen
from .places import Places, Positions, in_whole


class Drop:
    """Base class of dropout on attention weights: a rate, and a keep mask by index."""

    rate: float

    def bind(self, sizes: Sizes) -> "Drop | None":
        """This dropout for these sizes, with shapes checked; None if it drops nothing."""
        return self

    def at(self, places: Places) -> "Drop":
        """This dropout for a shard with global indices `places` of batch entries and heads."""
        return self

    def at_positions(self, positions: Positions) -> "Drop":
        """This dropout evaluated at bound positions, or at slots if it is an array."""
        return self

    def keep(self, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        """Keep mask at these index arrays."""
        raise NotImplementedError

    def grid(self, sizes: Sizes) -> jax.Array:
        """Keep mask of a whole attention; broadcasts to B N T S."""
        return self.keep(*sizes.iotas())

    def apply(self, weights: jax.Array, keep: jax.Array) -> jax.Array:
        """Drops weights and divides the others by `1 - rate`; a rate of 1 drops all."""
        share = 1.0 - self.rate if self.rate < 1 else 1.0
        return jnp.where(keep & (self.rate < 1), weights / share, jnp.zeros_like(weights))


@frozen
class Dropout(Drop):
    """Drops each weight with probability `rate`, by `key` and its index (b, n, t, s).

    A counter-based draw (Threefry, Salmon et al., 2011): the same key drops the same elements in
    every backend, block size and batch layout. Under `jax.vmap` each mapped call starts at b = 0
    again: pass a different key to each.

    Sharded arrays use global indices, so a mesh changes nothing. Inside a `jax.shard_map` of your
    own, pass the `places` of the shard to `attend`, or a different key to every shard.

    Args:
      rate: from 0 to 1.
      key: a `jax.random.key`.
      places: global indices of batch entries and heads; `attend` sets it for shards.
      positions: the positions of queries and keys; `attend` sets it from its `q_positions` and
        `kv_positions`.

    Raises:
      TypeError: if `key` is not a random key.
      ValueError: if `rate` lies outside [0, 1].

    Source: Srivastava et al., "Dropout", 2014.

    >>> import jax
    >>> Dropout(0.5, jax.random.key(0)).keep(0, 0, jnp.arange(3)[:, None], jnp.arange(4)).shape
    (3, 4)
    """

    rate: float
    key: Any
    places: Places | None = None
    positions: Positions | None = None

    def __post_init__(self):
        check_rate("Dropout.rate", self.rate)
        if not hasattr(self.key, "dtype"):
            text = "Dropout.key must be a jax.random.key(seed)"
            raise TypeError(f"{text}; got {type(self.key).__name__}.")

    def bind(self, sizes):
        return None if self.rate == 0 else self

    def at(self, places):
        return Dropout(self.rate, self.key, places, self.positions)

    def at_positions(self, positions):
        return Dropout(self.rate, self.key, self.places, positions)

    def keep(self, b, n, q, k):
        if self.positions is not None:
            q, k = self.positions.of(b, q, k)
        return self._keep(b, n, q, k)

    def grid(self, sizes):
        b, n, q, k = sizes.iotas()
        return self._keep(b, n, *((q, k) if self.positions is None else self.positions.grid))

    def _keep(self, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        b, n = in_whole(self.places, b, n)
        words = jax.random.bits(self.key, (2,), jnp.uint32)
        one, two = _threefry(words[0], words[1], b, n)
        bits, _ = _threefry(one, two, q, k)
        return bits >= jnp.uint32(min(math.floor(self.rate * 2**32), 2**32 - 1))


@frozen
class DropoutMask(Drop):
    """Dropout with a given keep mask, divided by `1 - rate`; for comparisons.

    Args:
      mask: boolean, broadcasts to `*B N T S`; True keeps a weight.
      rate: the rate it was drawn with, from 0 to 1.

    Raises:
      TypeError: if `mask` is not boolean.
      ValueError: if `rate` lies outside [0, 1]; in use, if the mask does not broadcast.

    Source: Srivastava et al., "Dropout", 2014, with a recorded draw.

    >>> keep = jnp.asarray([[[[True, False]]]])
    >>> DropoutMask(keep, 0.5).apply(jnp.ones((1, 1, 1, 2)), keep).ravel().tolist()
    [2.0, 0.0]
    """

    mask: Any
    rate: float

    AXES: ClassVar = {"mask": "bnqk"}

    def __post_init__(self):
        check_rate("DropoutMask.rate", self.rate)
        check_boolean(self.mask)

    def bind(self, sizes):
        return DropoutMask(to_grid("DropoutMask.mask", self.mask, sizes), self.rate)

    def keep(self, b, n, q, k):
        return look_up(self.mask, b, n, q, k)

    def grid(self, sizes):
        return jnp.asarray(self.mask)


def _threefry(key1: jax.Array, key2: jax.Array, count1: Any, count2: Any) -> list[jax.Array]:
    words = [key1, key2, *(jnp.asarray(c).astype(jnp.uint32) for c in (count1, count2))]
    shape = jnp.broadcast_shapes(*(w.shape for w in words))
    return threefry2x32_p.bind(*unify_varying([jnp.broadcast_to(w, shape) for w in words]))


def __getattr__(name: str) -> Any:
    """The modules of layers, which have a file of their own since 0.4.0: pickles name this one."""
    if name in ("AttentionDropout", "LayerDropout"):
        return getattr(import_module("flax_attn.layers._dropout"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
