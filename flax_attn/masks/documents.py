"""Packed documents by their lengths: each query attends to one contiguous range of keys.

Kernels support such ranges. `Segments(ids)` describes the same mask, but does not guarantee that
equal ids are contiguous.
"""

from contextlib import nullcontext
from dataclasses import field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from .._internal.arrays import INT32_MAX, aligned, check_integers, lists_to_arrays, saturate
from .._internal.types import frozen
from .algebra import Mask
from .ranges import segments_of

MIN_ID_TOKENS = 9  # rows with fewer tokens are not checked for ids


@frozen
class Documents(Mask):
    """Packed documents: every token attends only to its own document.

    Also called: document mask, sequence packing, varlen attention.

    A row holds documents one after another: the first `lengths[0]` tokens are one, the next
    `lengths[1]` another. It is not causal: a decoder uses `CAUSAL & Documents(lengths)`. Tokens
    after the last document are padding: they are masked as queries and as keys, with zero outputs.
    In a layer with `valid=`, lengths count only real tokens.

    Args:
      lengths: number of tokens of each document, integers, shape (batch, max documents per row),
        shorter rows filled with 0; a flat array is for every row. They are counts: convert ids by
        `Documents.of(ids)`, and `cu_seqlens` by differences. They may be traced; then they are not
        checked, and documents are truncated to the tokens.
      ends, tokens: internal, set by `bind`.

    Raises:
      TypeError: if `lengths` are not integers.
      ValueError: for ragged lists, for concrete lengths below 0 or that look like ids; in use, if
        queries and keys are not the same tokens, if concrete lengths exceed the number of tokens,
        or if the shape does not fit.

    Source: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.

    >>> from flax_attn import CAUSAL, attend
    >>> x = jnp.ones((1, 4, 2, 8))
    >>> packed = Documents([[2, 1]])  # two tokens, one token, and one of padding
    >>> attend(x, x, x, mask=CAUSAL & packed)[0, :, 0, 0].tolist()
    [1.0, 1.0, 1.0, 0.0]
    >>> packed.positions(4).tolist()
    [[0, 1, 0, 0]]
    """

    lengths: Any
    ends: Any = field(default=None, kw_only=True)
    tokens: int | None = field(default=None, kw_only=True)

    AXES: ClassVar = {"lengths": "b.", "ends": "b."}
    reads = "order"

    def __post_init__(self):
        if self.ends is not None:
            return
        try:
            lists_to_arrays(self, "lengths")
        except ValueError as error:
            raise ValueError(
                "Documents needs as many lengths in every row: fill shorter rows with 0."
            ) from error
        check_integers("Documents", lengths=self.lengths)
        if np.ndim(self.lengths) == 0:
            raise ValueError(
                "Documents needs a length for each document, shape *B G; got one number. Padding "
                "alone is Lengths(n)."
            )
        if _is_known(self.lengths) and (np.asarray(self.lengths) < 0).any():
            least = np.asarray(self.lengths).min()
            raise ValueError(f"Documents needs lengths of 0 or more; got {least}.")

    @classmethod
    def of(cls, ids: Any, padding: int | None = None) -> "Documents":
        """Documents from concrete ids that do not decrease along a row, `*B T`.

        Args:
          ids: of the documents of the tokens.
          padding: the id of padding, which stands at the end of a row; None if every token belongs
            to a document, so that padding with an id of its own attends to itself.

        Raises:
          TypeError: if the ids are not integers.
          ValueError: if they are traced, decrease, or follow padding; use `Segments(ids)` then.

        >>> Documents.of(np.asarray([[7, 7, 8], [3, 3, 3]])).lengths.tolist()
        [[2, 1], [3, 0]]
        >>> Documents.of(np.asarray([[1, 1, 2, 0], [1, 0, 0, 0]]), padding=0).lengths.tolist()
        [[2, 1], [1, 0]]
        """
        check_integers("Documents.of", ids=ids)
        if isinstance(ids, Tracer):
            raise ValueError(
                "Documents.of needs ids that are known while the program is traced; take "
                "Documents(lengths), whose lengths may be traced, or Segments(ids)."
            )
        ids = np.asarray(ids)
        real = np.ones(ids.shape, bool) if padding is None else ids != padding
        if (real[..., 1:] & (~real[..., :-1] | (ids[..., 1:] < ids[..., :-1]))).any():
            raise ValueError(
                "Documents.of needs ids that do not decrease along a row, and padding behind them; "
                f"got padding={padding!r}. If the last ones are padding, say its id; Segments(ids) "
                "takes any order, beside valid= for padding."
            )
        starts = real.copy()
        starts[..., 1:] &= ids[..., 1:] != ids[..., :-1]
        number = np.where(real, starts.cumsum(-1) - 1, -1)  # *B T
        most = int(number.max(initial=-1)) + 1
        return cls((number[..., None] == np.arange(most)).sum(-2).astype(np.int32))

    def segments(self, length: int | None = None) -> Int[Array, "*B T"]:
        """The index of each token's document, for `segments=` of recurrent layers.

        Args:
          length: tokens in a row; None for those of the fullest row, if lengths are concrete.
            Padding has the number of documents as its index.

        Raises:
          ValueError: for None with traced lengths.

        >>> Documents([2, 1]).segments(4).tolist()
        [0, 0, 1, 2]
        """
        return self._tokens(length)[0]

    def positions(self, length: int | None = None) -> Int[Array, "*B T"]:
        """The position of each token in its document, for `positions=` of layers.

        Args:
          length: tokens in a row; None as in `segments`.

        Raises:
          ValueError: for None with traced lengths.

        >>> Documents([2, 1]).positions(4).tolist()
        [0, 1, 0, 0]
        """
        return self._tokens(length)[1]

    def _tokens(self, length: int | None) -> tuple[jax.Array, jax.Array]:
        """The index of each token's document, and the token's position in it."""
        if length is None and not _is_known(self.lengths):
            raise ValueError(
                "Documents does not know how many tokens a row has, since its lengths are traced; "
                "say so: segments(T), positions(T)."
            )
        with _eager_if_known(self.lengths):
            ends = _document_ends(self.lengths)
            count = int(ends[..., -1:].max(initial=0)) if length is None else length
            tokens = jnp.arange(count, dtype=jnp.int32).reshape((1,) * (ends.ndim - 1) + (-1,))
            ends = ends[..., None, :]
            return _document_number(ends, tokens), tokens - _first(ends, tokens)  # *B T

    def bind(self, sizes):
        if self.ends is not None:
            return self
        check_same_tokens(self, sizes)
        ends, batch = _document_ends(self.lengths), sizes.batch
        fits = len(ends.shape) <= len(batch) + 1 and all(
            n in (1, most) for n, most in zip(ends.shape[-2::-1], batch[::-1], strict=False)
        )
        if not fits:
            raise ValueError(
                f"Documents.lengths must have shape ({', '.join(map(str, (*batch, 'G')))}), for at "
                f"most G documents in a row, or broadcast to it; got {ends.shape}."
            )
        most = int(np.asarray(ends).max(initial=0)) if _is_known(ends) else 0
        if isinstance(sizes.T, int) and most > sizes.T:
            raise ValueError(
                f"Documents.lengths add up to {most} tokens; queries and keys are {sizes.T}. Of "
                "cumulative lengths (cu_seqlens) give the differences, np.diff(cu_seqlens)."
            )
        if _is_known(self.lengths) and _look_like_ids(np.asarray(self.lengths), sizes.T):
            raise ValueError(
                "Documents.lengths are as many as tokens and begin with 0, as ids do; "
                "Documents.of(ids) makes lengths of ids."
            )
        if any(n > 1 for n in ends.shape[:-1]):
            ends = jnp.broadcast_to(ends, (*batch, ends.shape[-1]))
        return Documents(self.lengths, ends=ends.reshape(-1, ends.shape[-1]), tokens=sizes.T)

    def __call__(self, b, n, q, k):
        ends = self._row(b)
        return (_first(ends, q) <= k) & (k < _end(ends, q))

    def grid(self, sizes):
        first, end = self.as_runs(jnp.arange(sizes.T, dtype=jnp.int32)[None])  # B|1 T
        k = jnp.arange(sizes.S, dtype=jnp.int32)[None, None]
        return ((first[..., None] <= k) & (k < end[..., None]))[:, None]

    def as_runs(self, q):
        ends = self.ends[:, None, :]  # B|1 1 G
        return _first(ends, q), _end(ends, q)

    def as_segments(self):
        """Segment ids; padding has different ids as query and as key, so it attends to nothing."""
        if (
            self.tokens is None or self.tokens == INT32_MAX
        ):  # evaluated at positions, which are unbounded
            return None
        q = jnp.arange(self.tokens, dtype=jnp.int32)[None]
        ids = _document_number(self.ends[:, None, :], q)  # B|1 T
        is_padding = q >= self.ends[:, -1:]
        return jnp.where(is_padding, -1, ids), jnp.where(is_padding, -2, ids)

    def key_range(self, b, n, q, sizes):
        """From the start of the first query's document to the end of the last query's."""
        ends = self._row(b)
        return _first(ends, q[0]), _end(ends, q[1] - 1)

    def seen_range(self, b, n, q, sizes):
        """The document, if the first and the last query share one; else empty."""
        ends = self._row(b)
        return _first(ends, q[1] - 1), _end(ends, q[0])

    def _row(self, b: Any) -> jax.Array:
        """The ends of batch entry b, after the axes of b."""
        return self.ends[0] if len(self.ends) == 1 else jnp.asarray(self.ends)[b]


def _is_known(x: Any) -> bool:
    """Whether its values are concrete during tracing."""
    return not isinstance(x, Tracer | jax.ShapeDtypeStruct)


def _eager_if_known(lengths: Any) -> Any:
    """Computes known lengths while a program is traced, so that they can be checked there."""
    return jax.ensure_compile_time_eval() if _is_known(lengths) else nullcontext()


def _look_like_ids(lengths: np.ndarray, tokens: Any) -> bool:
    """Whether lengths look like document ids from 0, one per token; False for few tokens."""
    if not isinstance(tokens, int) or lengths.shape[-1] != tokens or tokens < MIN_ID_TOKENS:
        return False
    steps = np.diff(lengths, axis=-1)
    rises = ((steps == 0) | (steps == 1)).all()
    return bool((lengths[..., 0] == 0).all() and rises)


def segments_for(mask: Mask, shape: tuple[int, ...], order: Any = None) -> tuple[Any, Any] | None:
    """Document ids of queries and keys, the same tokens `*B T`, from an unbound mask.

    None if the mask has no documents. `order` is the index of each token among the real tokens of
    its row, if there is padding, or if others came in an earlier call.
    """
    if not isinstance(mask, Documents):
        return segments_of(mask)
    if order is None:
        ids = mask.segments(shape[-1])
    else:
        ends = _document_ends(mask.lengths)[..., None, :]
        ids = _document_number(ends, jnp.broadcast_to(order, shape))
    return ids, ids


def document_count(mask: Mask) -> int | None:
    """How many documents a row has at most, the id of its padding; None for other masks."""
    return np.shape(mask.lengths)[-1] if isinstance(mask, Documents) else None


def check_same_tokens(mask: Documents, sizes: Any) -> None:
    """Raises ValueError unless queries and keys have the same length."""
    if sizes.T != sizes.S:
        raise ValueError(
            f"Documents is for queries and keys that are the same tokens; got T={sizes.T} and "
            f"S={sizes.S}: say Segments(q_ids=..., kv_ids=...)."
        )


def _document_ends(lengths: Any) -> Int[Array, "... G"]:
    """End of each document, saturated at INT32_MAX."""
    with _eager_if_known(lengths):
        rows = jnp.clip(saturate(lengths), 0)
        if rows.shape[-1] == 0:  # no documents: everything is padding
            rows = jnp.zeros((*rows.shape[:-1], 1), jnp.int32)
        total = jnp.cumsum(rows.astype(jnp.float32), axis=-1) >= INT32_MAX  # int32 would overflow
        return jnp.where(total, INT32_MAX, jnp.cumsum(rows, axis=-1, dtype=jnp.int32))


# Both never decrease in q. After the last document both equal the last end.


def _first(ends: Any, q: Any) -> Any:
    """Start of the document that contains q."""
    q = jnp.asarray(q).astype(jnp.int32)[..., None]
    ends = aligned(jnp.asarray(ends), q)
    return jnp.where(ends <= q, ends, 0).max(-1, initial=0)


def _end(ends: Any, q: Any) -> Any:
    """End of the document that contains q."""
    q = jnp.asarray(q).astype(jnp.int32)[..., None]
    ends = aligned(jnp.asarray(ends), q)
    return jnp.where(ends > q, ends, ends[..., -1:]).min(-1, initial=INT32_MAX)


def _document_number(ends: Any, q: Any) -> Any:
    """Index of the document that contains q: the number of documents that end before it."""
    q = jnp.asarray(q).astype(jnp.int32)[..., None]
    return (q >= aligned(jnp.asarray(ends), q)).sum(-1, dtype=jnp.int32)
