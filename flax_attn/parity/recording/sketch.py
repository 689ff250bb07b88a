"""Sketches: what a golden holds of a value in place of all its elements.

Small values are held in full; large ones as 48 random projections, each over every 48th element,
which a wrong result cannot match by chance.
"""

import zlib

import numpy as np

from .. import draw, judge
from ..groups import fills, groups

SKETCH = 48
SMALLER = 2.0**-64  # scales values near the dtype's maximum so that their sum does not overflow


def sketch(name: str, array: np.ndarray, filled: str = "") -> np.ndarray:
    """The flattened array itself if small, else 48 random projections of it.

    Infinities count as 0, and so do fills of the dtype `filled`, if given; a checksum of their
    positions is added as one more value. Huge values are projected separately.
    """
    wide = judge.real(array)
    shown = np.isfinite(wide) & (fills(wide, filled) == 0 if filled else True)
    wide = np.where(shown, wide, 0).ravel()
    places = [] if shown.all() else [zlib.crc32(shown.tobytes()) / 2**32]
    part = groups(wide)
    rest = np.append(np.where(part == 0, wide, 0), places)
    huge = (np.where(part == i, wide, 0) for i in range(1, int(part.max(initial=0)) + 1))
    sums = [_sums(f"{name}/{i}", x) for i, x in enumerate(huge)]
    return np.concatenate([_sums(name, rest), *sums])


def _sums(name: str, flat: np.ndarray) -> np.ndarray:
    """Random projections, of downscaled values if the sums would overflow."""
    if flat.size <= SKETCH:
        return flat
    drawn = draw.normal(0, f"sketch/{name}", flat.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = _columns(flat * drawn)
    return sums if np.isfinite(sums).all() else _columns(flat * SMALLER * drawn)


def _columns(flat: np.ndarray) -> np.ndarray:
    return np.pad(flat, (0, -flat.size % SKETCH)).reshape(-1, SKETCH).sum(axis=0)
