"""Masks as users write them, by Python, numpy or jax.numpy, and random ones for random programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import Band, Mask, frozen


@frozen
class Near(Mask):
    """`Window(left, right)`, whose answers are computed in Python, numpy or jax.numpy."""

    left: int
    right: int
    by: str = "python"

    is_static = True

    def __call__(self, b, n, q, k):
        return (k - q >= -self.left) & (k - q <= self.right)

    def _larger(self, a, b):
        return {"python": max, "numpy": np.maximum, "jax": jnp.maximum}[self.by](a, b)

    def _smaller(self, a, b):
        return {"python": min, "numpy": np.minimum, "jax": jnp.minimum}[self.by](a, b)

    def key_range(self, b, n, q, sizes):
        return self._larger(q[0] - self.left, 0), self._smaller(q[1] + self.right, sizes.S)

    def seen_range(self, b, n, q, sizes):
        lo, hi = q[1] - 1 - self.left, q[0] + 1 + self.right
        return self._larger(lo, 0), self._smaller(hi, sizes.S)

    def as_band(self):  # the larger of two equal ones is a number of the same kind
        return Band(-self._larger(self.left, self.left), self._larger(self.right, self.right))


@frozen
class Every(Mask):
    """Every so-manieth distance, without a word on ranges."""

    step: int

    is_static = True

    def __call__(self, b, n, q, k):
        return (q - k) % self.step == 0


@frozen
class Ahead(Mask):
    """So many keys ahead as an array says of each batch entry, which the program is given."""

    most: jax.Array

    def __call__(self, b, n, q, k):
        return k - q <= self.most[b]

    def key_range(self, b, n, q, sizes):
        return 0, jnp.minimum(q[1] + self.most[b], sizes.S)

    def seen_range(self, b, n, q, sizes):
        return 0, jnp.maximum(q[0] + 1 + self.most[b], 0)


def answers_traced(mask: Mask) -> bool:
    """Whether all its parts answer for queries whose place is traced, as numpy cannot."""
    parts = [part for part in vars(mask).values() if isinstance(part, Mask)]
    mine = not isinstance(mask, Near) or mask.by == "jax"
    return mine and all(answers_traced(part) for part in parts)


def drawn_static(drawn: np.random.RandomState, reach: int) -> tuple[str, Mask, Any]:
    """A static mask in words, itself, and who sees whom of indices q and k in numpy."""
    if drawn.rand() < 0.25:
        step = int(drawn.randint(1, 5))
        return f"Every({step})", Every(step), lambda q, k: np.isin(k - q, step * _WHOLE)
    left, right = (int(n) for n in drawn.randint(-2, reach + 3, size=2))
    by = ("python", "numpy", "jax")[drawn.randint(3)]
    words = f"Near({left}, {right}, {by})"
    return words, Near(left, right, by), lambda q, k: ~((q - k > left) | (k - q > right))


_WHOLE = np.arange(-5000, 5000)
