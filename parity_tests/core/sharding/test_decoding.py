"""A cache whose rows and heads lie on eight devices: equal to one, and nobody asks another."""

import json
import subprocess
import sys

from parity_tests.core.pages.pages import ROOT


def test_a_step_on_eight_devices():
    command = [sys.executable, "-m", "parity_tests.core.sharding.decoding"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == 8
    for row in rows:
        assert row["same"] and row["kept"] and row["found"] == [], row
