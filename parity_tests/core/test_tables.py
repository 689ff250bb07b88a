"""What runs at each commit: the first case of each variant, and the rows that a table names."""

from types import SimpleNamespace

import pytest

from flax_attn.parity.cases.collect import collect
from parity_tests import conftest
from parity_tests.tables import each, with_nightly


class Item:
    """A test of a case, in this file of the suite."""

    def __init__(self, case, file):
        self.callspec, self.marks = SimpleNamespace(params={"case": case}), []
        self.path, self.add_marker = conftest.HERE / file, self.marks.append


def test_the_first_case_of_a_variant_runs_wherever_else_it_is_used():
    first, second, *_ = collect("parity_tests.test_causal_attention")
    elsewhere, one, two = Item(first, "core/a.py"), Item(first, "b.py"), Item(second, "b.py")
    conftest.pytest_collection_modifyitems([elsewhere, one, two])
    assert not elsewhere.marks and not one.marks and first.eager
    assert two.marks == [pytest.mark.nightly] and not second.eager


def test_rows_are_chosen_by_name_by_number_or_by_what_is_true_of_them():
    def at_commit(commit):
        return [row.values[0] for row in with_nightly("abcde", commit=commit) if not row.marks]

    assert at_commit("db") == ["b", "d"] and at_commit(2) == ["a", "c", "e"]
    assert at_commit(lambda x: x > "c") == ["d", "e"]
    with pytest.raises(ValueError, match="not in the table: \\['z'\\]"):
        at_commit("az")
    with pytest.raises(ValueError, match="None of 5 rows"):
        at_commit("")


def test_a_loop_over_nothing_is_refused():
    with pytest.raises(ValueError, match="There is no path to try"):
        each("path", [])
