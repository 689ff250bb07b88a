"""The slopes of ALiBi."""

import numpy as np
from jaxtyping import Float

from .._internal.arrays import is_count


def alibi_slopes(num_heads: int, *, bias_max: float = 8.0) -> Float[np.ndarray, " N"]:
    """`2 ** (-bias_max i / n)`, i = 1 ... n; if n < N, followed by odd i of 2 n slopes.

    Also called: slopes of ALiBi, attention with linear biases.

    n is the largest power of two that is at most N. Computed by numpy in float64, since e.g. with
    12 heads the powers are not exact in float32, and cast on use. Bloom's and MPT's code give the
    same slopes in the same order.

    Args:
      num_heads: N.
      bias_max: the last exponent; 8 in the paper, `alibi_bias_max` in MPT's configs.

    Raises:
      ValueError: if `num_heads` is not an integer >= 1, or bias_max not above zero.

    Source: Press et al., "Train Short, Test Long", 2022, and its code.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    if not is_count(num_heads, 1):
        raise ValueError(f"alibi_slopes needs a count of heads, 1 or more; got {num_heads!r}.")
    if not bias_max > 0:
        raise ValueError(f"bias_max must be above zero; got {bias_max!r}.")
    n = 2 ** (int(num_heads).bit_length() - 1)
    whole = 2.0 ** (-bias_max * np.arange(1, n + 1) / n)
    between = 2.0 ** (-bias_max * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([whole, between])[:num_heads]
