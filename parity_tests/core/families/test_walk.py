"""No field of a config is ignored: a change is the same on both sides, or refused by its name."""

import pytest

from parity_tests.core.drawing import float64 as float64
from parity_tests.families.configs import BOTH, place, titled
from parity_tests.families.parts import PARTS
from parity_tests.tables import with_nightly

from .walk import walk

pytestmark = pytest.mark.nightly

# Of each family the first config in the new spelling, the second in the old one, and so on.
TURNS = [pair for pair in BOTH if (place(pair[0]) % 2 == 0) == (pair[1] == "new")]
EACH = {(small.name, small.part): small for small in reversed(PARTS)}


NOW = [pair for pair in TURNS if titled(pair[0]) + pair[1] in ("gemma-0new", "olmo2-1old")]


@pytest.mark.parametrize(("small", "spelling"), with_nightly(TURNS, commit=NOW), ids=titled)
def test_no_field_is_ignored(small, spelling, transformers):
    walk(small, spelling)


@pytest.mark.parametrize(
    "small",
    with_nightly(EACH.values(), commit=[EACH["umt5", "cross"]]),
    ids=map("-".join, EACH),
)
def test_no_field_is_ignored_by_a_part(small, transformers):
    walk(small, "new")
