"""Each family in float32 and bfloat16: its error is at most a few times that of transformers."""

import pytest

from parity_tests.families import prove
from parity_tests.families.configs import CONFIGS, NAMES

# DeepSeek-V2 turns complex numbers, which torch cannot view in the narrow arrays of the harness.
NARROW = [name for name in NAMES if name != "deepseek_v2"]


@pytest.mark.parametrize("name", NARROW)
def test_narrow_dtypes_are_as_precise_as_transformers(name, transformers):
    small = next(x for x in CONFIGS if x.name == name)
    report = prove(small, dtypes=("float32", "bfloat16")).report
    assert report.certain, report
