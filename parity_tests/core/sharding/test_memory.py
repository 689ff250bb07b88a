"""Memory per device depends on the tokens per device alone, except for all_gather.

One program of its own makes the eight devices, since jax must be told of them before it starts.
"""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT

pytestmark = pytest.mark.nightly


def test_memory_of_a_device():
    command = [sys.executable, "-m", "parity_tests.core.sharding.memory"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    sizes = {name: row for name, *row in map(json.loads, run.stdout.splitlines())}
    for strategy, (once, longer, spread) in sizes.items():
        assert 1.6 * once < longer < 2.1 * once, strategy  # no array of T x T
        assert (spread < 1.05 * once) == (strategy != "all_gather"), strategy
        assert spread < 1.05 * longer, strategy
    assert sizes["ulysses"][0] < sizes["ring"][0] < sizes["all_gather"][0]
