"""The README's picture is drawn, of a comparison that holds, in the size that is kept."""

import runpy
from pathlib import Path

import jax
import pytest

from flax_attn.parity.case import has_torch

DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.exists():
    pytest.skip("the picture is not part of an installed package", allow_module_level=True)
pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.skipif(not has_torch(), reason="the picture compares with torch")
def test_it_is_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPLBACKEND", "agg")
    program = runpy.run_path(str(DOCS / "picture.py"))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        program["draw"](tmp_path / "identical.png")
    drawn = (tmp_path / "identical.png").read_bytes()
    kept = (DOCS / "identical.png").read_bytes()
    size = slice(16, 24)  # width and height, by the format
    assert drawn[:8] == kept[:8] == b"\x89PNG\r\n\x1a\n" and drawn[size] == kept[size]
    assert "largest error" in capsys.readouterr().out
