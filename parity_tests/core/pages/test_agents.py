"""AGENTS.md is true: its blocks run in order on a small module, and its paths exist."""

import re
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
from flax import nnx

from parity_tests.core.pages.pages import ROOT, blocks, run, text_of

torch = pytest.importorskip("torch", reason="the page ports a torch module")
PAGE = "AGENTS.md"
TEXT = text_of(PAGE)


class Attention(torch.nn.Module):
    """Heads of a query that is fused nowhere, under the names of the page's rule."""

    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.q_proj = torch.nn.Linear(10, 24, bias=False)

    def forward(self, x, mask):
        return self.attn.q_proj(x).unflatten(-1, (8, 3)).tanh() * mask[..., None, None]


class Port(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.LinearGeneral(10, (8, 3), use_bias=False, rngs=rngs)

    def __call__(self, x, mask):
        return nnx.tanh(self.query(x)) * mask[..., None, None]


def formula(q, k, v):
    weights = nnx.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5)
    return weights @ v


@pytest.mark.nightly
def test_code_blocks_of_agents_md_run():
    drawn = np.random.default_rng(0)
    x, mask = drawn.normal(size=(2, 5, 10)), drawn.normal(size=(2, 5))
    known: dict[str, Any] = {"torch_module": Attention(), "port": Port(nnx.Rngs(0))}
    known |= {"x": x, "mask": mask, "formula": formula, "kernel": formula}
    known |= dict(zip("qkv", (drawn.normal(size=(2, n, 4)) for n in (5, 6, 6)), strict=True))
    found, *others = map(dedent, blocks(TEXT))
    torch_attention = torch.nn.MultiheadAttention(12, 3, batch_first=True, bias=False)
    call = {"torch_module": torch_attention, "x": drawn.normal(size=(2, 7, 12))}
    given = found.replace(
        "torch_module, x)", "torch_module, x, torch_call=lambda m, x: m(x, x, x)[0])"
    )
    assert "TransformerMultiHeadAttention(12, 3, bias=False)" in run(given, PAGE, {**known, **call})
    printed = [run(block, PAGE, known) for block in others]
    assert "attn.q_proj.weight -> query.kernel" in printed[0] and "0 different" in printed[1]
    assert known["report"].ok


def test_paths_in_agents_md_exist():
    for path in re.findall(r"`((?:flax_attn|parity_tests)/[\w/.]*)", TEXT):
        path = path.replace("FOLDER", "").replace("test_LAYER.py", "")
        assert (ROOT / path).exists(), path
    assert all((ROOT / path).is_file() for path in re.findall(r"\]\((docs/\w+\.md|\w+\.md)", TEXT))


def test_agents_md_is_one_page():
    assert TEXT.count("\n") <= 110 and max(map(len, TEXT.splitlines())) <= 120
