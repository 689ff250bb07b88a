"""A cache whose rows and heads lie on eight devices: equal to one, and nobody asks another."""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly


@pytest.mark.parametrize(
    ("arguments", "count"), with_nightly([((), 4), (("--more",), 8)], commit=[((), 4)])
)
def test_a_step_on_eight_devices(arguments, count):
    command = [sys.executable, "-m", "parity_tests.core.sharding.decoding", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lengths, *rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == count
    for row in rows:
        assert row["same"] and row["kept"] and row["found"] == [], row

    # A length that is sharded is refused wherever it can be seen, so not in jit over Auto axes.
    for found in lengths:
        for name, (eager, jitted) in found["said"].items():
            assert eager.startswith("The length of the cache is sharded over 'seq'"), name
            assert jitted == ("" if found["axes"] == "Auto" else eager), name
        assert found["serves"]
