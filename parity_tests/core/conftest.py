"""A terminal so wide that each message is one line; tests of other widths set them."""

import pytest


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
