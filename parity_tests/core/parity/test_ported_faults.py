"""Published blocks without attention: right ports are equal, a porter's mistakes are told."""

from dataclasses import replace
from importlib import import_module

import pytest

from flax_attn._internal.markdown import cells
from parity_tests.tables import with_nightly

torch = pytest.importorskip("torch", reason="the harness compares with torch")
pytest.importorskip("transformers", reason="most of the blocks are its classes")
ported = import_module("parity_tests.core.parity.faults.ported")
table = import_module("parity_tests.core.parity.faults.ported.table")

AT_LEAST = {table.FOUND: 40, table.PLACED: 38, table.NAMED: 30}
RIGHT = ("Phi3MLP", "SwinPatchMerging")
JUDGED = (
    "Phi3MLP: up as the first half, where torch has the gate",
    "SwinPatchMerging: nnx's epsilon of a norm",
    "ChameleonVQVAEVectorQuantizer: beta on the wrong one of the two losses",
)


def test_the_list_of_mistakes():
    """40 mistakes in 15 blocks; nearly all have a short name, and each is one of its block's."""
    names = [str(mistake) for mistake in ported.MISTAKES]
    assert len(names) == len(set(names)) == 40
    assert len(ported.BLOCKS) == len({id(block) for block in ported.BLOCKS}) == 15
    assert {id(m.block) for m in ported.MISTAKES} == {id(block) for block in ported.BLOCKS}
    counts = [sum(m.block is block for m in ported.MISTAKES) for block in ported.BLOCKS]
    assert 2 <= min(counts) and max(counts) <= 4, counts
    assert sum(not mistake.words for mistake in ported.MISTAKES) <= 8
    unchanged = [str(m) for m in ported.MISTAKES if m.port is None and m.rules is None]
    assert not unchanged, unchanged


@pytest.mark.parametrize(
    "block",
    with_nightly(ported.BLOCKS, commit=lambda block: block.name in RIGHT),
    ids=lambda block: block.name,
)
def test_a_right_port_is_equal(block):
    report = block.report()
    assert report.certain, str(report)
    assert any(row.kind == "gradient" and row.verdict.shows for row in report.rows)


def _called(name):
    (mistake,) = (mistake for mistake in ported.MISTAKES if str(mistake) == name)
    return mistake


@pytest.mark.parametrize("name", JUDGED)
def test_a_mistake_is_found_placed_and_named(name):
    row = table.judged(_called(name))
    assert row.found and row.placed and row.named, row
    assert not row.innocent and not row.misleads, row


def test_what_the_table_counts_against_the_harness():
    """A right port is not found; a place and a word that were not said are missed."""
    mistake = _called(JUDGED[0])
    assert not table.judged(replace(mistake, port=mistake.block.port)).found
    row = table.judged(replace(mistake, place="down_proj", hint="another scale"))
    assert row.found and row.misleads and not row.placed and not row.named, row
    assert row.innocent == ("between gate_up_proj and down_proj",)
    told = table.text([row])
    assert "not placed, not named" in told and "innocent: 1/1" in told and "misleads: 1/1" in told


@pytest.mark.nightly
def test_the_ported_table():
    """All are found, nearly all placed, most named; nothing else is blamed, no hint is wrong."""
    rows = ported.run_all()
    told = table.text(rows)
    for question, least in AT_LEAST.items():
        right, _ = table.share(rows, question)
        assert right >= least, told
    harmful = [row for row in rows if any(row.of(harm) for harm in table.HARMS)]
    assert not harmful, told


def test_the_page_of_mistakes_lists_each():
    """docs/mistakes.md is written by the trial; what it says of each is made nightly."""
    page = import_module("parity_tests.core.parity.faults.ported.page")
    rows = cells(page.MARKS.search(page.PAGE.read_text("utf-8"))["table"])
    assert [row[:2] for row in rows[1:]] == [[m.block.name, m.name] for m in ported.MISTAKES]
