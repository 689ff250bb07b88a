"""The page docs/porting.md is true: its blocks run in order and print what it shows.

`python -m parity_tests.core.pages.test_docs` writes what they print into the page.
"""

import re
from typing import Any

import jax.numpy as jnp
import pytest

from flax_attn import CAUSAL, attend, merge_heads, split_heads
from flax_attn.command import proving
from flax_attn.command.cli import main
from flax_attn.parity import judge
from flax_attn.parity.cases.case import has_torch
from parity_tests.core.pages.pages import BLOCK, ROOT, blocks, run, text_of
from parity_tests.core.parity.in_process import Here, forget

PAGE = "docs/porting.md"
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?x?")
TEXT = text_of(PAGE)


def printed(text: str) -> list[str]:
    """What each text block of the page should show: what the block before it prints."""
    known: dict[str, Any] = {"__name__": "porting"}
    out, shown = "", []
    for kind, block in BLOCK.findall(text):
        if kind == "text":
            shown.append(out)
        else:
            out = run(block, PAGE, known)
    return shown


def shape(text: str) -> list[str]:
    """The lines without their numbers, whose last digits are each machine's own."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in text.splitlines()]


@pytest.mark.nightly
@pytest.mark.skipif(not has_torch(), reason="the page compares with torch")
def test_its_blocks_run_and_print_what_it_shows():
    wanted = blocks(TEXT, "text")
    found = printed(TEXT)
    assert len(found) == len(wanted) > 2
    for got, want in zip(found, wanted, strict=True):
        assert shape(got) == shape(want)


@pytest.mark.nightly
def test_the_layer_on_the_page_for_contributors_is_what_it_says():
    page: dict[str, Any] = {"__name__": "page"}
    run(blocks(text_of("CONTRIBUTING.md"))[0], "CONTRIBUTING.md", page)
    layer, x, y = page["layer"], page["x"], page["y"]
    q, k, v = (p(x) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k, v = (split_heads(a, 4) for a in (q, k, jnp.tanh(v)))
    wanted = layer.o_proj(merge_heads(attend(q, k, v, mask=CAUSAL)))
    assert judge.allclose(y, wanted) and page["cache"].length.tolist() == [5, 5]


@pytest.mark.nightly
@pytest.mark.skipif(not has_torch(), reason="the page compares with torch")
def test_its_file_of_cases_is_one_that_the_command_takes(tmp_path, monkeypatch, capsys):
    (text,) = [block for block in blocks(TEXT) if "\nCASES = [" in block]
    assert text.count("\n") <= 6
    (tmp_path / "my_cases.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(proving, "Workers", Here)
    assert main(["parity", "my_cases.py"]) == 0
    forget("my_cases")
    told = capsys.readouterr().out
    assert "1 variant, 1 case, 0 different" in told and "torch.nn.LayerNorm" in told


def test_its_lines_are_no_longer_than_a_screen_is_wide():
    assert max(map(len, BLOCK.sub("", TEXT).splitlines())) <= 110


def written(text: str) -> str:
    """The page with what its blocks print."""
    found = iter(printed(text))
    return BLOCK.sub(lambda m: m[0] if m[1] == "python" else f"```text\n{next(found)}```", text)


if __name__ == "__main__":
    (ROOT / PAGE).write_text(written(TEXT), "utf-8")
