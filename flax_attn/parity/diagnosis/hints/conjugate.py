"""Hints for complex values."""

import numpy as np

from ... import judge

# Possible Flax results as functions of torch's values.
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
    """Whether either array is complex."""
    return "c" in (got.dtype.kind, want.dtype.kind)


def conjugate(got: np.ndarray, want: np.ndarray) -> str:
    """The likely cause of a difference in complex values, or ""."""
    names = (hint for hint, made in KINDS.items() if judge.allclose(got, made(want)))
    return next(names, "")
