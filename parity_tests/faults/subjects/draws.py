"""What the published blocks are called with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flax_attn.parity import draw

torch = pytest.importorskip("torch", reason="the harness compares with torch")


def normal(seed: int, name: str, *shape: int) -> np.ndarray:
    return draw.normal(seed, f"trial/{name}", shape)


def drawn(name: str, *shapes: tuple[int, ...]) -> Callable[[int], tuple[np.ndarray, ...]]:
    """Normal inputs of these shapes, for any seed."""
    return lambda seed: tuple(normal(seed, f"{name}/{i}", *s) for i, s in enumerate(shapes))


def integers(seed: int, name: str, below: int, *shape: int) -> np.ndarray:
    return draw.stream(seed, f"trial/{name}").randint(0, below, shape)


def channels_last(module: Any, x: Any, *more: Any) -> Any:
    """Torch's call for images as Flax has them: channels last in, channels last out."""
    return module(x.movedim(-1, 1), *more).movedim(1, -1)
