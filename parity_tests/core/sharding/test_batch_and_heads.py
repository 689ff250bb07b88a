"""Batch and heads on eight devices: equal to one device, and no device asks another for anything.

One program of its own makes the eight devices, since jax must be told of them before it starts.
"""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT


@pytest.fixture(scope="module")
def found():
    """What `requests` printed, by request, kind of axes and backend."""
    command = [sys.executable, "-m", "parity_tests.core.sharding.requests"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    return {(row["name"], row["kind"], row["backend"]): row for row in rows}


NAMES = (
    "documents",
    "sinks, slopes and scale",
    "dropout",
    "functions",
    "arrays cut along heads",
    "batch alone",
)
SHARED = ("sinks, slopes and scale", "functions")  # whose arrays all devices hold


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_one_device_is_equalled_without_gathering(found, name, kind, backend):
    row = found[name, kind, backend]
    assert all(row["equal"]), row["equal"]
    assert row["kept"], "the output or the gradient of q has lost its sharding"
    assert row["forward"] == {}, row["forward"]
    assert set(row["backward"]) <= ({"all-reduce"} if name in SHARED else set()), row["backward"]


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("name", ["dropout", "batch alone", "arrays cut along heads"])
def test_the_same_elements_are_dropped(found, name, kind, backend):
    assert found[name, kind, backend]["bits"]
