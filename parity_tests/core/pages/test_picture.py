"""The README's picture is drawn, of a comparison that holds, in the size that is kept."""

import pytest

from parity_tests.core.pages.pages import ROOT, missing, run, text_of

pytestmark = pytest.mark.nightly

PROGRAM = text_of("docs/picture.py")
if absent := missing(PROGRAM):
    pytest.skip(f"the picture needs {', '.join(absent)}", allow_module_level=True)


def test_the_picture_is_drawn_by_its_program(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    drawn = tmp_path / "identical.png"
    said = run(f"{PROGRAM}\ndraw(target)", "docs/picture.py", {"__name__": "page", "target": drawn})
    drawn, kept = drawn.read_bytes(), (ROOT / "docs/identical.png").read_bytes()
    size = slice(16, 24)  # width and height, by the format
    assert drawn[:8] == kept[:8] == b"\x89PNG\r\n\x1a\n" and drawn[size] == kept[size]
    assert "largest error" in said
