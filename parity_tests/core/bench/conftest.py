"""A machine that is known, JAX's own promotion, as the command has it, and its options."""

import argparse

import jax
import pytest

from flax_attn.bench.options import add_to
from flax_attn.bench.presets import PRESETS
from flax_attn.command import bench_command as command

MACHINE = {"platform": "cpu", "device": "cpu", "processor": "some", "cores": 2, "python": "3"}
MACHINE = {**MACHINE, "versions": {"jax": "1"}, "peak_flops": {"float32": 1e11}}


def options(*given):
    """What the command reads."""
    parser = argparse.ArgumentParser()
    add_to(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *given])


def tasks(preset, *given):
    return PRESETS[preset].tasks(options("--preset", preset, *given))


@pytest.fixture(autouse=True)
def known_machine(monkeypatch):
    monkeypatch.setattr(command, "machine", lambda dtypes: dict(MACHINE))


@pytest.fixture
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
