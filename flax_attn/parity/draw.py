"""Random weights and inputs from numpy's frozen legacy generator: stable across versions.

Each array has its own stream, seeded by its name, so values do not depend on drawing order.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from ..weights.described import Source


def stream(seed: int, name: str) -> np.random.RandomState:
    """Returns the generator for the array with this name."""
    return np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns standard normal float64 values."""
    return stream(seed, name).standard_normal(shape)


def like(seed: int, name: str, shape: tuple[int, ...], is_complex: bool) -> np.ndarray:
    """Returns standard normal values; complex ones draw the imaginary part from a second stream.

    >>> like(0, "x", (2,), True).dtype
    dtype('complex128')
    """
    real = normal(seed, name, tuple(shape))
    return real + 1j * normal(seed, f"{name}/imaginary", tuple(shape)) if is_complex else real


def keep(seed: int, number: int, rate: np.ndarray | float, shape: tuple[int, ...]) -> np.ndarray:
    """Returns dropout mask `number`: True (keep) with probability `rate`.

    >>> keep(0, 1, 0.9, (3,)).tolist()
    [True, True, True]
    """
    return stream(seed, f"dropout mask {number}").random_sample(shape) < rate


def parameter(
    seed: int, name: str, kind: str, shape: tuple[int, ...], is_complex: bool = False
) -> np.ndarray:
    """Draws a parameter that exposes faults: non-zero biases, gains other than 1, large weights.

    BatchNorm statistics are drawn too, with positive variance.

    Args:
      kind: type of the module that holds it; "Parameter" for a plain one.
      shape: in torch's layout; a Linear's weight is (out, in).
      is_complex: whether it is complex; the imaginary part is drawn in the same way.
    """
    if is_complex:
        return parameter(seed, name, kind, shape) + 1j * parameter(
            seed, f"{name}/imaginary.{name.rpartition('.')[2]}", kind, shape
        )
    drawn, role = stream(seed, name), name.rpartition(".")[2]
    if kind.endswith("Norm") and role in ("weight", "running_var"):
        return drawn.uniform(0.5, 1.5, shape)
    if len(shape) < 2:
        return 0.5 * drawn.standard_normal(shape)
    if kind == "Embedding":
        return drawn.standard_normal(shape)
    in_first = kind in ("Parameter", "Conv1D")
    fan_in = shape[0] if in_first else int(np.prod(shape[1:]))
    if kind == "ConvTranspose":
        fan_in = shape[0] * int(np.prod(shape[2:]))
    return drawn.standard_normal(shape) * 1.6 / max(fan_in, 1) ** 0.5


def parameters(seed: int, sources: Sequence[Source]) -> dict[str, np.ndarray]:
    """Draws values for every described parameter, equal for tied ones; buffers are left out."""
    kinds = {source.name: source.kind for source in sources}
    return {
        s.name: parameter(
            seed,
            s.same_as or s.name,
            kinds[s.same_as or s.name],
            s.shape,
            s.dtype.startswith("complex"),
        )
        for s in sources
        if s.kind != "buffer"
    }
