"""The page docs/scale.md is true: its blocks run in order, on the eight devices that it makes."""

import os
import re
import socket
import subprocess
import sys

import pytest

from flax_attn.sharding import positions
from parity_tests.core.pages.pages import BLOCK, ROOT, blocks, text_of

TEXT = text_of("docs/scale.md")
_, PROGRAM = PROGRAMS = [block for block in blocks(TEXT) if block.startswith("# ")]
ABOVE = [block for block in blocks(TEXT) if block not in PROGRAMS]


@pytest.mark.nightly
def test_its_blocks_run_in_order():
    command = [sys.executable, "-c", "\n".join(ABOVE)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "ring over 'seq' (4 shards), contiguous" in run.stdout
    assert sum(block.count("assert ") for block in ABOVE) == 11


def trained(folder, *processes, program=PROGRAM):
    """What each process prints of a program of the page."""
    path = folder / "train.py"
    path.write_text(program.replace("12355", str(free_port())))
    places = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [sys.executable, path, *process], stdout=subprocess.PIPE, text=True, env=places
        )
        for process in processes
    ]
    told = [run.communicate(timeout=300)[0] for run in started]
    assert [run.returncode for run in started] == [0] * len(processes)
    return [LOSSES.findall(text) for text in told]


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


LOSSES = re.compile(r"^\d\.\d{6} \d\.\d{6} \d\.\d{6}$", re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.parametrize("program", PROGRAMS, ids=["fsdp", "three axes"])
def test_its_programs_train_as_on_one_device(program, tmp_path):
    ((losses,),) = trained(tmp_path, [], program=program)
    first, *_, last = map(float, losses.split())
    assert last < first


@pytest.mark.nightly
def test_its_program_prints_the_same_on_two_processes(tmp_path):
    (alone,), one, two = trained(tmp_path, []), *trained(tmp_path, ["0"], ["1"])
    assert one == two == alone


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
