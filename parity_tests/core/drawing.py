"""What tests draw, and the precision in which they draw it."""

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def float64():
    """For every test of a file that imports it."""
    with jax.enable_x64(True):
        yield


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(shape)
