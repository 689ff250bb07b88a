"""Token indices of one call, and which index a mask, a score or a rotary reads.

slot      = a token's index along the axis T
order     = a token's index among the real tokens of its row, as a cache counts
position  = `positions=` if it has one number per token, else the order
mask      = each part evaluated at slots, orders or positions, as its `reads` says
score     = the same
rotary    = positions, and the lengths of sequences if its frequencies depend on them

Parts that give the same result by slot are left at slots, since kernels support nothing else.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import dtype_of, saturate
from .._internal.checks import per_token, valid_tokens
from ..cache import Cache, PagedCache
from ..cache.attention import Stored
from ..cache.rows import counted, next_places
from ..masks import Mask
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
    """Indices of the tokens of one call; None where they equal the slots.

    Attributes:
      by_order, by_position: indices of queries and keys.
      has_gaps: whether padding may lie between real tokens of a row, so that distances between
        slots and between orders may differ.
      same_keys: whether the keys are the same tokens as the queries.
      cached: whether a cache indexes queries and keys, by their order.
      end: the value of `offset="end"`.
      unknown: rows, `*B`, whose positions a mask or a score reads but a cache does not store; None
        if there are none.
    """

    by_order: Positions | None = None
    by_position: Positions | None = None
    has_gaps: bool = False
    same_keys: bool = True
    cached: bool = False
    end: Any = 0
    unknown: Any = None

    @property
    def order(self) -> Int[Array, "*B T"] | None:
        """The orders of the queries; None if they equal the slots."""
        return None if self.by_order is None else self.by_order.q

    def of_first(self, queries: int) -> "TokenIndices":
        """The indices with only the first `queries` tokens as queries."""

        def of_first(positions: Positions | None) -> Positions | None:
            return positions and replace(positions, q=jnp.asarray(positions.q)[..., :queries])

        order, position = of_first(self.by_order), of_first(self.by_position)
        end = self.end if self.order is None else self.order[..., -1] + 1 - queries
        return self._replace(by_order=order, by_position=position, end=end)

    def mask(self, mask: Mask) -> Mask:
        """Returns `mask` with each part bound to the indices that it reads."""
        if self.by_order is self.by_position is None:
            return mask
        return at_positions_of(mask, self._index_read_by, self.end)

    def score(self, score: Score) -> Score:
        """Returns `score` with each part bound to the indices that it reads."""
        if self.by_order is self.by_position is None:
            return score
        if isinstance(score, Chain):
            return Chain(self.score(score.first), self.score(score.then))
        positions = self._index_read_by(score)
        return score if positions is None else AtPositions(with_end(score, self.end), positions)

    def distances(self) -> Int[Array, "*B T T"] | None:
        """Order of the query minus order of the key; None if slots give the same."""
        if self.order is None or not self.has_gaps:
            return None
        return self.order[..., :, None] - self.order[..., None, :]

    def outputs(self, o: Float[Array, "*B T N h"]) -> Float[Array, "*B T N h"]:
        """Returns o with NaN in `unknown` rows."""
        return jnp.where(self.unknown[..., None, None, None], jnp.nan, o)

    def _index_read_by(self, node: Mask | Score) -> Positions | None:
        """The indices at which `node` is evaluated instead of slots, or None."""
        reads = reads_of(node)
        if reads in ("slot", "nothing") or (self.cached and reads != "query position"):
            return None
        if reads in ("position", "query position"):
            return self.by_position
        # Orders never decrease along slots, so both define the same sequence.
        by_slot = reads == "sequence" or (reads == "distance" and not self.has_gaps)
        return None if self.same_keys and by_slot else self.by_order


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


def token_indices(
    x: Array,
    valid: Bool[Array, "*#B T"] | None,
    positions: Any = None,
    *,
    keys: int | None = None,
    cache: Any = None,
    readers: tuple[Mask | Score, ...] = (),
) -> TokenIndices:
    """Returns the indices of the tokens x, `*B T D`.

    Args:
      x: the tokens.
      valid: which of them are real.
      positions: one number per token, or None; see `one_per_token`.
      keys: number of keys if they are other tokens, by slot; None if they are the queries.
      cache: the cache, which indexes queries and keys by order, or None.
      readers: masks and scores that are used with the cache.

    Raises:
      ValueError: if positions that are read are known to differ from the orders in the cache.
    """
    is_self_attention = keys is None and cache is None
    stores = isinstance(cache, Cache | PagedCache | Stored)
    order, has_gaps = (None, False) if valid is None or stores else _order(x, valid)
    if order is None and valid is not None and keys is not None:
        order = counted(x.shape[-2], 1)[0]  # so that "end" counts real queries
    by_order = order if order is None else _positions(order, is_self_attention)
    by_position = by_order
    if positions is not None and not _are_slots(positions, x.shape[-2], order):
        if valid is not None:  # values at padding, such as -1, must not reach gradients
            is_valid = valid_tokens("valid", valid, x.shape[:-1])
            positions = jnp.where(is_valid, saturate(positions), 0)
        by_position = _positions(positions, is_self_attention)
    end: Any = 0
    if keys is not None and valid is not None:
        count = valid_tokens("valid", valid, x.shape[:-1]).sum(axis=-1, dtype=jnp.int32)
        end = keys - count
    unknown = None
    if stores and positions is not None:
        unknown = _positions_differ(positions, cache.next_places(x.shape[-2], valid), readers)
    return TokenIndices(
        by_order, by_position, has_gaps, is_self_attention, cache is not None, end, unknown
    )


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


def _positions(indices: Any, is_self_attention: bool) -> Positions:
    """Indices of the queries, and of the keys if they are the same tokens."""
    return Positions(indices, indices if is_self_attention else None, all_present=True)


def _are_slots(positions: Any, length: int, order: Any) -> bool:
    """Whether positions are known to be 0, 1, 2, ... and the order equals the slots."""
    if order is not None or not _is_known(positions) or np.shape(positions)[-1:] != (length,):
        return False
    positions = np.asarray(positions)
    return bool((positions == np.broadcast_to(np.arange(length), positions.shape)).all())


def _is_known(x: Any) -> bool:
    """Whether an array's values are concrete and readable during tracing."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _order(x: Array, valid: Any) -> tuple[Any, bool]:
    """The order of each token, and whether padding may lie between real tokens.

    Padding gets the order of the real token before it, so orders never decrease. The order is None
    if padding is known to be only at the right end: orders then equal slots.
    """
    is_valid = valid_tokens("valid", valid, x.shape[:-1])  # *B T
    places = positions_of(x, -2)  # token in each slot, for a permuted layout
    slots = None if places is None else np.argsort(places)
    has_gaps = True
    if _is_known(valid):
        real = np.broadcast_to(np.asarray(valid), is_valid.shape)
        rises = np.diff((real if slots is None else real[..., slots]).astype(np.int8)) > 0
        if places is None and not rises.any():
            return None, False
        starts = (real if slots is None else real[..., slots])[..., :1].sum(-1)
        has_gaps = bool((rises.sum(-1) + starts > 1).any())
    if slots is not None:
        is_valid = is_valid[..., slots]
    order = jnp.maximum(jnp.cumsum(is_valid, axis=-1, dtype=jnp.int32) - 1, 0)
    return order if places is None else order[..., places], has_gaps


def rotary_input(
    x: Array, valid: Any, positions: Any, order: Any, mask: Mask, *rotaries: Any
) -> Any:
    """Input of rotaries at the tokens x, `*B T D`: positions, and lengths if a rotary needs them.

    Args:
      x: the tokens.
      valid: which of them are real.
      positions: as in the call.
      order: of each token; None if it equals the slot.
      mask: that of the call; its `Segments` or `Documents` define the documents of a row.
      rotaries: the rotaries that use the result; each may be None.
    """
    rotary = next((x for x in rotaries if x is not None), None)
    if rotary is None:
        return None
    if positions is None and order is not None:
        positions = rotary.positions_from_indices(order) if isinstance(rotary, Rotary) else order
    if not any(isinstance(x, Rotary) and x.needs_length for x in rotaries):
        return positions
    documents = documents_of(x, valid, mask)
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


def documents_of(x: Array, valid: Any, mask: Mask) -> Documents:
    """The documents of the tokens x, `*B T D`, from `Segments` or `Documents` in a mask."""
    real = None if valid is None else valid_tokens("valid", valid, x.shape[:-1])
    both = [segment_ids(part, x, valid) for part in parts_of(mask)]
    packed = [ids[0] for ids in both if ids is not None]
    ids = per_token("Segments", jnp.asarray(packed[0]), x.shape[:-1]) if packed else None
    return Documents(real, ids)


def segment_ids(mask: Mask, x: Array, valid: Any, before: Any = None) -> tuple[Any, Any] | None:
    """Document ids of queries and keys, both the tokens x; None if `mask` has none.

    `before`, `*B`, is how many tokens came in earlier calls.
    """
    if before is not None:
        order = jnp.maximum(next_places(before, x.shape[-2], valid), 0)
    else:
        order = None if valid is None else _order(x, valid)[0]
    return segments_for(mask, x.shape[:-1], order)


def rotate_by(rotary: Any, x: Array, positions: Any) -> Array:
    """Rotates the heads x; `positions` is the result of `rotary_input`."""
    if not isinstance(positions, RotaryInput):
        return rotary(x, positions)
    if isinstance(rotary, Rotary):
        return rotary(x, positions.positions, positions.lengths)
    return rotary(x, positions.positions)


def _positions_differ(
    positions: Any, places: Int[Array, "*B T"], nodes: tuple[Mask | Score, ...]
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
    positions = per_token("positions", saturate(positions), places.shape)
    unlike = ((places >= 0) & (positions != places)).any(axis=-1)
    if isinstance(unlike, Tracer):
        return unlike
    if unlike.any():
        raise ValueError(
            f"{type(readers[0]).__name__} reads positions, and a cache stores its keys by order "
            "only: with a cache, positions must count the non-padding tokens of a row. Leave "
            "positions out, or cache each document in its own row."
        )
    return None
