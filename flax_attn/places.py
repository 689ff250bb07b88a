"""Global indices of batch entries and heads in shards, and positions of queries and keys.

In a shard, local indices of batch entries and heads start at 0. Dropout, and functions of masks and
scores, are evaluated at global indices (`Places`), so that every mesh gives the same results.
A cache holds its keys in slots. Masks, scores and dropout are evaluated at `Positions` of queries
and keys instead of slots, so that they mean the same in every cache.
"""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ._internal.arrays import (
    INT32_MAX,
    check_integers,
    lists_to_arrays,
    look_up,
    out_of_range,
    saturate,
)
from ._internal.checks import check_choice
from ._internal.types import FROZEN, Sizes, frozen, leaf_axes


@frozen
class Places:
    """Global indices of a shard's batch entries and query heads.

    Inside a caller's `jax.shard_map` they cannot be inferred: `attend(..., places=Places(b, n))`
    specifies which entries and heads of the global attention this call computes. Dropout, and
    functions of masks and scores, use them. Arrays of masks and scores (lengths, slopes, biases)
    must be sharded: pass them through `in_specs`.

    Args:
      b: integers that broadcast to `*B`; None means 0, 1, 2, ...
      n: integers, shape N; None means 0, 1, 2, ...

    Raises:
      ValueError: in use, if their shapes do not fit.

    >>> import jax
    >>> from flax_attn import Dropout, Lengths, Places, attend
    >>> from flax_attn.parity.judge import allclose
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
    >>> allclose(jax.jit(sharded)(x, lengths), look(x, lengths))
    True
    """

    b: Any = None
    n: Any = None

    AXES: ClassVar = {"b": "b", "n": "n"}

    def bind(self, sizes: Sizes) -> "Places":
        """Index arrays B and N, with flattened batch axes."""
        numbers_of = {}
        for name, requested, count in (("b", self.b, sizes.B), ("n", self.n, sizes.N)):
            numbers = (
                jnp.arange(count, dtype=jnp.int32) if requested is None else jnp.asarray(requested)
            )
            whole = sizes.batch if name == "b" else (sizes.N,)
            if requested is not None and not _broadcasts(numbers.shape, whole):
                raise ValueError(
                    f"Places.{name} must broadcast to {whole}; got shape {numbers.shape}."
                )
            numbers = numbers if requested is None else jnp.broadcast_to(numbers, whole)
            numbers_of[name] = numbers.reshape(count).astype(jnp.int32)
        return Places(**numbers_of)


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], whole[::-1], strict=False)
    return len(shape) <= len(whole) and all(n in (1, most) for n, most in pairs)


def in_whole(places: Places | None, b: Any, n: Any) -> tuple[Any, Any]:
    """Maps local to global indices of batch entries and heads; `places` must be bound."""
    return (b, n) if places is None else (places.b[b], places.n[n])


@frozen
class Positions:
    """Positions of the queries, `*B T`, and of the keys, `*B S`; None stands for 0, 1, 2, ...

    Absent queries and keys have negative positions. When bound, both are int32 arrays, `B T` and
    `B S`, or with one row that all batch entries share.

    Attributes:
      in_order: key s has position s or is absent, as in a cache with room for every token: a range
        of positions is then a range of slots.
      all_present: nothing is absent, and negative positions have no special meaning.
      is_bound: set by `bind`, which returns bound positions unchanged.
    """

    q: Any = None
    k: Any = None
    in_order: bool = False
    all_present: bool = False
    is_bound: bool = False

    AXES: ClassVar = {"q": "bq", "k": "bk"}

    def __post_init__(self):
        if not self.is_bound:
            lists_to_arrays(self, "q", "k")
            check_integers("attend", q_positions=self.q, kv_positions=self.k)

    def bind(self, sizes: Sizes) -> "Positions":
        """One position for each query and each key."""
        if self.is_bound:
            return self
        least = -INT32_MAX if self.all_present else -1
        names = ("positions",) * 2 if self.all_present else ("q_positions", "kv_positions")
        return Positions(
            _rows(names[0], self.q, sizes, sizes.T, least),
            _rows(names[1], self.k, sizes, sizes.S, least),
            self.k is None or self.in_order,
            self.all_present,
            is_bound=True,
        )

    def of(self, b: Any, q: Any, k: Any) -> tuple[Any, Any]:
        """The positions of queries and keys in slots q and k of batch entry b."""
        return look_up(self.q, b, q), look_up(self.k, b, k)

    @property
    def grid(self) -> tuple[jax.Array, jax.Array]:
        """All positions as arrays that broadcast to B N T S."""
        return self.q[:, None, :, None], self.k[:, None, None, :]


def _rows(name: str, positions: Any, sizes: Sizes, length: Any, least: int) -> jax.Array:
    if positions is None:
        return jnp.arange(length, dtype=jnp.int32)[None]
    invalid, whole = out_of_range(positions, np.int32), (*sizes.batch, length)
    if (invalid > 0).any():  # negative values mean absent
        raise ValueError(
            f"{name} must be less than {INT32_MAX + 1}, to fit int32; got {invalid.max()}."
        )
    if not _broadcasts(jnp.shape(positions), whole):
        raise ValueError(f"{name} must broadcast to {whole}; got shape {jnp.shape(positions)}.")
    at = jnp.maximum(saturate(positions), least)
    if all(n == 1 for n in at.shape[:-1]):
        return jnp.broadcast_to(at.reshape(-1), (length,))[None]
    return jnp.broadcast_to(at, whole).reshape(sizes.B, length)


def is_indexed_by_slot(node: Any) -> bool:
    """Whether a mask or a score has an array along queries or keys, according to its `AXES`."""
    return any("q" in axes or "k" in axes for axes in leaf_axes(node))


# Which index of a token a mask or a score reads, with padding or packed documents.
READS = ("nothing", "slot", "sequence", "distance", "order", "position", "query position")


def check_reads(node: Any) -> None:
    """Raises ValueError for a mask or a score with an unknown `reads`."""
    check_choice(f"{type(node).__name__}.reads", node.reads, *READS)


def with_end(node: Any, end: Any) -> Any:
    """Replaces `offset="end"`, which counts slots, by `end` in a mask or a score."""
    return replace(node, offset=end) if isinstance(getattr(node, "offset", None), str) else node


def refuse_end(node: Any) -> None:
    """Raises ValueError for a mask or a score with `offset="end"`, which counts slots."""
    if isinstance(getattr(node, "offset", None), str):
        name = type(node).__name__
        instead = "Causal(), which is CAUSAL" if name == "Causal" else f"{name} with offset=0"
        raise ValueError(
            f'{name}(offset="end") counts from the last slot, and q_positions and kv_positions '
            f"replace slots; use {instead}."
        )
    for part in vars(node).values() if type(node) in FROZEN else ():
        refuse_end(part)
