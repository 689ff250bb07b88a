"""Every test here is marked `aot`; without the compiler of its target it is skipped, with why."""

from pathlib import Path

import pytest

from .targets import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker("aot")


@pytest.fixture
def target(request: pytest.FixtureRequest) -> str:
    """A target that has its compiler here."""
    reason = missing(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param
