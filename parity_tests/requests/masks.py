"""Random masks, each with its meaning written out in numpy: `masks(seed, sizes)`.

A node draws its structure once (which masks, which static numbers) and its arrays as often as
wanted, so that one compiled program serves many requests. `seen` never calls a mask of flax_attn.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from flax_attn.masks import (
    Causal,
    Chunked,
    Dense,
    Documents,
    Full,
    Lengths,
    MaskFn,
    Prefix,
    Segments,
    Window,
)
from flax_attn.masks.at_positions import AtPositions
from flax_attn.places import Positions

from . import users_masks

Random = np.random.RandomState
Indices = tuple[np.ndarray, ...]  # b, n, q, k, open


class Sizes(NamedTuple):
    """Batch axes, query heads, queries and keys of one attention."""

    batch: tuple[int, ...]
    N: int
    T: int
    S: int

    def grid(self) -> Indices:
        """Open index arrays b, n, q, k that broadcast to B N T S."""
        return tuple(np.ogrid[: int(np.prod(self.batch, dtype=int)), : self.N, : self.T, : self.S])


class Node(NamedTuple):
    """A mask of drawn structure.

    Attributes:
      words: the mask in words.
      draw: the arrays of one request, as a pytree of numpy arrays.
      build: flax_attn's mask, from such arrays (traced, or numpy's).
      seen: who may look, from such arrays and open index arrays, in numpy alone.
    """

    words: str
    draw: Callable[[Random], Any]
    build: Callable[[Any], Any]
    seen: Callable[[Any, Indices], Any]


def masks(seed: int, sizes: Any) -> tuple[Any, np.ndarray]:
    """A random mask of flax_attn for these sizes (`batch, N, T, S`) and its table, B N T S."""
    drawn, sizes = Random(seed), Sizes(*sizes[:4])
    node = mask_node(drawn, sizes)
    arrays = node.draw(drawn)
    return node.build(arrays), table(node, arrays, sizes)


def table(node: Node, arrays: Any, sizes: Sizes) -> np.ndarray:
    """The truth about a node, B N T S."""
    grid = sizes.grid()
    shape = np.broadcast_shapes(*(x.shape for x in grid))
    return np.broadcast_to(np.asarray(node.seen(arrays, grid), bool), shape)


def mask_node(drawn: Random, sizes: Sizes) -> Node:
    """A random tree of masks, at most four deep; four of ten hold static masks alone."""
    kinds = STATIC if drawn.rand() < 0.4 else KINDS
    depth = drawn.choice(5, p=[0.25, 0.3, 0.2, 0.15, 0.1])
    return _tree(drawn, sizes, kinds, depth)


def _tree(drawn: Random, sizes: Sizes, kinds: tuple[Callable, ...], depth: int) -> Node:
    if depth == 0:
        return kinds[drawn.randint(len(kinds))](drawn, sizes)
    way = drawn.choice(["&", "|", "~"], p=[0.45, 0.25, 0.3])
    one = _tree(drawn, sizes, kinds, depth - 1)
    if way == "~":
        return _negated(one)
    two = _tree(drawn, sizes, kinds, drawn.randint(depth))
    return _joined(one, two, way) if drawn.rand() < 0.5 else _joined(two, one, way)


def _negated(one: Node) -> Node:
    return Node(
        f"~{one.words}",
        one.draw,
        lambda arrays: ~one.build(arrays),
        lambda arrays, at: np.logical_not(one.seen(arrays, at)),
    )


def _joined(one: Node, two: Node, way: str) -> Node:
    join = np.logical_and if way == "&" else np.logical_or

    def build(arrays):
        a, b = one.build(arrays[0]), two.build(arrays[1])
        return a & b if way == "&" else a | b

    return Node(
        f"({one.words} {way} {two.words})",
        lambda drawn: [one.draw(drawn), two.draw(drawn)],
        build,
        lambda arrays, at: join(one.seen(arrays[0], at), two.seen(arrays[1], at)),
    )


def static(words: str, mask: Any, seen: Callable[[Indices], Any]) -> Node:
    """A node without arrays."""
    return Node(words, lambda drawn: [], lambda arrays: mask, lambda arrays, at: seen(at))


class Offset(NamedTuple):
    """How far query 0 stands from key 0: a number, "end", or arrays of a request."""

    words: str
    draw: Callable[[Random], list[np.ndarray]]
    build: Callable[[list], Any]
    value: Callable[[list, np.ndarray], Any]


def offset(drawn: Random, sizes: Sizes, static_only: bool, entries: bool = True) -> Offset:
    """A random offset, at most one a batch entry; some lie far outside the sizes."""
    reach = max(sizes.T, sizes.S)
    near = int(drawn.randint(-reach, reach + 1))
    small = int(drawn.randint(-3, 4))
    far = int(drawn.choice([-(10**6), -4 * reach, 4 * reach, 10**6]))
    number = [0, small, near, far, small][drawn.choice(5, p=[0.3, 0.2, 0.25, 0.05, 0.2])]
    kind = drawn.choice(["int", "end", "numpy", "traced", "entries"], p=[0.55, 0.2, 0.05, 0.1, 0.1])
    if kind == "end":
        return Offset('"end"', _nothing, lambda xs: "end", lambda xs, b: sizes.S - sizes.T)
    if kind == "numpy":
        whole = np.int64(number) if drawn.rand() < 0.5 else np.int32(number)
        words = f"np.{whole.dtype}({number})"
        return Offset(words, _nothing, lambda xs: whole, lambda xs, b: number)
    if kind == "int" or static_only:
        return Offset(str(number), _nothing, lambda xs: number, lambda xs, b: number)
    shape = sizes.batch if kind == "entries" and entries else ()

    def arrays(drawn):
        return [drawn.randint(-reach, reach + 1, shape).astype(np.int32)]

    return Offset(f"traced{list(shape)}", arrays, _first, lambda xs, b: _entry(xs[0], sizes, b))


def _nothing(drawn: Random) -> list[np.ndarray]:
    return []


def _first(arrays: list) -> Any:
    return arrays[0]


def _entry(array: Any, sizes: Sizes, b: np.ndarray) -> np.ndarray:
    """Of numbers that broadcast to the batch axes, each entry's."""
    return np.broadcast_to(array, sizes.batch).reshape(-1)[b]


def full(drawn: Random, sizes: Sizes) -> Node:
    """Everybody sees everything."""
    return static("Full()", Full(), lambda at: True)


def causal(drawn: Random, sizes: Sizes, static_only: bool = False) -> Node:
    """No key beyond the query's own place."""
    by = offset(drawn, sizes, static_only)
    return Node(
        f"Causal({by.words})",
        by.draw,
        lambda xs: Causal(by.build(xs)),
        lambda xs, at: at[3] - at[2] <= by.value(xs, at[0]),
    )


def window(drawn: Random, sizes: Sizes, static_only: bool = False) -> Node:
    """Keys at most so far to the left and right of the query's own place."""
    by = offset(drawn, sizes, static_only)
    sides = [None, 0, int(drawn.randint(6)), int(drawn.randint(max(sizes.T, sizes.S) + 5))]
    left, right = (sides[i] for i in drawn.randint(4, size=2))

    def seen(xs, at):
        gap = at[3] - (at[2] + by.value(xs, at[0]))  # to the key from the query's own place
        below, above = (np.inf if side is None else side for side in (left, right))
        return ~((gap < -below) | (gap > above))

    words = f"Window({left}, {right}, {by.words})"
    return Node(words, by.draw, lambda xs: Window(left, right, by.build(xs)), seen)


def chunked(drawn: Random, sizes: Sizes) -> Node:
    """Chunks of places that see themselves."""
    size = int(drawn.randint(1, max(sizes.T, sizes.S) + 3))
    if drawn.rand() < 0.6:
        size = int(drawn.randint(1, 9))

    def seen(at):
        return np.floor(at[2] / size) == np.floor(at[3] / size)

    return static(f"Chunked({size})", Chunked(size), seen)


def prefix(drawn: Random, sizes: Sizes, static_only: bool = False) -> Node:
    """The first keys, as many for all or for each batch entry."""
    if static_only or drawn.rand() < 0.4:
        count = int(drawn.randint(-1, sizes.S + 3))
        return static(f"Prefix({count})", Prefix(count), lambda at: at[3] < count)
    shape = _shape_within(drawn, sizes.batch)
    return Node(
        f"Prefix(traced{list(shape)})",
        lambda drawn: [_counts(drawn, sizes.S, shape)],
        lambda xs: Prefix(xs[0]),
        lambda xs, at: at[3] < _entry(xs[0], sizes, at[0]),
    )


def lengths(drawn: Random, sizes: Sizes) -> Node:
    """Padding on the right of keys, and of queries."""
    shapes = [_shape_within(drawn, sizes.batch) for _ in range(1 + (drawn.rand() < 0.5))]
    whole = [sizes.S, sizes.T]

    def seen(xs, at):
        padding = at[3] >= _entry(xs[0], sizes, at[0])
        for count in xs[1:]:
            padding = padding | (at[2] >= _entry(count, sizes, at[0]))
        return ~padding

    return Node(
        f"Lengths({', '.join(f'traced{list(s)}' for s in shapes)})",
        lambda drawn: [_counts(drawn, n, s) for n, s in zip(whole, shapes, strict=False)],
        lambda xs: Lengths(xs[0], **dict(zip("q", xs[1:], strict=False))),
        seen,
    )


def segments(drawn: Random, sizes: Sizes) -> Node:
    """Packed documents that see only themselves; ids in order or not."""
    ordered, shared = drawn.rand() < 0.6, sizes.T == sizes.S and drawn.rand() < 0.5
    lead = _shape_within(drawn, sizes.batch)
    share = drawn.choice([0.05, 0.3])

    def ids(drawn, length):
        steps = np.cumsum(drawn.rand(*lead, length) < share, axis=-1)
        if not ordered:
            steps = drawn.permutation(length)[steps % max(length, 1)] - 3
        return steps.astype(np.int32)

    def draw(drawn):
        return [ids(drawn, n) for n in ([sizes.T] if shared else [sizes.T, sizes.S])]

    def seen(xs, at):
        rows = [
            np.broadcast_to(x, (*sizes.batch, n)).reshape(-1, n)
            for x, n in zip((xs[0], xs[-1]), (sizes.T, sizes.S), strict=True)
        ]
        return ~(rows[0][at[0], at[2]] != rows[1][at[0], at[3]])

    order = "in order" if ordered else "shuffled"
    return Node(
        f"Segments({order}{list(lead)})",
        draw,
        lambda xs: Segments(*xs) if shared else Segments(q_ids=xs[0], kv_ids=xs[1]),
        seen,
    )


def documents(drawn: Random, sizes: Sizes) -> Node:
    """Packed documents of given lengths, some of them 0, with padding behind."""
    if sizes.T != sizes.S:
        return segments(drawn, sizes)
    lead, count = _shape_within(drawn, sizes.batch), int(drawn.randint(1, 5))

    def draw(drawn):
        cuts = np.sort(drawn.randint(0, sizes.T + 1, (*lead, count)), axis=-1)
        return [np.diff(cuts, prepend=0, axis=-1).astype(np.int32)]

    def seen(xs, at):
        lengths = np.broadcast_to(xs[0], (*sizes.batch, count)).reshape(-1, count)
        document = np.full((len(lengths), sizes.T), -1)
        for row, each in zip(document, lengths, strict=True):
            ids = np.repeat(np.arange(count), each)
            row[: len(ids)] = ids
        mine, others = document[at[0], at[2]], document[at[0], at[3]]
        return (mine == others) & (mine >= 0)

    return Node(f"Documents({count}{list(lead)})", draw, lambda xs: Documents(xs[0]), seen)


def dense(drawn: Random, sizes: Sizes) -> Node:
    """A boolean array of any shape that broadcasts, with a row that sees nothing at times."""
    shape = _shape_within(drawn, (*sizes.batch, sizes.N, sizes.T, sizes.S))
    share = drawn.choice([0.1, 0.5, 0.9])

    def draw(drawn):
        array = drawn.rand(*shape) < share
        if drawn.rand() < 0.3 and array.ndim > 1:
            array[..., drawn.randint(shape[-2]), :] = False
        return [np.asarray(array, bool)]

    def seen(xs, at):
        whole = (*sizes.batch, sizes.N, sizes.T, sizes.S)
        return np.broadcast_to(xs[0], whole).reshape(-1, *whole[-3:])[at]

    return Node(f"Dense{list(shape)}", draw, lambda xs: Dense(xs[0]), seen)


FUNCTIONS = [
    ("3q + k", lambda b, n, q, k: (3 * q + k) % 5 < 3, lambda b, n, q, k: ~((k + 3 * q) % 5 >= 3)),
    ("k even", lambda b, n, q, k: k % 2 == 0, lambda b, n, q, k: np.isin(k % 4, (0, 2))),
    (
        "b + n + k",
        lambda b, n, q, k: (b + n) % 2 <= k % 3,
        lambda b, n, q, k: ~((b + n) % 2 > k % 3),
    ),
    ("q", lambda b, n, q, k: q % 4 != 1, lambda b, n, q, k: np.isin(q % 4, (0, 2, 3))),
]


def function(drawn: Random, sizes: Sizes) -> Node:
    """A function of the places; at times one that looks into an array of the request."""
    if drawn.rand() < 0.6:
        words, ours, truth = FUNCTIONS[drawn.randint(len(FUNCTIONS))]
        return static(f"MaskFn({words})", MaskFn(ours), lambda at: truth(*at))
    return Node(
        "MaskFn(table[n, k])",
        lambda drawn: [drawn.rand(sizes.N, sizes.S) < 0.7],
        lambda xs: MaskFn(lambda b, n, q, k: jnp.asarray(xs[0])[n, k] | (b == 1)),
        lambda xs, at: xs[0][at[1], at[3]] | (at[0] == 1),
    )


def of_users(drawn: Random, sizes: Sizes, static_only: bool = False) -> Node:
    """A class as a user writes it, whose ranges are numbers of Python, numpy or jax."""
    reach = max(sizes.T, sizes.S)
    if static_only or drawn.rand() < 0.7:
        words, mask, seen = users_masks.drawn_static(drawn, reach)
        return static(words, mask, lambda at: seen(at[2], at[3]))
    entries = int(np.prod(sizes.batch, dtype=int))
    return Node(
        "Ahead(traced)",
        lambda drawn: [drawn.randint(-reach, reach + 1, entries).astype(np.int32)],
        lambda xs: users_masks.Ahead(jnp.asarray(xs[0])),
        lambda xs, at: ~(at[3] > at[2] + xs[0][at[0]]),
    )


# "end" counts slots, and ranges in Python need bounds that are static: both raise a sentence.
NOT_NUMBERED = ('"end"', "python", "numpy")


def numbered(drawn: Random, sizes: Sizes) -> Node:
    """A mask asked at numbers of its tokens, as layers ask beside padding and packed documents."""
    kinds = (causal, window, window, chunked, prefix, of_users)
    one = kinds[drawn.randint(len(kinds))](drawn, sizes)
    while any(word in one.words for word in NOT_NUMBERED):
        one = kinds[drawn.randint(len(kinds))](drawn, sizes)
    kind, lead = str(drawn.choice(["orders", "positions"])), _shape_within(drawn, sizes.batch)

    def numbers(drawn, length):
        """The order beside padding, or positions that jump, tie, fall and are below zero."""
        if kind == "orders":
            return np.maximum((drawn.rand(*lead, length) < 0.7).cumsum(-1) - 1, 0)
        return drawn.randint(-4, length + 4) + drawn.randint(-2, 4, (*lead, length)).cumsum(-1)

    def draw(drawn):
        both = [numbers(drawn, n).astype(np.int32) for n in (sizes.T, sizes.S)]
        return [one.draw(drawn), *both]

    def seen(xs, at):
        q, k = (
            np.broadcast_to(x, (*sizes.batch, n)).reshape(-1, n)
            for x, n in zip(xs[1:], (sizes.T, sizes.S), strict=True)
        )
        b, n = at[:2]
        return one.seen(xs[0], (b, n, q[b, at[2]], k[b, at[3]]))

    def build(xs):
        return AtPositions(one.build(xs[0]), Positions(xs[1], xs[2], all_present=True))

    return Node(f"{one.words} at {kind}{list(lead)}", draw, build, seen)


def _shape_within(drawn: Random, whole: Iterable[int]) -> tuple[int, ...]:
    """A shape that broadcasts to `whole`: axes of one, or none at the front."""
    shape = tuple(n if drawn.rand() < 0.6 else 1 for n in whole)
    lead = 0
    while lead < len(shape) and shape[lead] == 1 and drawn.rand() < 0.5:
        lead += 1
    return shape[lead:]


def _counts(drawn: Random, most: int, shape: tuple[int, ...]) -> np.ndarray:
    """Lengths, a few of them none at all or more than there is."""
    return np.asarray(drawn.randint(0, most + 3, shape), np.int32)


def _fixed(kind: Callable) -> Callable[[Random, Sizes], Node]:
    return lambda drawn, sizes: kind(drawn, sizes, static_only=True)


STATIC = (full, _fixed(causal), _fixed(causal), _fixed(window), _fixed(window), chunked)
STATIC += (chunked, _fixed(prefix), _fixed(of_users), _fixed(of_users))
KINDS = (full, causal, causal, window, window, chunked, prefix, prefix, lengths, lengths)
KINDS += (
    segments,
    segments,
    documents,
    documents,
    dense,
    dense,
    function,
    of_users,
    of_users,
    numbered,
    numbered,
)
