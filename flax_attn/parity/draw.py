"""Random weights and inputs from numpy's frozen legacy stream: the same numbers in every version.

Each array has a stream of its own, named after it, so that nothing depends on order.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from ..weights.described import Source


def stream(seed: int, name: str) -> np.random.RandomState:
    """The stream of one named array."""
    return np.random.RandomState(zlib.crc32(f"{seed}/{name}".encode()))


def normal(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal float64 numbers."""
    return stream(seed, name).standard_normal(shape)


def like(seed: int, name: str, shape: tuple[int, ...], is_complex: bool) -> np.ndarray:
    """Standard normal numbers; complex ones have an imaginary part from a stream of its own.

    >>> like(0, "x", (2,), True).dtype
    dtype('complex128')
    """
    real = normal(seed, name, tuple(shape))
    return real + 1j * normal(seed, f"{name}/imaginary", tuple(shape)) if is_complex else real


def keep(seed: int, number: int, rate: np.ndarray | float, shape: tuple[int, ...]) -> np.ndarray:
    """The dropout mask of that number: True, which is kept, with probability `rate`.

    >>> keep(0, 1, 0.9, (3,)).tolist()
    [True, True, True]
    """
    return stream(seed, f"dropout mask {number}").random_sample(shape) < rate


def parameter(
    seed: int, name: str, kind: str, shape: tuple[int, ...], is_complex: bool = False
) -> np.ndarray:
    """A parameter that hides no fault: biases non-zero, gains off one, logits of deviation 2 to 3.

    A BatchNorm's statistics are drawn too, its variance positive.

    Args:
      kind: the type of the module that holds it; "Parameter" for a plain one.
      shape: as torch has it; a Linear's weight is (out, in).
      is_complex: whether it has an imaginary part, drawn in the same way.
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
    """Random values for every described parameter, tied ones equal; buffers are left out."""
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
