"""Strange faults are found, placed and named; their right pairs and faithful rewrites are equal."""

from importlib import import_module

import pytest

from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
strange = import_module("parity_tests.core.parity.faults.strange")
table = import_module("parity_tests.core.parity.faults.strange.table")

AT_LEAST = {
    "huge fills": 8,
    "dropped outputs": 10,
    "kept share": 6,
    "state": 5,
    "axis orders": 8,
    "SDPA originals": 10,
    "between taps": 8,
    "norms and rotary": 8,
    "process": 4,
}


SLICES = [(False, 48), (False, 1), (True, 1)]  # whether at low amplitude, and one fault of so many


@pytest.mark.nightly
@pytest.mark.parametrize(("low", "step"), with_nightly(SLICES, commit=SLICES[:1]))
def test_the_strange_table(low, step):
    """Every fault is found at each of its amplitudes, and nearly every one placed and named."""
    rows = strange.run_all((low,), step)
    print(f"\n{table.text(rows)}")
    missed = [str(row) for row in rows if not row.found]
    assert not missed, "\n".join(missed)
    for question, least in ((table.PLACED, 0.95), (table.NAMED, 0.85)):
        right, asked = table.share(rows, question)
        assert right >= least * asked, "\n".join(table.missed(rows))


@pytest.mark.nightly
def test_what_two_taps_make_together_lies_after_the_later_of_them():
    (fault,) = (fault for fault in strange.FAULTS if fault.name == "the gate without its sigmoid")
    row = table.judged(fault, False)
    assert fault.place == "between up and down" and row.found and row.placed, row


def test_the_list_of_strange_faults():
    names = [str(fault) for fault in strange.FAULTS]
    assert len(names) >= 60
    assert len(set(names)) == len(names)
    counts = {group: sum(fault.group == group for fault in strange.FAULTS) for group in AT_LEAST}
    assert set(strange.GROUPS) == set(AT_LEAST)
    assert all(counts[group] >= least for group, least in AT_LEAST.items()), counts
    assert len(strange.REWRITES) >= 12


NOW = (
    "huge fills: scores off by up to one beside finfo.min",
    "dropped outputs: complex numbers conjugated",
    "kept share: what is kept not scaled",
    "norms and rotary: the epsilon of a gated norm",
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fault",
    with_nightly(
        [f for f in strange.FAULTS if not f.lonely], commit=lambda fault: str(fault) in NOW
    ),
    ids=str,
)
def test_a_pair_is_equal_without_its_fault(fault):
    report = fault.pair.report()
    assert report.ok, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("rewrite", with_nightly(strange.REWRITES, commit=9), ids=str)
def test_no_strange_rewrite_is_flagged(rewrite):
    report = rewrite.pair.report()
    assert report.ok, str(report)
    assert report.first is None
