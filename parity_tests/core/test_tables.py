"""What runs at each commit: the first case of each variant, and the rows that a table names."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from flax_attn.parity.cases.collect import collect
from parity_tests import conftest
from parity_tests.tables import each, with_nightly


class Item:
    """A test of a case, in this file of the suite."""

    def __init__(self, case, file, index=0):
        self.callspec = SimpleNamespace(params={"case": case}, indices={"case": index})
        self.marks, self.own_markers = [], []
        self.path, self.add_marker = conftest.HERE / file, self.marks.append


def test_the_first_case_of_a_variant_runs_wherever_else_it_is_used():
    first, second, *_ = collect("parity_tests.test_causal_attention")
    items = Item(second, "core/a.py", 1), Item(first, "b.py"), Item(second, "b.py", 1)
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=[]), items)
    assert [item.marks for item in items] == [[], [], [pytest.mark.nightly]]
    assert not first.eager and not second.eager


class Row:
    """A row of a table of which the night spares some."""

    def __init__(self, name, *spared):
        self.nodeid, self.path = f"file::test[{name}]", Path("elsewhere")
        self.own_markers = [pytest.mark.nightly(but=spared).mark]


def test_nightly_but_runs_the_named_rows_at_each_commit():
    rows = [Row(name, "b", "d") for name in "abcd"]
    conftest.pytest_collection_modifyitems(SimpleNamespace(args=[]), rows)
    assert [bool(row.own_markers) for row in rows] == [True, False, True, False]
    for given, refused in (([], True), (["file::test[a]"], False)):
        rows = [Row(name, "b", "gone") for name in "ab"]
        with pytest.raises(pytest.UsageError, match="no rows gone") if refused else nullcontext():
            conftest.pytest_collection_modifyitems(SimpleNamespace(args=given), rows)


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
