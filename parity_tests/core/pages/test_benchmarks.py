"""The page of benchmarks says in short what the files of machines hold, and no other figure.

`python -m parity_tests.core.pages.test_benchmarks` writes the table that it begins with.
"""

import re

import pytest

from flax_attn._internal.markdown import fill, table, text_between
from flax_attn.bench.presets import PRESETS
from parity_tests.core.pages.measured import factors, rows, sections
from parity_tests.core.pages.pages import ROOT, missing, run, text_of

PAGE = text_of("docs/benchmarks.md")
NAMES = ("h100", "xeon", "epyc", "notes")
MEASURED = "\n\n".join(text_of(f"docs/benchmarks/{name}.md") for name in NAMES)
CHARTS = text_of("docs/charts.py")
SECTION = re.compile(
    r"<!-- bench: (\w+), ([^>]+) -->\n(.*?)<!-- end of bench: \1, \2 -->", re.DOTALL
)

SHORT = text_between("<!-- in short -->", "<!-- end of in short -->")
CAUSAL = "head width 64, causal"
# What is shown: its preset, what tables' titles hold, the competitor, and the length, if it is one.
SHOWN = {
    "`jax.nn` over `attend`, width 64, causal": ("flash", CAUSAL, "jax.nn", ""),
    "torch over `attend`, width 64, causal": ("flash", CAUSAL, "torch", ""),
    "memory of `jax.nn`, 16,384 tokens, both passes": ("memory", "", "jax.nn", "16384"),
    "torch over `attend`, window of 256, 8,192 tokens": ("window", "", "torch", "8192"),
    "published layers: transformers, sdpa": ("layers", "", "transformers, sdpa", ""),
    "published layers: transformers, eager": ("layers", "", "transformers, eager", ""),
    "a step of decoding: torch, static cache": ("decode", "", "torch, static cache", ""),
    "a step of decoding: flax.nnx": ("decode", "", "flax.nnx", ""),
    "the gated delta rule: transformers": ("linear", "", "transformers, chunked", ""),
}
VERSION = re.compile(r"flax-attn ([\d.]+\d)")


def in_short(page: str) -> str:
    """The least and the largest ratio of each on every processor, with the version."""
    devices = sections(page, "flash")
    heads = [f"{name}, {VERSION.search(text)[1]}" for name, text in devices.items()]
    lines = []
    for what, (preset, title, column, length) in SHOWN.items():
        of = sections(page, preset)
        lines.append([what, *(ratios(of.get(x, ""), title, column, length) for x in devices)])
    return table(["time or memory over that of flax_attn", *heads], lines)


def ratios(section: str, title: str, name: str, length: str) -> str:
    every = [row for row in rows(section, title) if row["competitor"] == name]
    every = [row for row in every if length in ("", row.get("T"))]
    values = [factor for row in every for factor in factors(row["ratio"])]
    ends = dict.fromkeys(f"{end:.2g}x" if end < 100 else f"{end:.0f}x" for end in limits(values))
    return " to ".join(ends)


def limits(values: list[float]) -> list[float]:
    return [min(values), max(values)] if values else []


def test_it_begins_with_the_ratios_of_its_tables():
    again = "run `python -m parity_tests.core.pages.test_benchmarks`"
    assert SHORT.search(PAGE)["table"] == in_short(MEASURED), again


def test_its_figures_stand_in_the_tables_of_the_machines():
    figure = re.compile(r"\d[\d.,]*(?:x| [mu]?s| MiB)(?= [|t])|[\d.]+ \+ [\d.]+")
    tables = re.findall(r"^\| .* \|$", SHORT.sub("", PAGE), re.MULTILINE)
    figures = {number for row in tables for number in figure.findall(row)}
    assert len(figures) > 100 and not figures - {*figure.findall(MEASURED)}


def test_every_preset_is_named_and_has_a_section():
    named = {*re.findall(r"flax-attn bench --preset (\w+)", PAGE)}
    assert named == {name for name in PRESETS if name}
    recorded = {preset for preset, _, _ in SECTION.findall(MEASURED)}
    assert named <= recorded, f"named and not recorded: {sorted(named - recorded)}"


def test_every_section_says_on_what_it_was_measured_and_holds_figures():
    for preset, device, text in SECTION.findall(MEASURED):
        where = device.rpartition(", ")[0]
        assert f"`flax-attn bench --preset {preset}" in text and f"({where}, " in text
        rate, several = (
            r"A matrix product reaches [\d.]+",
            r" to [\d.]+ in \w+ TFLOP/s here. \d+ runs",
        )
        assert re.search(rf"{rate}( in \w+ TFLOP/s here|{several}, begun at)", text)
        assert len(re.findall(r"^\| .* \|$", text, re.MULTILINE)) > 6, f"{preset} is empty"


def test_no_heading_is_empty():
    for part in re.split(r"^##+ ", f"{PAGE}\n{MEASURED}", flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        stands = bool(re.sub(r"<!--.*?-->", "", body).strip())
        assert stands, f"nothing stands under {title!r}"


@pytest.mark.nightly
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


if __name__ == "__main__":
    (ROOT / "docs/benchmarks.md").write_text(fill(PAGE, SHORT, in_short(MEASURED)), "utf-8")
