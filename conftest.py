"""Examples in docstrings that need torch are skipped where it is missing."""

import pytest

from flax_attn.parity.cases.case import has_torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_torch():
        for item in items:
            if isinstance(item, pytest.DoctestItem) and any(
                "import torch" in example.source for example in item.dtest.examples
            ):
                item.add_marker(pytest.mark.skip(reason="the example needs torch"))
