"""Which tests are tried on a bug: those that enter the patched lines, by turns of their files.

What every call runs through is entered by hundreds of cheap tests of one kind, such as those of bad
input, which would see nothing: so the files take turns.
"""

import ast
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .bug import ROOT, Bug
from .marks import Block, around, blocks, changed_lines

SECONDS, MOST = 300.0, 250  # recorded CPU seconds, and tests, that are tried on one bug
DEAR = 3.0  # seconds for which a test goes a turn later


@dataclass(frozen=True)
class Entered:
    """The recorded tests that passed.

    Attributes:
      made: when the record was made; lines of a file that changed later are others now.
      seconds: CPU seconds by test.
      tests: by mark, the tests that entered it.
    """

    made: float
    seconds: dict[str, float]
    tests: dict[str, set[str]]

    @classmethod
    def read(cls, path: Path) -> "Entered":
        """The record that `--entered` wrote; of a test that was recorded twice both lines count."""
        seconds: dict[str, float] = {}
        tests: dict[str, set[str]] = {}
        with path.open(encoding="utf-8") as file:
            for line in map(json.loads, file):
                if line["outcome"] != "passed":
                    continue
                seconds[line["test"]] = line["seconds"]
                for name in line["entered"]:
                    tests.setdefault(name, set()).add(line["test"])
        return cls(path.stat().st_mtime, seconds, tests)

    def enter(self, names: Iterable[str]) -> set[str]:
        """The tests that enter any of these marks."""
        return set().union(*(self.tests.get(name, ()) for name in names))

    def is_older_than(self, path: Path) -> bool:
        return path.exists() and self.made < path.stat().st_mtime

    def enter_file(self, file: str) -> set[str]:
        """The tests that enter anything in a file."""
        return self.enter(name for name in self.tests if name.rpartition(":")[0] == file)


def chosen(bug: Bug, text: str, entered: Entered, seconds: float = SECONDS) -> list[str]:
    """The tests to try on a bug in a file of this text, as many as `seconds` and `MOST` allow.

    They enter the innermost blocks of the patched lines; if nobody does, the functions around them;
    if nobody does, a line is in no function, or the record is older than the file, anything in it.
    Where a condition is patched, those go first for which it held, as tests of what is refused.
    """
    known = not entered.is_older_than(ROOT / bug.file)
    levels = _levels(bug, text) if known else []
    entering = (entered.enter(names) for names in levels)
    tests = next(filter(None, entering), None) or entered.enter_file(bug.file)
    first = entered.enter(_guarded(bug, text) if known else [])
    order = [_by_turns(some, entered.seconds) for some in (first, tests - first)]
    picked, total = [], 0.0
    for test in [*order[0], *order[1]][:MOST]:
        total += entered.seconds[test]
        if total > seconds and picked:
            break
        picked.append(test)
    return picked


def _by_turns(tests: Iterable[str], seconds: dict[str, float]) -> list[str]:
    """The cheapest test of each file, the second of each, and so on; dear ones later."""
    turns: Counter[str] = Counter()
    order = []
    for test in sorted(tests, key=lambda test: (seconds[test], test)):
        file = test.partition("::")[0]
        order.append((turns[file] + seconds[test] // DEAR, len(order), test))
        turns[file] += 1
    return [test for *_, test in sorted(order)]


def _levels(bug: Bug, text: str) -> list[list[str]]:
    """The marks of the innermost blocks of the patched lines, and of the functions around them."""
    known = blocks(ast.parse(text))
    chains = [around(known, line) for line in changed_lines(text, bug.patched(text))]
    if not all(chains):
        return []
    functions = [[block for block in chain if block.is_function] for chain in chains]
    inner = [chain[0] for chain in chains]
    outer = [chain[0] for chain in functions if chain]
    return [_names(bug, inner), _names(bug, outer)]


def _guarded(bug: Bug, text: str) -> list[str]:
    """The marks of what is done where a patched condition holds."""
    lines = {*changed_lines(text, bug.patched(text))}
    ifs = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If))
    spans = ((node.lineno, node.body[0].lineno) for node in ifs)
    return [f"{bug.file}:{body}" for start, body in spans if lines & {*range(start, body)}]


def _names(bug: Bug, entered: list[Block]) -> list[str]:
    return [f"{bug.file}:{line}" for line in dict.fromkeys(block.line for block in entered)]
