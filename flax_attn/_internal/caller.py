"""Warnings at the line of the user's that led to them."""

import sys
import warnings
from functools import cache
from types import FrameType

# First parts of the names of modules that stand between a user's line and a warning.
BETWEEN = ("flax_attn", "flax", "jax", "contextlib", "functools")
# Modules between a call of `attend` and the check of its arrays.
OF_ATTEND = ("flax_attn.attend", "flax_attn.rules")
OF_ATTEND += tuple(f"flax_attn._internal.{name}" for name in ("caller", "checks", "silent"))


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


def is_called_from_outside() -> bool:
    """Whether other code than this library's called `attend`, whose own modules are passed over."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") in OF_ATTEND:
        frame = frame.f_back
    return _package(frame) != "flax_attn"


def _package(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
