"""`pytest -p parity_tests.core.bugs.entered --entered FILE`: what of flax_attn each test enters.

Adds a line of JSON to FILE for every test: its node id, the CPU seconds that it took, how it ended,
and the blocks (`marks`) that it entered, itself or by processes that it started. An import hook
marks the modules of this checkout, so the plugin must be given by `-p`, before flax_attn is
imported; what runs on import belongs to no test. The hook of `--jaxtyping-packages` would take its
place: leave that option out.

A function that JAX has compiled or Python has cached for an earlier test of the process is not
entered again. Every xdist worker adds lines of its own to the file.
"""

import builtins
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from .hook import PACKAGE, append, install, tell_children
from .marks import NAME


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--entered FILE`. It is the first hook that pytest calls: from here on modules are marked."""
    text = "add a line for each test to FILE: which blocks of flax_attn it enters"
    parser.addoption("--entered", metavar="FILE", type=Path, help=text)
    if PACKAGE in sys.modules:
        raise pytest.UsageError(f"{PACKAGE} was imported before its recorder: give that by -p.")
    install(lambda name: None)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--entered")
    if file is not None:
        config.pluginmanager.register(Recorder(file.absolute()))


class Recorder:
    """Writes the lines; one for each process that runs tests."""

    def __init__(self, file: Path):
        self.file = file
        self.folder = TemporaryDirectory()
        self.entered: set[str] = set()
        self.outcomes: set[str] = set()
        setattr(builtins, NAME, self.entered.add)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.entered.clear()
        self.outcomes.clear()
        children = tell_children(Path(self.folder.name))
        os.truncate(children, 0)
        before = _seconds()
        result = yield
        ends = (end for end in ("failed", "skipped") if end in self.outcomes)
        line = {
            "test": item.nodeid,
            "seconds": round(_seconds() - before, 3),
            "outcome": next(ends, "passed"),
            "entered": sorted(self.entered.union(children.read_text("utf-8").splitlines())),
        }
        append(self.file, json.dumps(line))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes.add(report.outcome)

    def pytest_unconfigure(self) -> None:
        self.folder.cleanup()


def _seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system
