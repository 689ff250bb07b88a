"""Listed faults are found, placed and named; right ports and rewrites of them are equal."""

import ast
from dataclasses import replace

import pytest

from flax_attn._internal.markdown import cells

pytest.importorskip("torch", reason="the harness compares with torch")
pytest.importorskip("transformers", reason="some of the subjects are its classes")

from parity_tests.faults import table
from parity_tests.faults.judge import FOUND, NAMED, judged
from parity_tests.faults.listed import faults
from parity_tests.faults.subjects import homes

FAULTS = [fault for fault in faults() if not fault.is_rewrite]
REWRITES = [fault for fault in faults() if fault.is_rewrite]
LISTS = list(dict.fromkeys(fault.group for fault in FAULTS))
BLOCKS = "published blocks"
# At each commit: what only one part of the harness says.
NOW = (
    "gate and up interleaved",
    "the padding's row is trained",
    "the MLP's dropout after its last projection",
    "a detached gradient",
    "a stale cache",
)


def test_every_row_is_a_text_of_its_file():
    """At both amplitudes, and no two are called alike."""
    assert len(FAULTS) >= 340 and len(REWRITES) >= 25
    names = [str(fault) for fault in faults()]
    assert len(names) == len(set(names))
    for fault in faults():
        for low in (False, True)[: 1 + bool(fault.low)]:
            ast.parse(fault.source(low))


def test_a_row_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must stand once, and stands 0 times"):
        replace(FAULTS[0], old="no such text").source()


LONELY = {fault.port for fault in FAULTS if fault.lonely}
RIGHT = [port for _, port in homes().values() if port.name not in LONELY]


@pytest.mark.nightly
@pytest.mark.parametrize("port", RIGHT, ids=str)
def test_a_right_port_is_equal(port):
    report = port.report()
    assert report.ok and report.first is None, str(report)


@pytest.mark.nightly
@pytest.mark.parametrize("rewrite", REWRITES, ids=str)
def test_a_rewrite_is_equal(rewrite):
    report = rewrite.wrong().report()
    assert report.ok and report.first is None, str(report)


@pytest.mark.parametrize("name", NOW)
def test_a_fault_is_found_placed_and_named(name):
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    answer = judged(fault)
    assert answer.found and answer.placed and answer.named is not False, answer


@pytest.mark.nightly
@pytest.mark.parametrize("group", LISTS)
def test_the_faults_of_a_list(group):
    """All are found, at each amplitude, and as many placed and named as docs/trial.md says."""
    mine = [fault for fault in FAULTS if fault.group == group]
    tried = [(fault, low) for fault in mine for low in (False, True)[: 1 + bool(fault.low)]]
    answers = [judged(fault, low) for fault, low in tried]
    said = "\n".join(map(str, answers))
    assert all(answer.found for answer in answers), said
    page = cells(table.MARKS.search(table.PAGE.read_text("utf-8"))["table"])
    (row,) = (row for row in page if row[0] == group)
    now = table.row(group, answers)
    for was, found in zip(row[1:4], now[1:4], strict=True):
        assert int(found.partition("/")[0]) >= int(was.partition("/")[0]), f"{was}\n{said}"
    assert all(int(x) <= int(was) for x, was in zip(now[4:], row[4:], strict=True)), said
    if group == BLOCKS:
        rows = cells(table.MISTAKES.search(table.MISTAKES_PAGE.read_text("utf-8"))["table"])[1:]
        assert rows == cells(table.mistakes(answers))[1:], "python -m parity_tests.faults --write"


def test_what_is_counted_against_the_harness():
    """A right port is not found; a place and a word that were not said are missed."""
    (fault,) = (fault for fault in FAULTS if fault.name == "gate and up interleaved")
    assert not judged(replace(fault, new=fault.old)).found
    answer = judged(replace(fault, place="down_proj", words="another scale"))
    assert answer.found and answer.misleads and not answer.placed and not answer.named, answer
    assert answer.innocent == ("between gate_up_proj and down_proj",)
    assert table.share([answer], FOUND) == (1, 1) and table.share([answer], NAMED) == (0, 1)
    assert table.text([answer]).splitlines()[-1] == "| **all** | 1/1 | 0/1 | 0/1 | 1 | 1 |"
