"""Load balance of a sharded length: the blocks of weights that each device computes."""

import math
from typing import Any, NamedTuple

import numpy as np

from ..masks.algebra import parts_of
from ..masks.ranges import as_known_band
from ..rules import Request
from ..token_layouts import tokens_in
from .sequence import Sequence

BLOCK = 128


class Work(NamedTuple):
    """Number of blocks of one head's weights that are visible to each device's queries.

    Attributes:
      visible_blocks: of each device.
      whole: number of blocks of a device's queries and all keys.
      block: tokens along each side of a block.
      is_most: whether the mask may hide more than is known here.

    >>> print(Work((36, 484), 512, 128, False))
    36 to 484 of 512 blocks of 128 x 128 a device; the busiest has 1.86 times the mean
    """

    visible_blocks: tuple[int, ...]
    whole: int
    block: int
    is_most: bool

    def __str__(self) -> str:
        counts = self.visible_blocks
        low, high, mean = min(counts), max(counts), sum(counts) / len(counts)
        count = f"{high}" if low == high else f"{low} to {high}"
        text = f"{count} of {self.whole} blocks of {self.block} x {self.block} a device"
        text = f"at most {text}" if self.is_most else text
        if low == high:
            return f"{text}, on each as many"
        return f"{text}; the busiest has {high / mean:.2f} times the mean"


def work_of(request: Request, sequence: Sequence | None, positioned: bool) -> Work | None:
    """Work of each device; None if no length is sharded, or tokens have other positions."""
    sizes = request.sizes
    if sequence is None or positioned:
        return None
    bands = [
        as_known_band(x.bind(sizes)) if x.is_static else None for x in parts_of(request.rules.mask)
    ]
    known = [x for x in bands if x is not None]
    lo = max((x.lo for x in known if x.lo is not None), default=-sizes.S)
    hi = min((x.hi for x in known if x.hi is not None), default=sizes.S)
    shard = sizes.T // sequence.devices
    block = math.gcd(shard, sizes.S, BLOCK)
    q, k = (_ends(length, block, sequence) for length in (sizes.T, sizes.S))
    q = [x.reshape(sequence.devices, -1, 1) for x in q]
    # Axes: devices, blocks of queries, blocks of keys. A block is visible if the distance of some
    # key from some query in it lies in the band.
    visible_blocks = (k[0] - q[1] <= hi) & (k[1] - q[0] >= lo)
    is_most = len(known) < len(bands) or any(x.kv is not None or x.rows is not None for x in known)
    return Work(tuple(map(int, visible_blocks.sum((1, 2)))), visible_blocks[0].size, block, is_most)


def _ends(length: int, block: int, sequence: Sequence) -> tuple[Any, Any]:
    """First and last token of each block of slots."""
    layout = "contiguous" if sequence.strategy == "ulysses" else sequence.layout
    at = tokens_in(np.arange(length), length, sequence.shards, layout).reshape(-1, block)
    return at.min(axis=1), at.max(axis=1)
