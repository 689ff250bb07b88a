"""The page docs/scale.md is true: its blocks run in order, on the eight devices that it makes."""

import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import BLOCK, ROOT, blocks, text_of

TEXT = text_of("docs/scale.md")


@pytest.mark.turns(4)
def test_its_blocks_run_in_order():
    command = [sys.executable, "-c", "\n".join(blocks(TEXT))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "ring over 'seq' (4 shards), contiguous" in run.stdout
    assert TEXT.count("\nassert ") == 6


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 160
    assert max(map(len, BLOCK.sub("", TEXT).splitlines())) <= 120
    assert max(len(line) for block in blocks(TEXT) for line in block.splitlines()) <= 105
