"""Where a report says that the first difference is, in its text and on its page."""

from dataclasses import replace

import numpy as np
import pytest

from flax_attn.parity import Divergence, Report, Row, judge
from flax_attn.parity.show import page

from .test_page import Reader


@pytest.mark.parametrize("tap", ["value", "a", "gradient"])
def test_a_submodule_named_like_a_kind_of_tap_is_located_by_its_name(tap):
    failed = Row("output", "output", "float64", "jit", judge.same_function(np.ones(2), np.zeros(2)))
    place = Divergence(tap, 0.5, 1e-12, "same function", None)
    report = Report("Mine against Theirs", (failed,), divergences=(place,))
    assert f"Different at {tap} (value): error" in Reader(page(report)).text
    assert f"DIFFERENT at {tap} (value)" in str(report)
    between = replace(place, tap="between q and k", kind="between")
    text = Reader(page(replace(report, divergences=(between,)))).text
    assert "Different between q and k: error" in text
