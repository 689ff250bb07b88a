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

RIGHT = ("Phi3MLP", "SwinPatchMerging")
JUDGED = "Phi3MLP: up as the first half, where torch has the gate"


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


@pytest.mark.nightly
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


@pytest.mark.nightly(
    but=[
        "Phi3MLP: gate and up interleaved",
        "RobertaEmbeddings: the padding's row is trained",
        "T5LayerFF: the MLP's dropout after its last projection",
    ]
)
@pytest.mark.parametrize("mistake", ported.MISTAKES, ids=str)
def test_a_mistake_is_found_placed_and_named(mistake):
    """And docs/mistakes.md says of it what the report says."""
    row = table.judged(mistake)
    assert row.found and row.placed and row.named is not False, row
    assert not row.innocent and not row.misleads, row
    page = import_module("parity_tests.core.parity.faults.ported.page")
    (written,) = (r for r in written_rows(page) if r[:2] == [mistake.block.name, mistake.name])
    assert written == cells(page.listed([row]))[1], (
        "write the page again: ... faults.ported --write"
    )


@pytest.mark.nightly
def test_what_the_table_counts_against_the_harness():
    """A right port is not found; a place and a word that were not said are missed."""
    mistake = _called(JUDGED)
    assert not table.judged(replace(mistake, port=mistake.block.port)).found
    row = table.judged(replace(mistake, place="down_proj", hint="another scale"))
    assert row.found and row.misleads and not row.placed and not row.named, row
    assert row.innocent == ("between gate_up_proj and down_proj",)
    told = table.text([row])
    assert "not placed, not named" in told and "innocent: 1/1" in told and "misleads: 1/1" in told


def written_rows(page):
    return cells(page.MARKS.search(page.PAGE.read_text("utf-8"))["table"])[1:]


def test_the_page_of_mistakes_lists_each():
    page = import_module("parity_tests.core.parity.faults.ported.page")
    listed = [row[:2] for row in written_rows(page)]
    assert listed == [[m.block.name, m.name] for m in ported.MISTAKES]
