"""Token indices of one call, and which index a mask, a score or a rotary reads.

slot      = a token's index along the axis T
order     = a token's index among the real tokens of its row, as a cache counts
position  = `positions=` if it has one number per token, else the order

A part of a mask or a score says by `reads` what it depends on, and is evaluated at:

reads               without padding   with padding                     beside a cache
"slot", "nothing"   slot              slot                             slot
"sequence"          slot              slot                             order
"distance"          slot              slot; order if a row has gaps    order
"order"             slot              order                            order
"position"          position          position                         order, equal to the position
"query position"    position          position                         position
rotary              position          position                         position

Parts that give the same result by slot are left at slots, since kernels support nothing else: the
order equals the slot if padding is known to be at the right end, and it never decreases along
slots. A cache itself evaluates masks and scores at the orders of its tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from .._internal.arrays import dtype_of, saturate
from .._internal.checks import is_known, per_token
from ..cache import Memory
from ..cache.rows import counted, next_positions
from ..masks import Dense, Lengths, Mask
from ..masks.algebra import parts_of
from ..masks.at_positions import at_positions_of, leaves_of
from ..masks.documents import segments_for
from ..places import Positions, check_reads, is_indexed_by_slot, with_end
from ..positions import Rotary
from ..positions.lengths import lengths_of
from ..scores import AtPositions, Chain, Score
from ..token_layouts import positions_of


class RotaryInput(NamedTuple):
    """Positions of tokens, and the length of each token's sequence."""

    positions: Any
    lengths: Any


RotaryPositions = Int[Array, "... T"] | RotaryInput | None  # what `rotary_input` returns


class TokenIndices(NamedTuple):
    """Which indices the parts of a mask and a score read in one call.

    Attributes:
      by: indices of queries and keys for each value of `reads`; for one that is not there the
        slots give the same, or a cache its orders.
      order: of the queries; None if it equals the slots, and beside a cache of keys.
      end: the value of `offset="end"`.
      unknown: rows, `*B`, whose positions a mask or a score reads but a cache does not store; None
        if there are none.
    """

    by: Mapping[str, Positions] = MappingProxyType({})
    order: Int[Array, "*B T"] | None = None
    end: Any = 0
    unknown: Any = None

    def mask(self, mask: Mask) -> Mask:
        """Returns `mask` with each part bound to the indices that it reads."""
        return at_positions_of(mask, self.read_by, self.end)

    def score(self, score: Score) -> Score:
        """Returns `score` with each part bound to the indices that it reads."""
        if isinstance(score, Chain):
            return Chain(self.score(score.first), self.score(score.then))
        positions = self.read_by(score)
        return score if positions is None else AtPositions(with_end(score, self.end), positions)

    def read_by(self, node: Mask | Score) -> Positions | None:
        """The indices at which a part is evaluated instead of slots, or None."""
        return self.by.get(reads_of(node))

    def of_first(self, queries: int) -> "TokenIndices":
        """The indices with only the first `queries` tokens as queries."""
        by = {x: replace(at, q=jnp.asarray(at.q)[..., :queries]) for x, at in self.by.items()}
        end = self.end if self.order is None else self.order[..., -1] + 1 - queries
        return self._replace(by=by, end=end)

    def distances(self) -> Int[Array, "*B T T"] | None:
        """Order of the query minus order of the key; None if slots give the same."""
        if "distance" not in self.by:
            return None
        order: Any = self.by["distance"].q
        return order[..., :, None] - order[..., None, :]


def reads_of(node: Mask | Score) -> str:
    """The index that a mask or a score reads; raises ValueError for an unknown `reads`."""
    if is_indexed_by_slot(node):
        return "slot"
    check_reads(node)
    return node.reads


def _leaves_of(node: Mask | Score) -> Iterator[Mask | Score]:
    """Yields the leaf masks or scores that `node` is composed of."""
    if isinstance(node, Mask):
        yield from leaves_of(node)
    elif isinstance(node, Chain):
        yield from (*_leaves_of(node.first), *_leaves_of(node.then))
    else:
        yield node


def indices_of(
    x: Array,
    real: Bool[Array, "*B T"] | None,
    positions: Any = None,
    keys: int | None = None,
    valid: Any = None,
) -> TokenIndices:
    """The indices of the tokens x, `*B T D`, in a call without a cache.

    Args:
      x: the tokens.
      real: which of them are no padding; None for all.
      positions: one number per token, or None; see `one_per_token`.
      keys: number of keys if they are other tokens, by slot; None if they are the queries.
      valid: what `real` was made of; of `Lengths` it is known that it has no gaps.
    """
    order, has_gaps = (None, False) if real is None else _order(x, real, valid)
    end: Any = 0
    if keys is not None and real is not None:
        order = counted(x.shape[-2], 0) if order is None else order  # "end" counts real queries
        end = keys - real.sum(axis=-1, dtype=jnp.int32)
    by_order = by_position = None if order is None else _pair(order, keys)
    if positions is not None and not _are_slots(positions, x.shape[-2], order):
        by_position = _pair(_at_real(positions, real), keys)
    by = {"position": by_position, "query position": by_position, "order": by_order}
    # Orders never decrease along slots, so of the same tokens both define one sequence, and without
    # gaps the same distances.
    if has_gaps or keys is not None:
        by["distance"] = by_order
    if keys is not None:
        by["sequence"] = by_order
    return TokenIndices({reads: at for reads, at in by.items() if at is not None}, order, end)


def indices_in_cache(
    cache: Any,
    x: Array,
    real: Bool[Array, "*B T"] | None,
    positions: Any,
    readers: tuple[Mask | Score, ...],
) -> TokenIndices:
    """The indices of the tokens x beside a cache, which itself indexes all keys by their order.

    Args:
      cache: a cache of keys, what a call has `Stored`, or a `Memory`.
      x, real, positions: as in `indices_of`.
      readers: the mask and the score of the call.

    Raises:
      ValueError: if positions that are read are known to differ from the orders in the cache.
    """
    order, unknown = None, None
    if isinstance(cache, Memory):
        order = None if real is None else _order(x, real)[0]
    elif positions is not None:
        unknown = _positions_differ(positions, cache.next_positions(x.shape[-2], real), readers)
    at = order if positions is None else _at_real(positions, real)
    by = {} if at is None else {"query position": Positions(at, all_present=True)}
    return TokenIndices(by, order, unknown=unknown)


def one_per_token(x: Array, positions: Any, rotary: Any) -> Any:
    """Returns `positions` if they have one number per token of x, `*B T D`, else None.

    They have several for a rotary with position axes, or with an axis before the batch axes.

    Raises:
      TypeError: if they have one number per token and are not integers.
    """
    if positions is None or getattr(rotary, "axes", None) is not None:
        return None
    if np.ndim(positions) >= x.ndim:
        return None
    check_positions(positions)
    return positions


def check_positions(positions: Any) -> None:
    """Raises TypeError unless positions are integers or None."""
    if positions is not None and not jnp.issubdtype(dtype_of(positions), jnp.integer):
        raise TypeError(f"positions must hold integers; got {dtype_of(positions)}.")


def _pair(indices: Any, keys: int | None) -> Positions:
    """Indices of the queries, and of the keys if `keys` says that they are the same tokens."""
    return Positions(indices, indices if keys is None else None, all_present=True)


def _at_real(positions: Any, real: Any) -> Any:
    """Positions with zeros at padding, where values such as -1 must not reach gradients."""
    return positions if real is None else jnp.where(real, saturate(positions), 0)


def _are_slots(positions: Any, length: int, order: Any) -> bool:
    """Whether positions are known to be 0, 1, 2, ... and the order equals the slots."""
    if order is not None or not is_known(positions) or np.shape(positions)[-1:] != (length,):
        return False
    positions = np.asarray(positions)
    return bool((positions == np.broadcast_to(np.arange(length), positions.shape)).all())


def padding_mask(valid: Any, real: Bool[Array, "*B T"]) -> Mask:
    """The mask of the real tokens as keys, from what `real` was made of."""
    if isinstance(valid, Lengths):
        return Lengths(valid.kv, q=valid.kv)
    return valid if isinstance(valid, Mask) else Dense(real[..., None, None, :])


def _order(x: Array, real: Bool[Array, "*B T"], valid: Any = None) -> tuple[Any, bool]:
    """The order of each token, and whether padding may lie between real tokens.

    Padding gets the order of the real token before it, so orders never decrease. The order is None
    if padding is known to be only at the right end: orders then equal slots.
    """
    slots, tokens = None, positions_of(x, -2)  # token in each slot, for a permuted layout
    if tokens is not None:
        slots = np.argsort(tokens)
        real = real[..., slots]
    if isinstance(valid, Lengths) and slots is None:
        return None, False
    has_gaps = not isinstance(valid, Mask)
    if has_gaps and is_known(real):
        known = np.asarray(real)
        rises = np.diff(known.astype(np.int8)) > 0
        if slots is None and not rises.any():
            return None, False
        has_gaps = bool((rises.sum(-1) + known[..., :1].sum(-1) > 1).any())
    order = jnp.maximum(jnp.cumsum(real, axis=-1, dtype=jnp.int32) - 1, 0)
    return order if tokens is None else order[..., tokens], has_gaps


def rotary_input(
    x: Array,
    real: Bool[Array, "*B T"] | None,
    positions: Any,
    order: Any,
    mask: Mask,
    rotaries: tuple[Any, ...],
) -> Any:
    """Input of rotaries at the tokens x, `*B T D`: positions, and lengths if a rotary needs them.

    Args:
      x, real: as in `indices_of`.
      positions: as in the call.
      order: of each token; None if it equals the slot.
      mask: that of the call; its `Segments` or `Documents` define the documents of a row.
      rotaries: those that use the result.
    """
    rotary = rotaries[0]
    if positions is None and order is not None:
        positions = rotary.positions_from_indices(order) if isinstance(rotary, Rotary) else order
    if not any(isinstance(x, Rotary) and x.needs_length for x in rotaries):
        return positions
    documents = documents_of(x, real, mask)
    if documents.is_unpacked:
        return positions
    several = getattr(rotary, "axes", None) is not None
    return RotaryInput(positions, lengths_of(positions, x.shape[:-1], *documents, several))


class Documents(NamedTuple):
    """Padding mask and document ids, both `*B T`; None for all real, and for one document."""

    valid: Bool[Array, "*B T"] | None
    ids: Int[Array, "*B T"] | None

    @property
    def is_unpacked(self) -> bool:
        """Whether each row is one document without padding."""
        return self.valid is None and self.ids is None


def documents_of(x: Array, real: Bool[Array, "*B T"] | None, mask: Mask) -> Documents:
    """The documents of the tokens x, `*B T D`, from `Segments` or `Documents` in a mask."""
    both = [segment_ids(part, x, real) for part in parts_of(mask)]
    packed = [ids[0] for ids in both if ids is not None]
    ids = per_token("Segments", jnp.asarray(packed[0]), x.shape[:-1]) if packed else None
    return Documents(real, ids)


def segment_ids(mask: Mask, x: Array, real: Any, before: Any = None) -> tuple[Any, Any] | None:
    """Document ids of queries and keys, both the tokens x; None if `mask` has none.

    `before`, `*B`, is how many tokens came in earlier calls.
    """
    if before is not None:
        order = jnp.maximum(next_positions(before, x.shape[-2], real), 0)
    else:
        order = None if real is None else _order(x, real)[0]
    return segments_for(mask, x.shape[:-1], order)


def rotate_by(rotary: Any, x: Array, positions: Any) -> Array:
    """Rotates the heads x, if there is a rotary; `positions` is the result of `rotary_input`."""
    if rotary is None:
        return x
    if not isinstance(positions, RotaryInput):
        return rotary(x, positions)
    if isinstance(rotary, Rotary):
        return rotary(x, positions.positions, positions.lengths)
    return rotary(x, positions.positions)


def _positions_differ(
    positions: Any, orders: Int[Array, "*B T"], nodes: tuple[Mask | Score, ...]
) -> Bool[Array, "*B"] | None:
    """Rows whose positions differ from the orders in a cache, if a mask or score reads them.

    None if nothing reads positions, or they are known to be equal.

    Raises:
      ValueError: if they are known to differ.
    """
    parts = [part for node in nodes for part in _leaves_of(node)]
    readers = [part for part in parts if reads_of(part) == "position"]
    if not readers:
        return None
    positions = per_token("positions", saturate(positions), orders.shape)
    unlike = ((orders >= 0) & (positions != orders)).any(axis=-1)
    if isinstance(unlike, Tracer):
        return unlike
    if unlike.any():
        raise ValueError(
            f"{type(readers[0]).__name__} reads positions, and a cache stores its keys by order "
            "only: with a cache, positions must count the non-padding tokens of a row. Leave "
            "positions out, or cache each document in its own row."
        )
    return None
