"""Warnings at the line of the user's that led to them."""

import sys
import warnings
from functools import cache
from types import FrameType

# First parts of the names of modules that stand between a user's line and a warning.
BETWEEN = ("flax_attn", "flax", "jax", "contextlib", "functools")


@cache  # so that each sentence warns once
def warn_once(sentence: str) -> None:
    """Warns once for each sentence, at the last line that is not of this library, flax or jax.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_once("Something is odd.")
    ...     warn_once("Something is odd.")
    >>> len(caught), str(caught[0].message)
    (1, 'Something is odd.')
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package(frame) in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, stacklevel=level)


def is_called_from_outside(depth: int) -> bool:
    """Whether other code than this library called the function `depth` frames above this one."""
    return _package(sys._getframe(depth + 1)) != "flax_attn"


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
