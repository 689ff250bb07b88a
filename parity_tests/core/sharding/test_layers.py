"""Every exported layer with its batch over eight devices equals one device.

One program of its own makes the eight devices, since jax must be told of them before it starts.
"""

import inspect
import json
import subprocess
import sys

import pytest

import flax_attn.layers
from flax_attn import recurrence
from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly


@pytest.mark.parametrize("arguments", with_nightly([((),), (("--more",),)], commit=[((),)]))
def test_every_layer_by_its_batch(arguments):
    command = [sys.executable, "-m", "parity_tests.core.sharding.layers", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    lengths, *rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [fault for row in rows for fault in faults(row)] == []

    # A recurrence takes all tokens of its rows; their length comes whole and goes as it came.
    assert all(lengths[kind]["equal"] for kind in lengths)
    assert lengths["explicit"]["lies"] == ["P(None, 'seq', None)"] * 2
    assert all("takes tokens in their own order" in lengths[kind]["layout"] for kind in lengths)
    assert lengths["explicit"]["width"].startswith("q is sharded along its width, over 'seq'.")

    layers = {name for name, _ in inspect.getmembers(flax_attn.layers, inspect.isclass)}
    functions = {name for name, _ in inspect.getmembers(recurrence, inspect.isfunction)}
    tried = {kind: {x["name"].split()[0] for x in rows if x["kind"] == kind} for kind in lengths}
    assert layers | functions <= set.union(*tried.values())
    if arguments:
        assert all(layers | functions <= names for names in tried.values())
    caches = {row["name"].rpartition(",")[0].split(" ", 1)[-1] for row in rows}
    assert {
        "ring ring",
        "paged",
        "absorbed paged int8",
        "int8",
        "as self memory",
        "state",
    } <= caches


def faults(row):
    """What is wrong with one layer on one kind of axes, in words."""
    where = f"{row['name']}, {row['kind']}"
    if row["error"]:
        return [f"{where}: {row['error']}"]
    said = {
        "differs from one device": not row["equal"],
        f"forward {row['forward']}": row["forward"] and not row["gathers"],
        f"backward {row['backward']}": not row["gathers"] and {*row["backward"]} - {"all-reduce"},
    }
    return [f"{where}: {x}" for x, so in said.items() if so]
