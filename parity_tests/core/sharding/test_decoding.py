"""A cache with rows and heads sharded over eight devices equals one device.

Its methods too, which ask others for rows and pages, and leave it sharded as it was.
"""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly

SHARDED = {
    "keys": "The length of the cache is sharded over 'seq'",
    "eight bits": "The length of the cache is sharded over 'seq'",
    "pages": "The pages of the pool are sharded along their tokens over 'seq'",
    "pool": "The pool of pages is sharded along its pages over 'seq'",
}


@pytest.mark.parametrize(
    ("arguments", "count"), with_nightly([((), 6), (("--more",), 113)], commit=[((), 6)])
)
def test_a_step_on_eight_devices(arguments, count):
    command = [sys.executable, "-m", "parity_tests.core.sharding.decoding", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lengths, *rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == count
    for row in rows:
        assert row["same"] and row["kept"] and not row.get("found"), row

    # A length that is sharded is refused wherever it can be seen, so not in jit over Auto axes.
    for found in lengths:
        for name, (eager, jitted) in found["said"].items():
            assert eager.startswith(SHARDED[name]), name
            assert jitted == ("" if found["axes"] == "Auto" else eager), name
        assert found["serves"]
