"""A slice of a long list of parameters for every run; the rest by `pytest -m long`."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(step: int, values: Iterable[Any]) -> list[Any]:
    """All values as parameters, of which one in `step`, the first too, runs in every suite.

    >>> [bool(param.marks) for param in one_in(3, "abcd")]
    [False, True, True, False]
    """
    chosen = []
    for i, value in enumerate(values):
        several = value if isinstance(value, tuple) else (value,)
        marks = [pytest.mark.long] if i % step else []
        chosen.append(pytest.param(*several, marks=marks))
    return chosen
