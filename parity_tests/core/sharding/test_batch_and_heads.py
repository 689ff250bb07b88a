"""Batch and heads sharded over eight devices equal one device and need no communication.

One program of its own makes the eight devices, since jax must be told of them before it starts; so
one test reads all that it found.
"""

import json
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly

# Whose arrays several devices hold, so that their gradients are added.
SHARED = (
    "sinks, slopes and scale",
    "functions",
    "classes of a user",
    "a table for each head",
    "a table that comes cut",
    "arrays cut along heads",
    "one key head, which all devices have",
    "small arrays that come cut",
    "rows that see nothing",
    "positions",
)
SENTENCES = {
    "length": ("ValueError", "sharded alike along their length"),
    "width": ("ValueError", "along its width, over 'data'. Shard the heads"),
    "batch": ("ValueError", "sharded alike along batch axis 0"),
    "axes of two types": ("NotImplementedError", "make all its axes Explicit or all Auto"),
}


@pytest.mark.parametrize(
    ("arguments", "count"),  # of requests, those by both backends, and more kinds of axes
    with_nightly([((), 15 + 2), (("--more",), (14 + 5) * 2 + 5)], commit=lambda row: not row[0]),
)
def test_eight_devices_beside_one(arguments, count):
    command = [sys.executable, "-m", "parity_tests.core.sharding.requests", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    on_a_slice, refused, edges, *rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(rows) == count
    assert len(edges) == 7 and all(edges.values()), edges
    assert [fault for row in rows for fault in faults(row)] == []

    found = on_a_slice["slice"]  # a Pallas kernel is taken where it can be cut
    assert found["explicit"] == {"chosen": "splash", "splash": None}
    assert found["auto"]["chosen"] == "blockwise" and "Explicit axes" in found["auto"]["splash"]

    for what, (kind, words) in SENTENCES.items():
        sentence = refused["refused"][what]
        assert sentence.startswith(kind) and words in sentence, sentence


def faults(row):
    """What is wrong with one request on one kind of axes, in words."""
    allowed = {"all-reduce"} if row["name"] in SHARED else set()
    said = {
        f"differs from one device: {row['equal']}": not all(row["equal"]),
        "lost its sharding": not row["kept"],
        f"forward {row['forward']}": row["forward"],
        f"backward {row['backward']}": not set(row["backward"]) <= allowed,
        "drops other elements": not row["bits"],
    }
    return [f"{row['name']}, {row['kind']}, {row['backend']}: {x}" for x, so in said.items() if so]
