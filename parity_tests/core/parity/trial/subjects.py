"""The blocks of the trial: those ported for it, and those of the list of ported blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from flax_attn.parity import draw

from ..faults import ported
from .blocks import BLOCKS
from .fault import Subject


def _redrawn(name: str, inputs: tuple[Any, ...]) -> Callable[[int], tuple[Any, ...]]:
    """Inputs of the same shapes for any seed; integers and masks stay."""

    def one(seed: int, i: int, x: Any) -> Any:
        wanted = isinstance(x, np.ndarray) and x.dtype.kind == "f" and seed
        return draw.normal(seed, f"{name}/{i}", x.shape) if wanted else x

    return lambda seed: tuple(one(seed, i, x) for i, x in enumerate(inputs))


PORTED = [
    Subject(b.name, b.theirs, b.port, _redrawn(b.name, b.inputs), b.rules, b.options)
    for b in ported.BLOCKS
    if isinstance(b.port, type)
]
SUBJECTS = [*PORTED, *BLOCKS]
