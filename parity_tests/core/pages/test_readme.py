"""The README is true: its blocks run, its table names every variant, its claims have files."""

import re

import pytest

import torch_ref
from flax_attn.parity.cases.case import has_torch
from flax_attn.parity.cases.collect import collect
from parity_tests.core.pages.pages import ROOT, blocks, missing, run, text_of

TEXT = text_of("README.md")
BLOCKS = blocks(TEXT)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    if absent := missing(block):
        pytest.skip(f"this block needs {', '.join(absent)}")
    run(block, "README.md")


def test_the_table_names_every_variant_and_witness():
    rows = dict(
        row.split(" | ")[:2] for row in re.findall(r"^\| (.*equal) \|$", TEXT, re.MULTILINE)
    )
    cases = collect("parity_tests")
    for case in cases:
        assert case.proven_equal_to in rows[case.variant].split("; ")
    assert {*rows} == {case.variant for case in cases}
    assert "DIFFERENT" not in TEXT


@pytest.mark.skipif(not has_torch(), reason="torch_ref is written in torch")
def test_an_original_is_found_under_the_name_in_the_table():
    names = {*re.findall(r"torch_ref\.(\w+)", TEXT)}
    assert len(names) > 15
    for name in names:
        assert getattr(torch_ref, name).__name__ == name
    with pytest.raises(AttributeError, match="torch_ref has no 'Tensor'"):
        _ = torch_ref.Tensor


def test_the_front_door_is_short():
    assert len(TEXT.splitlines()) < 150
    assert len((ROOT / "CONTRIBUTING.md").read_text("utf-8").splitlines()) < 50


def test_every_file_of_the_tree_is_there():
    tree = re.search(r"```\nflax_attn/.*?```", TEXT, re.DOTALL)
    assert tree is not None
    for name in re.findall(r"^\s*((?:[\w]+(?:\.py|/)\s)+)", tree[0], re.MULTILINE):
        for piece in name.split():
            places = [ROOT / piece, ROOT / "flax_attn" / piece]
            assert any(place.exists() for place in places), piece
