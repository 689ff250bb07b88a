"""Whole models over data and model axes equal one device in all outputs."""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly


@pytest.mark.parametrize(
    ("arguments", "count"), with_nightly([((), 3), (("--more",), 35)], commit=[((), 3)])
)
def test_whole_models_on_four_devices(arguments, count):
    command = [sys.executable, "-m", "parity_tests.core.sharding.models", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == count
    assert [row for row in rows if not all(row.values())] == []
