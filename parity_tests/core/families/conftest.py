"""The families are proven against transformers, which needs torch."""

import pytest


@pytest.fixture
def transformers():
    """The library of the witnesses; a test is skipped without it."""
    pytest.importorskip("torch", reason="the witness is torch's")
    return pytest.importorskip("transformers", reason="the witness is transformers'")
