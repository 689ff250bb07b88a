"""Lengths on eight devices: equal to one device by every strategy and layout, and faults are seen.

Programs of their own make the eight devices, since jax must be told of them before it starts.
"""

import json
import socket
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import ROOT
from parity_tests.tables import with_nightly

# What a strategy sends for a causal attention, forward and backward.
SENT = {
    "ring": {"collective-permute": 12},
    "all_gather": {"all-gather": 2, "reduce-scatter": 2},
    "ulysses": {"all-to-all": 11},
    "ring+ulysses": {"all-to-all": 11, "collective-permute": 9},
    "all_gather+ulysses": {"all-to-all": 11, "all-gather": 2, "reduce-scatter": 2},
}
# Whose arrays all devices hold, so that their gradients are added.
SHARED = (
    "a window, capped, beside sinks",
    "slopes, scale and sinks",
    "a table",
    "arrays by slot",
    "functions",
    "rows that see nothing, dropped",
    "a token each",
)
CUT = ("documents", "arrays by slot", "positions")  # come cut along the length
# Of which two processes, that send to each other over a socket, compute four shards each.
OVER_TWO = ("causal", "documents", "dropout", "rows that see nothing, dropped")
SENTENCES = {
    "explained": ("backend", "length     ring over 'seq' (4 shards), zigzag"),
    "explained, of a ring": ("k and v", "to the next device, 3 times"),
    "zigzag": ("ValueError", "k has 20 tokens: pad or cut it to 16 or 24."),
    "heads": ("ValueError", 'Take strategy="ring" or "all_gather"'),
    "keys that are not cut": ("ValueError", "sharded alike along their length"),
    "a strategy too many": ("ValueError", "the length is sharded over 'seq'. Give one strategy"),
    "a name that is not there": ("ValueError", "'sequence' for the length; the mesh has 'data'"),
    "a batch that does not fit": ("ValueError", "must divide the batch; got 3 entries"),
    "no name": ("ValueError", "give batch=, heads= or length="),
    "the plain formula in a ring": ("NotImplementedError", "takes backend 'blockwise' alone"),
}


def lines_of(program: str, *arguments: str) -> list:
    command = [sys.executable, "-m", f"parity_tests.core.sharding.{program}", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "count"),  # of requests, by name, and over two mesh axes
    with_nightly(
        [((), 3 + 12 + 2 + 2), (("--more",), 2 * 13 + 3 + 7)], commit=lambda row: not row[0]
    ),
)
def test_eight_devices_beside_one(arguments, count):
    told, *rows = lines_of("lengths", *arguments)
    assert len(rows) == count
    assert [fault for row in rows for fault in faults(row)] == []
    tried = [row["strategy"] for row in rows if row["name"] == "causal"]
    assert all(strategy in tried for strategy in ("ring", "all_gather", ["ring", "ulysses"]))
    assert len(told["edges"]) == 5 and all(told["edges"].values()), told["edges"]
    assert told["sentences"].keys() == SENTENCES.keys()
    for what, (kind, words) in SENTENCES.items():
        sentence = told["sentences"][what]
        assert sentence.startswith(kind) and words in sentence, sentence


@pytest.mark.nightly
def test_two_processes_beside_one_device():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "parity_tests.core.sharding.lengths", "--process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    runs = [subprocess.Popen([*command, str(i), address, *OVER_TWO], **pipes) for i in range(2)]
    told = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], told[0][1][-3000:]
    for lines, _ in told:  # each process has compared all of every array
        rows = [json.loads(line) for line in lines.splitlines() if line.startswith("{")]
        assert len(rows) == 2 * len(OVER_TWO)
        assert [fault for row in rows for fault in faults(row)] == []


def faults(row):
    """What is wrong with one request by one strategy, in words."""
    strategy = row["strategy"] if isinstance(row["strategy"], str) else "+".join(row["strategy"])
    sent, expected = row["sent"], SENT[strategy]
    allowed = {*expected} | ({"all-reduce"} if row["name"] in SHARED else set())
    allowed |= {"all-gather"} if row["name"] in CUT and "ring" not in strategy else set()
    said = {
        f"differs from one device: {row['equal']}": not all(row["equal"]),
        "lost its sharding": not row["kept"],
        "drops other elements": not row["bits"],
        f"sends {sent}": not {*sent} <= allowed or (row["name"] == "causal" and sent != expected),
    }
    return [f"{row['name']}, {strategy}, {row['layout']}: {x}" for x, so in said.items() if so]
