"""Projections: tensor parallel weights on eight devices, and without a mesh what flax's own does.

One program of its own makes the eight devices, since jax must be told of them before it starts.
"""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from flax_attn.layers._init import LayerInit
from parity_tests.core.pages.pages import ROOT


@pytest.mark.nightly
def test_heads_on_four_devices_beside_one():
    command = [sys.executable, "-m", "parity_tests.core.sharding.projections"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["layer"] for row in rows] == [
        *("grouped", "gated", "cross", "outputs", "stacked", "adam")
    ]
    assert [row for row in rows if not all(row.values())] == []


def test_without_a_mesh_a_projection_is_the_program_of_flax():
    x = jnp.ones((2, 5, 3))
    own = LayerInit(rngs=nnx.Rngs(0)).linear(3, 4)
    flax = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    programs = [jax.make_jaxpr(lambda x, layer=layer: layer(x))(x) for layer in (own, flax)]
    assert str(programs[0]) == str(programs[1])
