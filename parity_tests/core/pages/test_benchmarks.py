"""The page of benchmarks has a section for all that it names, and charts of its own figures."""

import re

import pytest

from flax_attn.bench.presets import presets
from parity_tests.core.pages.pages import ROOT, missing, run, text_of

PAGE = text_of("docs/benchmarks.md")
CHARTS = text_of("docs/charts.py")
SECTION = re.compile(
    r"<!-- bench: (\w+), ([^>]+) -->\n(.*?)<!-- end of bench: \1, \2 -->", re.DOTALL
)


def test_every_preset_is_named_and_has_a_section():
    named = {*re.findall(r"flax-attn bench --preset (\w+)", SECTION.sub("", PAGE))}
    assert named == {name for name in presets() if name}
    recorded = {preset for preset, _, _ in SECTION.findall(PAGE)}
    assert named <= recorded, f"named and not recorded: {sorted(named - recorded)}"


def test_every_section_says_on_what_it_was_measured_and_holds_figures():
    for preset, device, text in SECTION.findall(PAGE):
        where = device.rpartition(", ")[0]
        assert f"`flax-attn bench --preset {preset}" in text and f"({where}, " in text
        assert re.search(r"A matrix product reaches [\d.]+ in \w+ TFLOP/s here", text)
        assert len(re.findall(r"^\| .* \|$", text, re.MULTILINE)) > 6, f"{preset} is empty"


def test_no_heading_is_empty():
    for part in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        stands = bool(re.sub(r"<!--.*?-->", "", body).strip())
        assert stands, f"nothing stands under {title!r}"


def test_its_charts_are_drawn_from_its_tables(tmp_path, monkeypatch):
    if absent := missing(CHARTS):
        pytest.skip(f"the charts need {', '.join(absent)}")
    monkeypatch.setenv("MPLBACKEND", "agg")
    known = {"__name__": "page", "__file__": str(ROOT / "docs/charts.py"), "target": tmp_path}
    run(f"{CHARTS}\ndraw(target)", "docs/charts.py", known)
    for name in ("time", "memory"):
        assert f"]({name}.png)" in PAGE
        drawn, kept = (x / f"{name}.png" for x in (tmp_path, ROOT / "docs"))
        assert size(drawn) == size(kept)
        assert tables(drawn) == tables(kept), f"{kept} is of other tables: run docs/charts.py"


def size(path):
    return path.read_bytes()[16:24]  # width and height, by the format


def tables(path):
    """What the chart says of the tables that it was drawn from."""
    return re.search(rb"tEXtDescription\0([0-9a-f]{64})", path.read_bytes())[1]
