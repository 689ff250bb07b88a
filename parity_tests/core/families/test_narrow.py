"""Each family in float32 and bfloat16: its error is at most a few times that of transformers."""

from dataclasses import replace

import pytest

from parity_tests.families import prove, prove_part
from parity_tests.families.configs import CONFIGS, NAMES
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

EACH = {(small.name, small.part): small for small in reversed(PARTS)}

# DeepSeek-V2 views parts of its heads as complex numbers, for which torch needs an even width.
EVEN = {"deepseek_v2": {"qk_nope_head_dim": 6, "kv_lora_rank": 8}}


@pytest.mark.parametrize("name", with_nightly(NAMES, commit=18))
def test_narrow_dtypes_are_as_precise_as_transformers(name, transformers):
    small = next(x for x in CONFIGS if x.name == name)
    small = replace(small, fields={**small.fields, **EVEN.get(name, {})})
    report = prove(small, dtypes=("float32", "bfloat16")).report
    assert report.certain, report


@pytest.mark.parametrize("small", with_nightly(EACH.values(), commit=8), ids=map("-".join, EACH))
def test_narrow_dtypes_of_a_part_are_as_precise_as_transformers(small, transformers):
    report = prove_part(small, dtypes=("float32", "bfloat16")).report
    assert report.certain, report
