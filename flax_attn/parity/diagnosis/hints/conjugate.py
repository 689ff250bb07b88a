"""Hints for complex numbers."""

import numpy as np

from ... import judge

# What Flax may have done to torch's numbers.
KINDS = {
    "its complex conjugate": np.conj,
    "its real part alone": lambda x: x.real + 0j,
    "its imaginary part alone": lambda x: 1j * x.imag,
    "both with the other sign": np.negative,
    "itself times i": lambda x: 1j * x,
    "itself times -i": lambda x: -1j * x,
    "its size alone": lambda x: np.abs(x) + 0j,
}


def is_complex(got: np.ndarray, want: np.ndarray) -> bool:
    """Whether any of two arrays is complex."""
    return "c" in (got.dtype.kind, want.dtype.kind)


def conjugate(got: np.ndarray, want: np.ndarray) -> str:
    """What complex numbers look like beside torch's, or ""."""
    names = (hint for hint, made in KINDS.items() if judge.allclose(got, made(want)))
    return next(names, "")
