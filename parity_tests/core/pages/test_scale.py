"""The page docs/scale.md is true: its blocks run in order, on the eight devices that it makes."""

import re
import subprocess
import sys

from flax_attn.sharding import positions
from parity_tests.core.pages.pages import BLOCK, ROOT, blocks, text_of

TEXT = text_of("docs/scale.md")


def test_its_blocks_run_in_order():
    command = [sys.executable, "-c", "\n".join(blocks(TEXT))]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "ring over 'seq' (4 shards), contiguous" in run.stdout
    assert TEXT.count("\nassert ") == 8


def test_the_blocks_of_its_table_are_counted():
    """Of keys, in blocks of 128, that the queries of the busiest shard may see."""
    for layout, told in re.findall(r'^\| "(\w+)" \|.*\| (\d+)\D*\|$', TEXT, re.MULTILINE):
        at = positions(8192, 8, layout).reshape(8, 8, 128)  # shards, blocks, slots
        sees = at.max(-1)[:, :, None] >= at.min(-1).reshape(-1)
        assert sees.sum((1, 2)).max() == int(told)
        assert layout != "zigzag" or len({*sees.sum((1, 2))}) == 1
    assert TEXT.count(" | 484 |") == 1


def test_its_lines_are_no_longer_than_a_screen_is_wide():
    assert max(map(len, BLOCK.sub("", TEXT).splitlines())) <= 120
    assert max(len(line) for block in blocks(TEXT) for line in block.splitlines()) <= 105
