"""Places: where the batch entries and heads of a shard stand in the whole.

A shard numbers its rows and heads from 0. Whatever is asked by number (dropout, and functions of
masks and scores) is asked at the places instead, so that every mesh gives what one device gives.
"""

from typing import Any, ClassVar

import jax.numpy as jnp

from ._types import Sizes, frozen


@frozen
class Places:
    """Batch entries and query heads of a shard, by their numbers in the whole.

    Inside a caller's own `jax.shard_map` nothing is guessed: `attend(..., places=Places(b, n))`
    says which entries and heads of the whole attention this call computes. That serves what is
    asked by number: dropout, and functions of masks and scores. Arrays of masks and scores
    (lengths, slopes, biases) are the shard's own part: pass them through `in_specs`.

    Args:
      b: integers that broadcast to `*B`; None means 0, 1, 2, ...
      n: integers, shape N; None means 0, 1, 2, ...

    Raises:
      ValueError: in use, if their shapes do not fit.

    >>> import jax
    >>> from flax_attn import Dropout, Lengths, Places, attend
    >>> from flax_attn.parity.judge import alike
    >>> from jax.sharding import AxisType, PartitionSpec
    >>> def look(x, lengths, places=None):
    ...     drop = Dropout(0.5, jax.random.key(0))
    ...     return attend(x, x, x, mask=Lengths(lengths), dropout=drop, places=places)
    >>> def of_shard(x, lengths):  # two batch entries
    ...     first = 2 * jax.lax.axis_index("data")
    ...     return look(x, lengths, Places(b=first + jnp.arange(2)))
    >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    >>> spec, x = PartitionSpec("data"), jnp.ones((2 * jax.device_count(), 5, 4, 2))
    >>> lengths = 1 + jnp.arange(len(x)) % 5
    >>> sharded = jax.shard_map(of_shard, mesh=mesh, in_specs=spec, out_specs=spec)
    >>> alike(jax.jit(sharded)(x, lengths), look(x, lengths))
    True
    """

    b: Any = None
    n: Any = None

    AXES: ClassVar = {"b": "b", "n": "n"}

    def bind(self, sizes: Sizes) -> "Places":
        """One number for each batch entry, all batch axes as one, and one for each head."""
        found = {}
        for name, given, count in (("b", self.b, sizes.B), ("n", self.n, sizes.N)):
            numbers = jnp.arange(count, dtype=jnp.int32) if given is None else jnp.asarray(given)
            whole = sizes.batch if name == "b" else (sizes.N,)
            if given is not None and not _fits(numbers.shape, whole):
                raise ValueError(
                    f"Places.{name} must broadcast to {whole}; got shape {numbers.shape}."
                )
            numbers = numbers if given is None else jnp.broadcast_to(numbers, whole)
            found[name] = numbers.reshape(count).astype(jnp.int32)
        return Places(**found)


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(n in (1, most) for n, most in pairs)


def in_whole(places: Places | None, b: Any, n: Any) -> tuple[Any, Any]:
    """Batch entries and heads of a shard by their numbers in the whole; bound places."""
    return (b, n) if places is None else (places.b[b], places.n[n])
