"""The trial of a bug: planted in a copy of the checkout, whose tests are run until five fail."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .bug import ROOT, Bug
from .hook import append

LIMIT = 300  # CPU seconds of the tests of one bug
PATIENCE = 3600  # seconds that pass on the clock, for tests that wait for ever
ENOUGH = 5  # failed tests
FIRST = 12  # tests that are run before the others
IMPORT = "import"  # in place of a test, for a bug that breaks the collection
LIMITED = ("sh", "-c", f'ulimit -t {LIMIT}; exec "$@"', "sh")
PLUGIN = "parity_tests.core.bugs.failures"


@dataclass(frozen=True)
class Outcome:
    """What became of a bug.

    Attributes:
      id: of the bug.
      hash: of the patch, the file and the suite, for which the outcome holds.
      seen: the tests that failed, or "import".
      tried: how many tests were run.
      seconds: on the clock.
      note: what else there is to say, such as that the limit ended the run.
      enough: how many tests that see it were asked for.
    """

    id: str
    hash: str
    seen: tuple[str, ...]
    tried: int
    seconds: float
    note: str = ""
    enough: int = ENOUGH

    def stands(self, tests: Container[str], enough: int) -> bool:
        """Whether as many tests were asked for, and one that saw the bug still runs.

        Else the bug is tried again.
        """
        asked = max(self.enough, len(self.seen)) >= enough or IMPORT in self.seen
        return asked and any(test == IMPORT or test in tests for test in self.seen)


def hash_of(bug: Bug, only_commit: bool, root: Path = ROOT) -> str:
    """Of what an outcome depends on: the patch, the file that is patched, and the suite."""
    parts = (bug.old, bug.new, (root / bug.file).read_text("utf-8"), str(only_commit))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class Copy:
    """A copy of the checkout, tracked files and untracked ones that git does not ignore.

    A bug is tried until `enough` tests have seen it.
    """

    def __init__(self, folder: Path, root: Path = ROOT, enough: int = ENOUGH):
        self.folder, self.enough = folder, enough
        self.checkout, self.scratch = folder / "checkout", folder / "scratch"
        self.scratch.mkdir(parents=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=root, capture_output=True, check=True).stdout
        for name in filter(None, os.fsdecode(names).split("\0")):
            if (root / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.checkout / name)

    def try_bug(self, bug: Bug, tests: Sequence[str], only_commit: bool) -> Outcome:
        """Runs tests on the copy with the bug in it, and takes the bug out again."""
        path, begun = self.checkout / bug.file, time.monotonic()
        text, digest = path.read_text("utf-8"), hash_of(bug, only_commit, self.checkout)
        path.write_text(bug.patched(text), "utf-8")
        try:
            seen, note = self._seen(tests, only_commit)
        finally:
            path.write_text(text, "utf-8")
        seconds = round(time.monotonic() - begun, 1)
        return Outcome(bug.id, digest, seen, len(tests), seconds, note, self.enough)

    def _seen(self, tests: Sequence[str], only_commit: bool) -> tuple[tuple[str, ...], str]:
        """The first tests by themselves: of most bugs they are enough, and few files are read."""
        if not tests:
            return (), "no test enters the file"
        seen, note = self._run(tests[:FIRST], only_commit)
        if len(seen) < self.enough and IMPORT not in seen and tests[FIRST:]:
            more, note = self._run(tests[FIRST:], only_commit)
            seen = (*seen, *more)
        return seen, note

    def _run(self, tests: Sequence[str], only_commit: bool) -> tuple[tuple[str, ...], str]:
        listed, failures = self.scratch / "tests", self.scratch / "failures"
        listed.write_text("".join(f"{test}\n" for test in tests), "utf-8")
        failures.write_text("", "utf-8")
        markers = () if only_commit else ("-m", "")
        plugins = ("-p", "no:cacheprovider", "-p", PLUGIN, "--failures", str(failures))
        how = ("-n", "0", "-q", f"--maxfail={self.enough}", "--no-header", "--tb=no", *markers)
        command = (*LIMITED, sys.executable, "-m", "pytest", *plugins, *how, f"@{listed}")
        where = {"cwd": self.checkout, "env": {**os.environ, "PYTHONPATH": str(self.checkout)}}
        try:
            run = subprocess.run(
                command, **where, capture_output=True, text=True, timeout=PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            status, said = -1, ""
        else:
            status, said = run.returncode, run.stdout + run.stderr
        gone = {line.partition(f"{self.checkout}/")[2] for line in _not_found(said)}
        if rest := [test for test in tests if gone and test not in gone]:
            return self._run(rest, only_commit)  # the record is of an older commit
        return judged(status, said, tuple(dict.fromkeys(failures.read_text("utf-8").splitlines())))


def judged(status: int, said: str, failed: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """The tests that saw a bug, from how pytest ended, and a note.

    Raises:
      RuntimeError: if a test is not there: the record of what tests enter is of other code.
    """
    for line in _not_found(said):
        raise RuntimeError(f"Record again what tests enter, since all are gone. {line}")
    if status in (0, 1, 5):
        return failed, "no test ran" if status == 5 else ""
    if status in (2, 3, 4):  # at collection, inside pytest, or of a conftest
        return failed or (IMPORT,), ("\n".join(said.split("\n")[-8:])).strip()
    return failed, f"ended by status {status}, after {LIMIT} CPU seconds or by a crash"


def _not_found(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("ERROR: not found: ")]


class Record:
    """Outcomes in a file of JSON lines, so that a long trial can go on another day."""

    def __init__(self, path: Path | None):
        self.path = path
        self.lines: dict[tuple[str, str], Outcome] = {}
        for text in path.read_text("utf-8").splitlines() if path and path.exists() else ():
            line = json.loads(text)
            outcome = Outcome(**{**line, "seen": tuple(line["seen"])})
            self.lines[outcome.id, outcome.hash] = outcome

    def outcome(self, bug: Bug, only_commit: bool) -> Outcome | None:
        """What is known of the bug as it stands."""
        return self.lines.get((bug.id, hash_of(bug, only_commit)))

    def add(self, outcome: Outcome) -> None:
        self.lines[outcome.id, outcome.hash] = outcome
        if self.path is not None:
            append(self.path, json.dumps(asdict(outcome), ensure_ascii=False))
