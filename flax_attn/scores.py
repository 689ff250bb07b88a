"""Scores: modifications of the scaled logits before the mask, as pytrees, chained by `>>`.

`Softcap(30.0) >> Alibi(slopes)` caps first, then adds the bias. The arrays of a score are leaves
with gradients. Blockwise backends evaluate it on a block's indices, without an array of T x S.
"""

from collections.abc import Callable
from dataclasses import field, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ._internal.arrays import (
    bound_offset,
    check_number,
    check_offset,
    dtype_of,
    expand_per_entry,
    lists_to_arrays,
    look_up,
    on_elements,
    saturating_add,
    take_entry,
    to_grid,
)
from ._internal.checks import check_takes, traced_indices
from ._internal.drawing import DrawnScore
from ._internal.types import FROZEN, Sizes, frozen
from .places import Places, Positions, check_reads, in_whole, is_indexed_by_slot, refuse_end
from .positions.relative import t5_buckets


class Score(DrawnScore):
    """Base class of scores. A subclass defines `__call__`; all other methods have defaults.

    Decorate a subclass with `flax_attn.frozen`: it becomes a dataclass, a pytree whose arrays
    receive gradients, and equal by value. Every backend in plain JAX takes it. It must be finite at
    masked positions too. `reads` is as in `Mask`, or "query position". `draw` gives its picture.

    Raises:
      NotImplementedError: in use, by a subclass that does not define `__call__`.
      TypeError: for `score >> x` unless x is a score; in use, by a subclass that is not decorated.

    Source: `score_mod` of torch's flex attention.

    >>> from flax_attn import Score, frozen
    >>> @frozen
    ... class Temperature(Score):
    ...     by_head: jax.Array
    ...     def __call__(self, logits, b, n, q, k):
    ...         return logits / self.by_head[n]
    >>> float(Temperature(jnp.asarray([1.0, 2.0]))(jnp.asarray(3.0), 0, 1, 0, 0))
    1.5
    """

    reads: str = "order"

    def __call__(self, logits: jax.Array, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        """Returns the modified logits of queries q and keys k of head n in batch entry b."""
        raise NotImplementedError

    def bind(self, sizes: Sizes) -> "Score":
        """This score for these sizes: checks shapes, flattens batch axes, resolves `"end"`."""
        is_users = not hasattr(self, "AXES") and type(self) in FROZEN
        return jax.tree.map(jnp.asarray, self) if is_users else self

    def at(self, places: Places) -> "Score":
        """This score for a shard whose batch entries and heads have global indices `places`.

        A class with `AXES` gets its shard of its arrays and local indices; any other keeps its
        arrays replicated and gets global indices.
        """
        return self if hasattr(self, "AXES") else Placed(self, places)

    def at_positions(self, positions: Positions) -> "Score":
        """This score evaluated at bound positions, or at slots if it has an array along q or k."""
        if is_indexed_by_slot(self):
            return self
        refuse_end(self)
        return AtPositions(self, positions)

    def grid(self, logits: jax.Array, sizes: Sizes) -> jax.Array:
        """Modifies all logits, B N T S. The score must be bound."""
        return self(logits, *sizes.iotas())

    def __rshift__(self, then: "Score") -> "Score":
        return Chain(self, then)


@frozen
class Placed(Score):
    """A score without `AXES` in a shard, evaluated at global indices."""

    score: Score
    places: Places

    def at(self, places):
        return Placed(self.score, places)

    def bind(self, sizes):
        return Placed(self.score.bind(sizes), self.places)

    def __call__(self, logits, b, n, q, k):
        return self.score(logits, *in_whole(self.places, b, n), q, k)


@frozen
class AtPositions(Score):
    """A score evaluated at positions instead of slots, and at 0 if absent."""

    score: Score
    positions: Positions

    def at(self, places):
        return AtPositions(self.score.at(places), self.positions)

    def bind(self, sizes):
        return AtPositions(self.score.bind(sizes), self.positions.bind(sizes))

    def __call__(self, logits, b, n, q, k):
        return self.evaluate(logits, b, n, *self.positions.of(b, q, k))

    def grid(self, logits, sizes):
        b, n, _, _ = sizes.iotas()
        return self.evaluate(logits, b, n, *self.positions.grid)

    def evaluate(self, logits: jax.Array, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        """Modifies the logits at these positions."""
        if not self.positions.all_present:
            q, k = jnp.maximum(q, 0), jnp.maximum(k, 0)
        return self.score(logits, b, n, q, k)


@frozen
class Identity(Score):
    """Leaves logits unchanged; `IDENTITY` is an instance. Raises nothing.

    Source: Vaswani et al., "Attention Is All You Need", 2017, which changes no logit.

    >>> float(IDENTITY(jnp.asarray(1.5), 0, 0, 0, 0))
    1.5
    """

    AXES: ClassVar = {}
    reads = "nothing"

    def at_positions(self, positions):
        return self

    def __call__(self, logits, b, n, q, k):
        return logits


@frozen
class Chain(Score):
    """Applies `first`, then `then`."""

    first: Score
    then: Score

    def __post_init__(self):
        if not isinstance(self.then, Score):
            raise TypeError(
                f"A score is chained with a score; got {type(self.then).__name__}. A bias goes to "
                "Additive(array), a function to ScoreFn(lambda logits, b, n, q, k: ...)."
            )

    def bind(self, sizes):
        return Chain(self.first.bind(sizes), self.then.bind(sizes))

    def at(self, places):
        return Chain(self.first.at(places), self.then.at(places))

    def at_positions(self, positions):
        return Chain(self.first.at_positions(positions), self.then.at_positions(positions))

    def __call__(self, logits, b, n, q, k):
        return self.then(self.first(logits, b, n, q, k), b, n, q, k)

    def grid(self, logits, sizes):
        return self.then.grid(self.first.grid(logits, sizes), sizes)


@frozen
class Softcap(Score):
    """`cap * tanh(logit / cap)`: logits kept within +-cap.

    Also called: logit soft-capping, `attn_logit_softcapping`.

    Args:
      cap: the bound, above zero.

    Raises:
      TypeError: if `cap` is not a number.
      ValueError: if it is not one finite number above zero.

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024.

    >>> float(Softcap(2.0)(jnp.asarray(100.0), 0, 0, 0, 0))
    2.0
    """

    cap: Any

    AXES: ClassVar = {}
    reads = "nothing"

    def __post_init__(self):
        check_number("Softcap.cap", self.cap)
        if not isinstance(self.cap, Tracer) and not 0 < float(self.cap) < np.inf:
            raise ValueError(f"Softcap.cap must be finite and above zero; got {self.cap}.")

    def __call__(self, logits, b, n, q, k):
        cap = jnp.asarray(self.cap, logits.dtype)
        return cap * jnp.tanh(logits / cap)


@frozen
class Alibi(Score):
    """`logit - slopes[n] * |q + offset - k|`: attention with linear biases.

    Also called: ALiBi.

    Under a causal mask this is the paper's `-slope * (q - k)`; without one, both sides are damped.

    Args:
      slopes: one slope per query head, shape N, or `*B N`; `alibi_slopes(N)` gives the paper's.
      offset: the distance of the first query from the first key; `"end"` aligns the last ones. An
        array of integers that broadcasts to `*B` sets it per batch entry.

    Raises:
      ValueError: if `offset` is neither of integers nor "end"; in use, unless the shapes fit.

    Source: Press et al., "Train Short, Test Long", 2022.

    >>> float(Alibi(jnp.asarray([0.5]))(jnp.asarray(1.0), 0, 0, 3, 1))
    0.0
    """

    slopes: Any
    offset: Any = 0

    AXES: ClassVar = {"slopes": "bn", "offset": "b"}
    reads = "distance"

    def __post_init__(self):
        lists_to_arrays(self, "slopes", "offset")
        check_offset("Alibi", self.offset)

    def bind(self, sizes):
        slopes = jnp.asarray(self.slopes)
        if slopes.shape not in ((sizes.N,), (*sizes.batch, sizes.N)):
            raise ValueError(
                f"Alibi needs one slope a query head, shape ({sizes.N},), or one a batch entry and "
                f"head, shape {(*sizes.batch, sizes.N)}; got shape {slopes.shape}."
            )
        slopes = slopes if slopes.ndim == 1 else slopes.reshape(sizes.B, sizes.N)
        return Alibi(slopes, bound_offset("Alibi", self.offset, sizes))

    def __call__(self, logits, b, n, q, k):
        slopes = self.slopes[n] if self.slopes.ndim == 1 else self.slopes[b, n]
        return self._damped(logits, slopes, saturating_add(q - k, take_entry(self.offset, b)))

    def grid(self, logits, sizes):
        _, _, q, k = sizes.iotas()
        slopes = self.slopes[..., None, None]  # N 1 1 or B N 1 1
        slopes = slopes if slopes.ndim == 4 else slopes[None]
        return self._damped(logits, slopes, saturating_add(q - k, expand_per_entry(self.offset)))

    def _damped(self, logits, slopes, distance):
        distance = jnp.abs(jnp.asarray(distance)).astype(logits.dtype)
        return logits - slopes.astype(logits.dtype) * distance


@frozen
class T5Bias(Score):
    """`logit + table[bucket of k - q - offset, n]`: a learned bias by distance bucket.

    Also called: relative position bias (RPB).

    A backend that works in blocks reads the table only for its block.

    Args:
      table: one row per bucket and one column per query head, shape `buckets N`.
      buckets, max_distance, bidirectional: as in `positions.relative.t5_buckets`.
      offset: the distance of the first query from the first key; `"end"` aligns the last ones. An
        array of integers that broadcasts to `*B` sets it per batch entry.

    Raises:
      TypeError: if `table` is not floating.
      ValueError: for buckets that `t5_buckets` refuses, or if `offset` is neither of integers nor
        "end"; in use, unless the table has that shape.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, section 2.1.

    >>> bias = T5Bias(jnp.arange(4.0)[:, None], buckets=4, max_distance=8)
    >>> float(bias(jnp.asarray(1.0), 0, 0, 2, 1))
    2.0
    """

    table: Any
    buckets: int = field(default=32, kw_only=True)
    max_distance: int = field(default=128, kw_only=True)
    bidirectional: bool = field(default=True, kw_only=True)
    offset: Any = field(default=0, kw_only=True)

    AXES: ClassVar = {"table": ".n", "offset": "b"}
    reads = "distance"

    def __post_init__(self):
        lists_to_arrays(self, "offset")
        check_offset("T5Bias", self.offset)
        kind = dtype_of(self.table)
        if not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(f"T5Bias.table must be floating; got {kind}.")
        self._rows(np.asarray(0))  # raises ValueError for invalid buckets

    def bind(self, sizes):
        table = jnp.asarray(self.table)
        if table.shape != (self.buckets, sizes.N):
            raise ValueError(
                "T5Bias needs a row for each bucket and a column for each query head, shape "
                f"{(self.buckets, sizes.N)}; got shape {table.shape}."
            )
        return replace(self, table=table, offset=bound_offset("T5Bias", self.offset, sizes))

    def __call__(self, logits, b, n, q, k):
        return self._biased(logits, n, saturating_add(k - q, -take_entry(self.offset, b)))

    def grid(self, logits, sizes):
        _, n, q, k = sizes.iotas()
        return self._biased(logits, n, saturating_add(k - q, -expand_per_entry(self.offset)))

    def _biased(self, logits, n, distance):
        table = self.table.astype(logits.dtype)  # gradients accumulate in this dtype
        return logits + table[self._rows(jnp.asarray(distance)), n]

    def _rows(self, distance):
        return t5_buckets(
            distance,
            buckets=self.buckets,
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )


@frozen
class Additive(Score):
    """`logit + array`: a bias, or the additive mask of other libraries (0 and -inf).

    Also called: attention bias, additive mask, `attn_mask` of floats.

    Args:
      array: floating, broadcasts to `*B N T S`. A row of -inf gives zero output, as a mask does.

    Raises:
      TypeError: if `array` is not floating.
      ValueError: in use, if it does not broadcast to `*B N T S`.

    Source: Raffel et al., 2020, for position biases; `attn_mask` of torch's functions.

    >>> float(Additive(jnp.ones((1, 1, 1, 1)))(jnp.asarray(1.0), 0, 0, 0, 0))
    2.0
    """

    array: Any

    AXES: ClassVar = {"array": "bnqk"}

    def __post_init__(self):
        kind = dtype_of(self.array)
        if not jnp.issubdtype(kind, jnp.floating):
            raise TypeError(
                f"Additive needs a floating array; got {kind}. A boolean mask goes to mask=."
            )

    def bind(self, sizes):
        return Additive(to_grid("An additive score", self.array, sizes))

    def __call__(self, logits, b, n, q, k):
        return logits + look_up(self.array, b, n, q, k).astype(logits.dtype)

    def grid(self, logits, sizes):
        return logits + self.array.astype(logits.dtype)


@frozen
class ScoreFn(Score):
    """`fn(logits, b, n, q, k)`: any function of a logit and its indices.

    Also called: `score_mod` of FlexAttention.

    `fn` is evaluated for one logit at a time, at masked positions too. An index beyond the end of
    an array reads its last entry, which receives the gradient. NaN or an infinite derivative at a
    masked position does not reach outputs or the gradients of q, k and v, but makes those of
    `params` NaN, as `jnp.log(q - k)` does under a causal mask: use `jnp.maximum(q - k, 1)`.

    Args:
      fn: maps a logit and four integers, arrays without axes, to a logit of the same dtype. It is
        compared by identity: define it once, outside the call.
      params: a pytree of arrays that should receive gradients: `fn(params, logits, b, n, q, k)`.
      reads: as in `Score`.
      places: global indices of batch entries and heads; `attend` sets it for shards.

    Raises:
      TypeError: if `fn` is not a function of these arguments.
      ValueError: in use, if `fn` changes the shape or dtype.

    Source: Dong et al., "Flex Attention", 2024, whose `score_mod` it is.

    >>> float(ScoreFn(lambda x, b, n, q, k: 2 * x)(jnp.asarray(3.0), 0, 0, 0, 0))
    6.0
    """

    fn: Callable[..., jax.Array]
    params: Any = None
    places: Places | None = None
    reads: str = field(default="order", kw_only=True)

    AXES: ClassVar = {}

    def __post_init__(self):
        check_reads(self)
        first = "logits" if self.params is None else "params, logits"
        check_takes("ScoreFn", self.fn, f"{first}, b, n, q, k")

    def at(self, places):
        return ScoreFn(self.fn, self.params, places, reads=self.reads)

    def __call__(self, logits, b, n, q, k):
        params = jax.tree.map(jnp.asarray, self.params)
        fn = self.fn if self.params is None else partial(self.fn, params)
        # `fn` may mix indices with any dtype.
        with traced_indices("ScoreFn"), jax.numpy_dtype_promotion("standard"):
            changed = on_elements(fn, (*in_whole(self.places, b, n), q, k), logits)
        if changed.shape != logits.shape or changed.dtype != logits.dtype:
            raise ValueError(
                "ScoreFn's function must keep the logits' shape and dtype, "
                f"{logits.shape} {logits.dtype}; it returned {changed.shape} {changed.dtype}."
            )
        return changed


IDENTITY = Identity()
