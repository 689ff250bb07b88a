"""The gradient of a jvp on four devices is that of one, on all kinds of mesh axes.

One program of its own makes the devices, since jax must be told of them before it starts.
"""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly

ROWS = [((), 2), (("--more",), 6)]


@pytest.mark.parametrize("arguments, count", with_nightly(ROWS, commit=ROWS[:1]))
def test_four_devices_differentiate_as_one(arguments, count):
    command = [sys.executable, "-m", "parity_tests.core.sharding.derivatives", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == count and all(equal for *_, equal in rows), rows
