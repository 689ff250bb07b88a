"""Every test has its turn, and a turn leaves no table out."""

from types import SimpleNamespace

import pytest

from flax_attn.parity.cases.collect import collect
from parity_tests.turns import EVERY, OF_CASES, OF_CORE, split, turn_of


class Item:
    def __init__(self, nodeid, every=None, case=None):
        self.nodeid, self.mark = nodeid, every and SimpleNamespace(args=(every,))
        self.callspec = SimpleNamespace(params={"case": case} if case else {})

    def get_closest_marker(self, name):
        return self.mark if name == "turns" else None


def table(name, count, every=None):
    return [Item(f"{name}[{i}]", every) for i in range(count)]


@pytest.mark.parametrize(
    ("items", "turns", "most"),
    [
        (table("a.py::test_long", 20), EVERY, 4),
        (table("a.py::test_short", 3), 3, 1),
        (table("a.py::test_two_in_all", 20, 2), 2, 10),
        (table("a.py::test_whole", 20, 1), 1, 20),
        ([Item("a.py::test_alone")], 1, 1),
        ([Item("a.py::test_rare", 5)], 5, 1),
        ([Item("parity_tests/core/a.py::test_alone")], OF_CORE, 1),
        (table("parity_tests/core/a.py::test_long", 20), EVERY * OF_CORE, 4),
        (table("parity_tests/core/a.py::test_short", 3), 3 * OF_CORE, 1),
        (table("parity_tests/core/a.py::test_whole", 20, 1), 1, 20),
    ],
    ids=lambda x: x[0].nodeid if isinstance(x, list) else None,
)
@pytest.mark.turns(1)
def test_all_have_their_turn(items, turns, most):
    found = [split(items, turn)[0] for turn in range(7, 7 + turns)]
    assert sorted(x.nodeid for due in found for x in due) == sorted(x.nodeid for x in items)
    assert max(map(len, found)) <= most
    in_core = "/core/" in items[0].nodeid and turns > 1
    assert in_core or turns > len(items) or min(map(len, found)) >= 1
    assert not in_core or sum(map(bool, found)) == turns // OF_CORE


def test_the_rest_are_the_others_in_order():
    items = table("a.py::test_long", 20)
    due, others = split(items, 3)
    assert sorted(due + others, key=items.index) == items
    assert due == sorted(due, key=items.index)


def test_the_first_case_of_a_variant_runs_always():
    cases = collect("parity_tests.test_causal_attention")
    for case in cases:
        case.eager = case is cases[0]
    items = [Item(f"a.py::test_parity[{i}]", case=case) for i, case in enumerate(cases)]
    found = [split(items, turn)[0] for turn in range(OF_CASES)]
    assert all(items[0] in due for due in found)
    assert {x.nodeid for due in found for x in due} == {x.nodeid for x in items}


def test_a_turn_is_a_number_or_all():
    assert turn_of("all") is None and turn_of("12") == 12
    with pytest.raises(pytest.UsageError, match="whole number or all; got 'half'"):
        turn_of("half")
