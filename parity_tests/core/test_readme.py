"""The README is true: its blocks run, its table names every variant, its claims have files."""

import re
from pathlib import Path

import jax
import pytest

from flax_attn.parity.case import has_torch
from flax_attn.parity.collect import collect

README = Path(__file__).parents[2] / "README.md"
if not README.exists():
    pytest.skip("the README is not part of an installed package", allow_module_level=True)

TEXT = README.read_text("utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    if "torch" in block and not has_torch():
        pytest.skip("this block needs torch")
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # as users have it
        exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_the_table_names_every_variant_and_witness():
    rows = dict(
        row.split(" | ")[:2] for row in re.findall(r"^\| (.*equal) \|$", TEXT, re.MULTILINE)
    )
    for case in collect("parity_tests"):
        assert case.proven_equal_to in rows[case.variant].split("; ")
    assert "DIFFERENT" not in TEXT


def test_the_front_door_is_short():
    assert len(TEXT.splitlines()) < 150
    assert len((README.parent / "CONTRIBUTING.md").read_text("utf-8").splitlines()) < 50


def test_every_file_of_the_tree_is_there():
    tree = re.search(r"```\nflax_attn/.*?```", TEXT, re.DOTALL)
    assert tree is not None
    for name in re.findall(r"^\s*((?:[\w]+(?:\.py|/)\s)+)", tree[0], re.MULTILINE):
        for piece in name.split():
            places = [README.parent / piece, README.parent / "flax_attn" / piece]
            assert any(place.exists() for place in places), piece
