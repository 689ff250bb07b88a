"""Relative positions as pure functions: buckets, table indices, and resized tables.

Indices are numpy integers if the distances are concrete. Each function documents its convention:
the sign of a distance, and the order of a table's rows.
"""

from bisect import bisect_left
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._internal.arrays import iota, is_count, reshaped
from .._internal.checks import check_choice
from .scaling import plain_rates

Indices = Int[np.ndarray, "*X"] | Int[Array, "*X"]


def t5_buckets(
    distance: Indices, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Indices:
    """Row of T5's table for `distance = key - query`.

    Half of the rows (per direction) are for one distance each, the others for ranges that grow by
    a constant factor up to `max_distance`; larger distances use the last row. The edges are exact;
    those of transformers, in float32, are the same for the published sizes.

    Args:
      distance: integers, numpy or jax, of any shape.
      buckets: rows of the table.
      max_distance: this and larger distances use the last row.
      bidirectional: whether keys after the query have the second half of the rows; if not, they
        all have row 0.

    Raises:
      ValueError: for fewer than 4 buckets (2 if not bidirectional), or a max_distance within the
        rows for one distance.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, and its code.

    >>> t5_buckets(np.asarray([-200, -8, -7, 0, 7, 8, 200])).tolist()
    [15, 8, 7, 0, 23, 24, 31]
    """
    rows = buckets // 2 if bidirectional else buckets
    single = rows // 2
    if not is_count(buckets, 4 if bidirectional else 2) or not is_count(max_distance, single + 1):
        raise ValueError(
            "t5_buckets needs 4 buckets or more (2 in one direction) and a max_distance beyond "
            f"their rows for one distance; got {buckets=}, {max_distance=}, {bidirectional=}."
        )
    xp = _xp(distance)
    magnitude = abs(distance) if bidirectional else xp.maximum(-distance, 0)
    bucket = _bucket(magnitude, single, _edges(single, max_distance, rows - single, False))
    return xp.asarray(bucket + xp.where(distance > 0, rows, 0) if bidirectional else bucket)


def deberta_buckets(distance: Indices, *, buckets: int, max_distance: int) -> Indices:
    """DeBERTa-v2's bucket of `distance = query - key`, within -buckets and buckets.

    Distances below buckets / 2 map to themselves; larger ones grow logarithmically, and
    `max_distance - 1` has the bucket `buckets - 1`. Both c2p and p2c read row `bucket + buckets`,
    clipped to the table of 2 buckets rows, at (query, key).

    Args:
      distance: integers, numpy or jax, of any shape.
      buckets: `position_buckets` in configs, even.
      max_distance: `max_relative_positions` in configs.

    Raises:
      ValueError: for an odd number of buckets or fewer than 4, or a max_distance within the
        buckets for one distance.

    Source: He et al., "DeBERTaV3", 2021, and the code of DeBERTa-v2.

    >>> deberta_buckets(np.asarray([-15, -4, -1, 0, 1, 2, 3, 15, 99]), buckets=4, max_distance=16)
    array([-3, -3, -1,  0,  1,  2,  3,  3,  4])
    """
    single = buckets // 2
    if not is_count(buckets, 4) or buckets % 2 or not is_count(max_distance, single + 2):
        raise ValueError(
            "deberta_buckets needs an even number of 4 buckets or more, and a max_distance beyond "
            f"those for one distance; got {buckets=}, {max_distance=}."
        )
    edges = _edges(single, max_distance - 1, single - 1, True)
    return _xp(distance).sign(distance) * _bucket(abs(distance), single + 1, edges)


def deberta_rows(queries: int, keys: int, *, buckets: int, max_distance: int) -> Indices:
    """Rows, `T S`, of DeBERTa-v2's table of 2 buckets rows for each query and key.

    Args:
      queries, keys: lengths, T and S.
      buckets, max_distance: as in `deberta_buckets`.

    >>> deberta_rows(2, 3, buckets=4, max_distance=16).tolist()
    [[4, 3, 2], [5, 4, 3]]
    """
    distance = iota(queries)[:, None] - iota(keys)[None]
    return deberta_rows_at(distance, buckets=buckets, max_distance=max_distance)


def deberta_rows_at(distance: Indices, *, buckets: int, max_distance: int) -> Indices:
    """Rows of DeBERTa-v2's table for `distance = query - key`.

    Args:
      distance, buckets, max_distance: as in `deberta_buckets`.

    >>> deberta_rows_at(np.asarray([0, -1, 99]), buckets=4, max_distance=16).tolist()
    [4, 3, 7]
    """
    offsets = deberta_buckets(distance, buckets=buckets, max_distance=max_distance)
    return (offsets + buckets).clip(0, 2 * buckets - 1)


@lru_cache(maxsize=64)
def _edges(first: int, last: int, steps: int, above: bool) -> tuple[int, ...]:
    """First distances of each bucket but the first of a logarithmic ramp.

    The ramp is `first (last / first) ** (k / steps)`, compared exactly in integers. An edge is the
    first distance that is no smaller, for k = 1 ... steps - 1, or if `above` the first that is
    larger, for k = 1 ... steps.
    """

    def beyond(distance: int, k: int) -> bool:
        a, b = distance**steps * first**k, last**k * first**steps
        return a > b if above else a >= b

    longest = range(first, last + 2)
    ks = range(1, steps + above)
    return tuple(longest[bisect_left(longest, True, key=lambda d, k=k: beyond(d, k))] for k in ks)


def _bucket(distance: Any, single: int, edges: tuple[int, ...]) -> Any:
    """`distance` if it is below `single`, else `single` plus the number of edges passed.

    Edges are compared one by one, since a sharded program may not capture constant arrays.
    """
    passed = sum(((distance >= edge).astype(distance.dtype) for edge in edges), start=0 * distance)
    return _xp(distance).where(distance < single, distance, single + passed)


def _xp(x: Any) -> Any:
    return jnp if isinstance(x, jax.Array) else np


def window_rows(height: int, width: int) -> Int[np.ndarray, "T T"]:
    """Rows of Swin's table of (2 height - 1)(2 width - 1) rows for each pair in a window.

    Tokens are in row-major order, T = height width. The row of the table is
    `(dy + height - 1)(2 width - 1) + dx + width - 1`, with distances `query - key`.

    Raises:
      ValueError: for sides that are not integers >= 1.

    Source: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
    2021, and its code.

    >>> window_rows(1, 2).tolist()
    [[1, 0], [2, 1]]
    """
    _check_sides("a window", height, width)
    y, x = np.divmod(np.arange(height * width), width)
    dy, dx = y[:, None] - y + height - 1, x[:, None] - x + width - 1
    return dy * (2 * width - 1) + dx


def window_coordinates(
    height: int, width: int, *, pretrained: tuple[int, int] | None = None
) -> Float[np.ndarray, "Y X 2"]:
    """Swin v2's log-spaced distances, `sign(d) log2(1 + 8 |d| / (side - 1)) / 3`.

    The input of the network that computes the table; rows are ordered as in `window_rows`.

    Args:
      height, width: sides of the window.
      pretrained: sides of the window used in training, if different.

    Raises:
      ValueError: for sides that are not integers >= 1, or for one side of 1 with a longer one,
        where Swin's code divides by zero and gives NaN.

    Source: Liu et al., "Swin Transformer V2: Scaling Up Capacity and Resolution", 2022, and its
    code.

    >>> window_coordinates(2, 2)[:, 2].round(4).tolist()
    [[-1.0566, 1.0566], [0.0, 1.0566], [1.0566, 1.0566]]
    """
    _check_sides("a window", height, width)
    sides = (height, width) if pretrained is None else pretrained
    _check_sides("a pretrained window", *sides)
    one = (height, width) == (1, 1) and pretrained is None
    if min(sides) == 1 and not one:
        raise ValueError(f"Distances are divided by side - 1; got a window of {sides}.")
    distances = np.meshgrid(
        *(np.arange(1 - n, n, dtype=np.float64) for n in (height, width)), indexing="ij"
    )
    scaled = np.stack(distances, -1) * 8 / (1 if one else np.asarray(sides) - 1)
    return np.sign(scaled) * np.log2(1 + abs(scaled)) / 3


def resized_rows(table: Float[Array, "R C"], queries: int, keys: int) -> Float[Array, "Q K C"]:
    """SAM's table entry for each query and key along one side of an image, interpolated.

    The table is interpolated to 2 max(queries, keys) - 1 rows, as in torch with
    `align_corners=False`. The row is `query - key` in steps of the longer side, rounded down.

    Args:
      table: trained for 2 n - 1 distances, from keys far after to keys far before the query.
      queries, keys: number of tokens along the side.

    Raises:
      ValueError: for an empty table, or sides that are not integers >= 1.

    Source: Li et al., "MViTv2: Improved Multiscale Vision Transformers for Classification and
    Detection", 2022, and the code of SAM.

    >>> resized_rows(jnp.asarray([[0.0], [1.0], [2.0]]), 2, 2)[..., 0].tolist()
    [[1.0, 0.0], [2.0, 1.0]]
    """
    _check_sides("an image", queries, keys)
    if table.ndim != 2 or not len(table):
        raise ValueError(f"table must have shape (rows, width); got {table.shape}.")
    # float32 and this order of operations, since rounding down depends on both.
    steps = np.float32(max(keys / queries, 1.0)), np.float32(max(queries / keys, 1.0))
    q = np.arange(queries, dtype=np.float32)[:, None] * steps[0]
    k = np.arange(keys, dtype=np.float32) * steps[1]
    rows = ((q - k) + np.float32((keys - 1) * max(queries / keys, 1.0))).astype(np.int32)
    return _interpolated(table, 2 * max(queries, keys) - 1)[rows]


def _interpolated(table: Float[Array, "R C"], length: int) -> Float[Array, "length C"]:
    """Linear interpolation of the table to `length` rows, as with `align_corners=False`."""
    if length == len(table):
        return table
    place = np.maximum((np.arange(length) + 0.5) * len(table) / length - 0.5, 0.0)
    below = np.floor(place).astype(np.int32)
    above = np.minimum(below + 1, len(table) - 1)
    share = jnp.asarray(place - below, table.dtype)[:, None]
    return table[below] * (1 - share) + table[above] * share


def decomposed_bias(
    q: Float[Array, "*B T N H"],
    rows: Float[Array, "Y U H"],
    columns: Float[Array, "X V H"],
) -> Float[Array, "*B N T S"]:
    """`q . rows + q . columns`: a bias for the rows of an image plus one for its columns.

    Tokens are in row-major order: T = Y X queries and S = U V keys. In SAM q is not scaled.

    Args:
      q: queries.
      rows, columns: entries of two tables, by `resized_rows`.

    Raises:
      ValueError: if T is not the number of queries of both tables.

    Source: Li et al., MViTv2, 2022, and the code of SAM.

    >>> table = jnp.ones((3, 4))
    >>> sides = resized_rows(table, 2, 2), resized_rows(table, 2, 2)
    >>> decomposed_bias(jnp.ones((4, 1, 4)), *sides).shape
    (1, 4, 4)
    """
    height, width = rows.shape[0], columns.shape[0]
    if q.shape[-3] != height * width:
        raise ValueError(
            f"q needs one token for each of {height} x {width} places; got {q.shape[-3]}."
        )
    image = reshaped(q, (*q.shape[:-3], height, width, *q.shape[-2:]))  # *B Y X N H
    by_row = jnp.einsum("...yxnh,ykh->...nyxk", image, rows)
    by_column = jnp.einsum("...yxnh,xkh->...nyxk", image, columns)
    bias = by_row[..., :, None] + by_column[..., None, :]  # *B N Y X U V
    keys = bias.shape[-2] * bias.shape[-1]
    return reshaped(bias, (*bias.shape[:-4], height * width, keys))


def sinusoids(
    positions: Float[Array, "*B T"] | Int[Array, "*B T"],
    width: int,
    *,
    base: float = 10_000.0,
    layout: Literal["half", "interleaved"] = "half",
    dtype: Any = jnp.float32,
) -> Float[Array, "*B T D"]:
    """`sin` and `cos` of `position * base ** (-2 i / width)`: a fixed sinusoidal embedding.

    Args:
      positions: of any sign; in Transformer-XL distances, in decreasing order.
      width: D, even.
      base: the longest wavelength is about 2 pi base.
      layout: "half" puts all sines first (Transformer-XL, XLNet), "interleaved" each sine before
        its cosine (Vaswani et al., the Conformer).
      dtype: of the angles and the result.

    Raises:
      ValueError: for an odd width or another layout.

    Source: Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context",
    2019.

    >>> sinusoids(jnp.asarray([0, 2]), 4).shape
    (2, 4)
    """
    if not is_count(width, 2) or width % 2:
        raise ValueError(f"width must be an even count of components; got {width!r}.")
    check_choice("layout", layout, "half", "interleaved")
    rates = jnp.asarray(plain_rates(base, width), dtype)
    angles = positions.astype(dtype)[..., None] * rates.reshape((1,) * positions.ndim + (-1,))
    parts = jnp.stack([jnp.sin(angles), jnp.cos(angles)], -2 if layout == "half" else -1)
    return parts.reshape(*positions.shape, width)


def relative_shift(
    scores: Float[Array, "*B T R"], keys: int, *, pad: bool = False
) -> Float[Array, "*B T S"]:
    """Shifts scores by distance to their keys: `out[i, j] = scores[i, j + T - i]`.

    Implemented by a reshape to rows that are one shorter, without gathers. Where `j + T - i`
    exceeds R - 1, this reads from the next row, as the published code; a causal mask masks it.

    Args:
      scores: of T queries at R distances, from the key furthest before to the one furthest after.
      keys: S, the number of keys in the result.
      pad: whether to prepend a column, so that `out[i, j] = scores[i, j + T - i - 1]`, as in
        Transformer-XL and the Conformer, which have one distance less than XLNet.

    Raises:
      ValueError: if fewer than `keys` columns are left.

    Source: Dai et al., Transformer-XL, 2019, appendix B, and the code of XLNet.

    >>> relative_shift(jnp.asarray([[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]), 2).tolist()
    [[2.0, 3.0], [5.0, 6.0]]
    """
    if pad:
        scores = jnp.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(1, 0)])
    *batch, T, R = scores.shape
    if not 0 <= keys < R:
        raise ValueError(f"{R - 1} distances are left after the shift; got keys={keys}.")
    shifted = reshaped(scores, (*batch, R, T))[..., 1:, :]
    return reshaped(shifted, (*batch, T, R - 1))[..., :keys]


def _check_sides(what: str, height: int, width: int) -> None:
    if not (is_count(height, 1) and is_count(width, 1)):
        raise ValueError(
            f"The sides of {what} must be whole numbers of at least 1; got {height!r}, {width!r}."
        )
