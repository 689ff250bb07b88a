"""Tables as plain cells, and numbers with their units."""

from collections.abc import Iterable
from typing import NamedTuple


class Table(NamedTuple):
    """A title, a header and rows of cells."""

    title: str
    header: list[str]
    rows: list[list[str]]


def times(factor: float) -> str:
    """Formats a ratio with three significant digits.

    >>> times(0.7071), times(12.34), times(1008.4)
    ('0.707x', '12.3x', '1008x')
    """
    return f"{factor:.0f}x" if factor >= 1000 else f"{factor:.3g}x"


def span(factors: Iterable[float]) -> str:
    """Formats the range of several ratios, or a single one.

    >>> span([3.1, 2.9, 3.4]), span([3.1]), span([])
    ('2.9x to 3.4x', '3.1x', '')
    """
    ends = sorted(factors)
    return " to ".join(dict.fromkeys(map(times, [*ends[:1], *ends[-1:]])))


def time_of(seconds: float | None) -> str:
    """Formats seconds in s, ms or us; None gives an empty string.

    >>> time_of(0.0123), time_of(4.5e-5), time_of(12.0)
    ('12.3 ms', '45 us', '12 s')
    """
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_of(count: int | None) -> str:
    """Formats a byte count in MiB, or in KiB below 1 MiB; None gives an empty string."""
    if count is None:
        return ""
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
