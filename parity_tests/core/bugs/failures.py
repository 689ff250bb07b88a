"""`pytest -p parity_tests.core.bugs.failures --failures FILE`: the node ids of tests that fail.

They are written one by one, so that those of a run that was killed are known too.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--failures FILE`."""
    text = "add the node id of each test that fails to FILE"
    parser.addoption("--failures", metavar="FILE", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--failures")
    if file is not None:
        config.pluginmanager.register(Failures(file.absolute()))


class Failures:
    """Adds a line for each failed report."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")
