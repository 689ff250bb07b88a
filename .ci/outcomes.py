"""`pytest -p outcomes --outcomes FILE`: a line of JSON for each test, for .ci/nightly."""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, help="add a line for each test to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """Writes the lines: the test, the seconds that it took, and its fault, "" if there is none."""

    def __init__(self, file: Path):
        self.file = file
        self.seconds, self.fault = 0.0, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds += report.duration
        if report.failed and not self.fault:
            crash = getattr(report.longrepr, "reprcrash", None)
            text = getattr(crash, "message", None) or str(report.longrepr)
            self.fault = f"{report.nodeid.partition('::')[2]}: {text}"
        if report.when == "teardown":
            line = {"test": report.nodeid, "seconds": self.seconds, "fault": self.fault}
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self.seconds, self.fault = 0.0, ""
