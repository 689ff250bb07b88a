"""Masks as users write them, by Python, numpy or jax.numpy, and random ones for random programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn import Mask, frozen

LARGER = {"python": max, "numpy": np.maximum, "jax": jnp.maximum}
SMALLER = {"python": min, "numpy": np.minimum, "jax": jnp.minimum}


@frozen
class Beside(Mask):
    """Keys at most so far to the left and right, known before the program runs."""

    left: int
    right: int
    by: str

    is_static = True

    def __call__(self, b, n, q, k):
        return (k - q >= -self.left) & (k - q <= self.right)

    def key_range(self, b, n, q, sizes):
        lo, hi = q[0] - self.left, q[1] + self.right
        return LARGER[self.by](lo, 0), SMALLER[self.by](hi, sizes.S)

    def seen_range(self, b, n, q, sizes):
        lo, hi = q[1] - 1 - self.left, q[0] + 1 + self.right
        return LARGER[self.by](lo, 0), SMALLER[self.by](hi, sizes.S)


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
    mine = not isinstance(mask, Beside) or mask.by == "jax"
    return mine and all(answers_traced(part) for part in parts)


def drawn_static(drawn: np.random.RandomState, reach: int) -> tuple[str, Mask, Any]:
    """A static mask in words, itself, and who sees whom of indices q and k in numpy."""
    if drawn.rand() < 0.25:
        step = int(drawn.randint(1, 5))
        return f"Every({step})", Every(step), lambda q, k: np.isin(k - q, step * _WHOLE)
    left, right = (int(n) for n in drawn.randint(-2, reach + 3, size=2))
    by = ("python", "numpy", "jax")[drawn.randint(3)]
    words = f"Beside({left}, {right}, {by})"
    return words, Beside(left, right, by), lambda q, k: ~((q - k > left) | (k - q > right))


_WHOLE = np.arange(-5000, 5000)
