"""Which part of the long tables of tests runs today: another at each commit, all of them in turn.

A test of the core runs at one commit in `OF_CORE`, and then, if it has several parameters, with one
in `EVERY` of them; a case that is not the first of its variant and witness runs at one commit in
`OF_CASES`. `@pytest.mark.turns(n)` gives a test a number of its own, also one without parameters;
`turns(1)` always runs whole. The turn is the number of commits, so that neighbours differ, or what
`--turn` says; `--turn=all` leaves nothing out. Whoever names files or tests, gives `-k`, or asks
for the long ones, runs those whole, but for a given turn.
"""

import subprocess
from collections import defaultdict
from pathlib import Path
from zlib import crc32

import pytest

from flax_attn.parity import Case

EVERY, OF_CASES, OF_CORE = 14, 12, 6
CORE = "parity_tests/core/"


def case_of(item: pytest.Item) -> Case | None:
    """The case of a test that proves one."""
    given = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return given if isinstance(given, Case) else None


def turn_of(said: str | None) -> int | None:
    """The turn that `--turn` says, else the number of commits; None for all."""
    if said == "all":
        return None
    if said is not None:
        if not said.isdigit():
            raise pytest.UsageError(f"--turn takes a whole number or all; got {said!r}")
        return int(said)
    count = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    return int(count.stdout) if count.returncode == 0 else 0


def split(items: list[pytest.Item], turn: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests whose turn it is, and the others."""
    tables = defaultdict(list)
    for item in items:
        tables[item.nodeid.partition("[")[0]].append(item)
    due = {item for name, table in tables.items() for item in _due(name, table, turn)}
    return [x for x in items if x in due], [x for x in items if x not in due]


def _due(name: str, table: list[pytest.Item], turn: int) -> list[pytest.Item]:
    mark = table[0].get_closest_marker("turns")
    if mark is None and CORE in name:
        turn, late = divmod(crc32(name.encode()) + turn, OF_CORE)
        if late:
            return []
    if mark is None and len(table) == 1:
        return table
    every = mark.args[0] if mark else OF_CASES if case_of(table[0]) else EVERY
    if len(table) == 1:
        return table if (crc32(name.encode()) + turn) % every == 0 else []
    first = [item for item in table if (case := case_of(item)) is not None and case.eager]
    others = sorted((x for x in table if x not in first), key=lambda x: crc32(x.nodeid.encode()))
    return first + others[(crc32(name.encode()) + turn) % min(every, len(others) or 1) :: every]
