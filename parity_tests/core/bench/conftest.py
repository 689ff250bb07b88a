"""A machine that is known, and JAX's own promotion, as the command has it."""

import jax
import pytest

from flax_attn.command import bench_command as command

MACHINE = {"platform": "cpu", "device": "cpu", "processor": "some", "cores": 2, "python": "3"}
MACHINE = {**MACHINE, "versions": {"jax": "1"}, "peak_flops": {"float32": 1e11}}


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda dtypes: dict(MACHINE))


@pytest.fixture
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
