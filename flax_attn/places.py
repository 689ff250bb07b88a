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
    >>> from flax_attn import Dropout, Places, attend
    >>> q = jnp.ones((3, 5, 4, 2))
    >>> drop = Dropout(0.5, jax.random.key(0))
    >>> half = attend(*3 * [q[:, :, 2:]], dropout=drop, places=Places(n=jnp.asarray([2, 3])))
    >>> bool((half == attend(q, q, q, dropout=drop)[:, :, 2:]).all())
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
