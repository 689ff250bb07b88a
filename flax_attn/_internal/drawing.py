"""Masks and scores as text and as pictures: queries from top to bottom, keys from left to right."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .checks import check_positive
from .types import Sizes, leaf_axes

VISIBLE, MASKED = "■", "·"
LENGTH = 8  # where no array says how long the axes are
CELL, EDGE = 14, 18  # pixels of a cell, and of the margin with the names of the axes
LOGITS = (-100.0, -50.0, -20.0, -10.0, -5.0, -1.0, 0.0, 1.0, 5.0, 10.0, 20.0, 50.0, 100.0)
MANY = 64  # so many cells in a row are still seen in a notebook


class _Drawn:
    """What masks and scores share: sizes, no other operator, and the picture in a notebook."""

    bind: Any
    grid: Any

    def _refuse_operator(self, other: Any) -> Any:
        raise TypeError(
            "Masks are combined by &, | and ~ and given as mask=; scores are chained by >>, the "
            "first one first, as in Softcap(30.0) >> Alibi(slopes), and given as score=. Got "
            f"{type(self).__name__} and {type(other).__name__}."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_operator
    __and__ = __rand__ = __or__ = __ror__ = __rshift__ = __rrshift__ = _refuse_operator

    def _repr_svg_(self) -> str | None:
        """The picture in a notebook; None if it cannot be drawn, as inside `jax.jit`."""
        try:
            return _svg(*self._table(None, None, 0, 0))
        except Exception:  # a notebook then shows the text
            return None

    def _table(self, T: Any, S: Any, batch: int, head: int) -> tuple[np.ndarray, list[str]]:
        """The values, T S, and the names of the columns if they are not keys."""
        raise NotImplementedError


class DrawnMask(_Drawn):
    """A mask that can be drawn."""

    def draw(
        self, T: int | None = None, S: int | None = None, *, batch: int = 0, head: int = 0
    ) -> str:
        """The mask as text: a row for each query, `■` for a key that it may attend to, else `·`.

        A mask that reads positions is drawn for tokens at positions 0, 1, 2 and so on.

        Args:
          T, S: the numbers of queries and keys. None: as many as an array of the mask has, else 8
            queries; as many keys as queries.
          batch, head: which entry of the batch and which head is drawn.

        Raises:
          ValueError: for sizes that do not fit the mask, or an entry or head that its arrays lack.

        >>> from flax_attn import CAUSAL, Window
        >>> print((CAUSAL & Window(1, 0)).draw(4))
        ■ · · ·
        ■ ■ · ·
        · ■ ■ ·
        · · ■ ■
        """
        visible, _ = self._table(T, S, batch, head)
        return "\n".join(" ".join(VISIBLE if x else MASKED for x in row) for row in visible)

    def _table(self, T, S, batch, head):
        sizes = _sizes_of(self, T, S, batch, head)
        return _entry(self.bind(sizes).grid(sizes), sizes, batch, head), []


class DrawnScore(_Drawn):
    """A score that can be drawn."""

    def draw(
        self, T: int | None = None, S: int | None = None, *, batch: int = 0, head: int = 0
    ) -> str:
        """The score as text: what it makes of logits of zero, a row for each query.

        A score that reads neither query nor key, such as `Softcap`, is shown as two rows: logits
        from -100 to 100, and what becomes of them.

        Args:
          T, S: the numbers of queries and keys. None: as many as an array of the score has, else
            8 queries; as many keys as queries.
          batch, head: which entry of the batch and which head is drawn.

        Raises:
          ValueError: for sizes that do not fit the score, or an entry or head that its arrays lack.

        >>> from flax_attn import Alibi
        >>> print(Alibi(jnp.asarray([0.5])).draw(3))
           0 -0.5   -1
        -0.5    0 -0.5
          -1 -0.5    0
        """
        values, columns = self._table(T, S, batch, head)
        rows = [columns, *([_number(x) for x in row] for row in values)]
        width = max(len(word) for row in rows for word in row)
        return "\n".join(" ".join(word.rjust(width) for word in row) for row in rows if row)

    def _table(self, T, S, batch, head):
        sizes = _sizes_of(self, T, S, batch, head)
        bound = self.bind(sizes)
        tables = [
            _entry(bound.grid(jnp.full((sizes.B, *sizes.shape[-3:]), x), sizes), sizes, batch, head)
            for x in (0.0, *LOGITS)
        ]
        if all((table == table[0, 0]).all() for table in tables):
            return np.stack(tables)[1:, 0, 0][None], [_number(x) for x in LOGITS]
        return tables[0], []


def _sizes_of(node: Any, T: int | None, S: int | None, batch: int, head: int) -> Sizes:
    """The sizes that the arrays of a mask or a score have, else those that are asked for."""
    axes_of_batch: tuple[int, ...] = ()
    sizes = {"n": 1, "q": 1, "k": 1}
    for leaf, axes in zip(jax.tree.leaves(node), leaf_axes(node), strict=True):
        shape, last = np.shape(leaf), axes.removeprefix("b")
        if axes != last:
            whole = shape[: max(len(shape) - len(last), 0)]
            axes_of_batch = np.broadcast_shapes(axes_of_batch, whole)
        for axis, size in zip(last[::-1], shape[::-1], strict=False):
            sizes[axis] = max(sizes.get(axis, 1), size)
    keys, queries = (sizes[axis] if sizes[axis] > 1 else None for axis in "kq")
    T = queries or keys or LENGTH if T is None else T
    S = keys or T if S is None else S
    check_positive(T=T, S=S)
    # What no array has several of is the same for any entry and head, or a function of them.
    if math.prod(axes_of_batch) == 1:
        axes_of_batch = (max(batch, 0) + 1,)
    return Sizes(axes_of_batch, sizes["n"] if sizes["n"] > 1 else max(head, 0) + 1, T, S)


def _entry(grid: Any, sizes: Sizes, batch: int, head: int) -> np.ndarray:
    """The table of one batch entry and head, T S."""
    for name, index, count in (("batch", batch, sizes.B), ("head", head, sizes.N)):
        if not -count <= index < count:
            raise ValueError(f"{name} must be one of {count}, from 0 to {count - 1}; got {index}.")
    whole = (sizes.B, *sizes.shape[-3:])
    return np.broadcast_to(np.asarray(grid), whole)[batch, head]


def _number(x: float) -> str:
    return f"{float(x) + 0.0:.3g}"


def _svg(values: np.ndarray, columns: list[str]) -> str:
    """A picture: dark cells are visible; scores are blue below zero and red above it."""
    values = values[:MANY, :MANY]
    T, S = values.shape
    most = max(float(np.abs(values).max()), 1e-30) if values.dtype != bool else 1.0
    cells = [
        f'<rect x="{EDGE + CELL * k}" y="{EDGE + CELL * q}" width="{CELL - 1}" '
        f'height="{CELL - 1}" fill="{_colour(values[q, k], most)}"><title>query {q}, key {k}: '
        f"{values[q, k] if values.dtype == bool else _number(values[q, k])}</title></rect>"
        for q in range(T)
        for k in range(S)
    ]
    words = [f'<text x="{EDGE}" y="{EDGE - 5}">keys →</text>']
    words += [f'<text transform="translate({EDGE - 12} {EDGE}) rotate(90)">queries →</text>']
    if columns:
        words = [f'<text x="{EDGE}" y="{EDGE - 5}">logits {columns[0]} to {columns[-1]}</text>']
    width, height = EDGE + CELL * S + 1, EDGE + CELL * T + 1
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><g font-family="sans-serif" font-size="10" fill="#777">'
        f"{''.join(words)}</g>{''.join(cells)}</svg>"
    )


def _colour(value: Any, most: float) -> str:
    if isinstance(value, np.bool_):
        return "#1f5f99" if value else "#e4e8ec"
    share = float(value) / most
    grey, colour = (228, 232, 236), ((178, 24, 43) if share > 0 else (31, 95, 153))
    mixed = (round(a + (b - a) * min(abs(share), 1.0)) for a, b in zip(grey, colour, strict=True))
    return "#" + "".join(f"{x:02x}" for x in mixed)
