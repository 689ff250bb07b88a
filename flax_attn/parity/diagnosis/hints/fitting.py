"""Fits a fault's parameter to Flax's value, independently of the fault's share."""

from collections.abc import Callable, Iterable

import numpy as np

STEPS, WIDTH = 30, 1e-6


def parallel(
    made: Callable[[float], np.ndarray], start: np.ndarray, got: np.ndarray, grid: Iterable[float]
) -> float | None:
    """The parameter at which `made - start` is parallel to `got - start`.

    The share of the fault thus need not be known. None if no parameter comes close.
    """
    finite = np.isfinite(got) & np.isfinite(start)
    wanted = (got - start)[finite]
    size = float(np.linalg.norm(wanted))
    if wanted.size < 3 or not size:
        return None
    wanted = wanted / size

    def gap(at: float) -> np.ndarray:
        """The component of the wanted direction that is not explained."""
        moved = np.nan_to_num((made(at) - start)[finite])
        length = float(np.linalg.norm(moved))
        moved = moved / length if length else moved
        return wanted - float(np.vdot(moved, wanted)) * moved

    best = _newton(gap, min(grid, key=lambda at: float(np.linalg.norm(gap(at)))))
    return best if np.linalg.norm(gap(best)) < 1e-3 else None


def settled(made: Callable[[float], np.ndarray], at: float, got: np.ndarray) -> float:
    """The parameter near `at` at which `made` equals `got`, if the whole fault is there; else `at`.

    More precise than `parallel`, whose direction is insensitive close to the solution.
    """
    finite = np.isfinite(got)

    def gap(number: float) -> np.ndarray:
        return np.nan_to_num((got - made(number))[finite])

    best = _newton(gap, at)
    return best if np.linalg.norm(gap(best)) < np.linalg.norm(gap(at)) else at


def _newton(gap: Callable[[float], np.ndarray], at: float) -> float:
    """Minimises `gap` near `at` by Gauss-Newton."""
    for _ in range(STEPS):
        slope = (gap(at + WIDTH) - gap(at - WIDTH)) / (2 * WIDTH)
        steep = float(np.vdot(slope, slope))
        change = float(np.vdot(slope, gap(at))) / steep if steep else 0.0
        at -= float(np.clip(change, -0.1, 0.1))
        if abs(change) < 1e-13:
            break
    return at
