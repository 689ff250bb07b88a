"""Examples in docstrings that need torch are skipped where it is missing."""

from importlib.util import find_spec

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("torch") is None:
        for item in items:
            if isinstance(item, pytest.DoctestItem) and any(
                "import torch" in example.source for example in item.dtest.examples
            ):
                item.add_marker(pytest.mark.skip(reason="the example needs torch"))
