"""The README is true: its blocks run, its figures and its report stand on the pages that made them.

`python -m parity_tests.core.pages.test_readme` writes the benchmark's figures into it.
"""

import re

import pytest

import torch_ref
from flax_attn._internal.markdown import cells, fill, text_between
from flax_attn.parity.cases.case import has_torch
from parity_tests.core.pages.measured import factors, rows, sections
from parity_tests.core.pages.pages import ROOT, blocks, missing, run, text_of

TEXT = text_of("README.md")
BLOCKS = blocks(TEXT)
SPEED = text_between("<!-- speed -->", "<!-- end of speed -->")
CALLS = {
    "jax.nn": "`jax.nn` takes",
    "flax.nnx": "`flax.nnx`",
    "torch": "torch's fused kernel",
}
SHAPE = "head width 64, causal, float32"


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block):
    if absent := missing(block):
        pytest.skip(f"this block needs {', '.join(absent)}")
    run(block, "README.md")


@pytest.mark.skipif(not has_torch(), reason="torch_ref is written in torch")
def test_an_original_is_found_under_the_name_in_the_tables():
    names = {*re.findall(r"torch_ref\.(\w+)", TEXT + text_of("docs/certificate.md"))}
    assert len(names) > 45
    for name in names:
        assert getattr(torch_ref, name).__name__ == name
    with pytest.raises(AttributeError, match="torch_ref has no 'Tensor'"):
        _ = torch_ref.Tensor


COMMANDS = ("pip install . && flax-attn parity", 'pip install -e ".[dev]" && pytest')
HEADINGS = ["Who it is for", "Coming from another library", "What is proven"]
HEADINGS += ["Use: a layer in a training step"]
HEADINGS += ["Port: a torch module", "Learn: from six words to fast attention"]
HEADINGS += ["Benchmark: speed and memory", "Limits", "The code"]


def test_the_first_screen_holds_promise_layer_reports_and_commands():
    first, *rest = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    assert [part.partition("\n")[0] for part in rest] == HEADINGS
    layer, report, commands = re.findall(r"```\w*\n(.*?)```", first, re.DOTALL)
    promise = first.partition("```")[0]
    assert promise.startswith("# flax_attn\n\nAttention in JAX that can be trusted: ")
    assert len([*filter(None, layer.splitlines())]) == 6 and "from flax_attn import" in layer
    assert "DIFFERENT" in report and ", 0 different" in report
    lines = commands.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [*COMMANDS]
    assert all(re.search(r"# (a minute|\d+ minutes): ", line) for line in lines)
    # At 838 pixels a block of code shows 90 letters.
    assert max(map(len, [*layer.splitlines(), *lines])) <= 90
    assert len(first.splitlines()) <= 40


def test_every_file_of_the_tree_is_there():
    tree = re.search(r"```\nflax_attn/.*?```", TEXT, re.DOTALL)
    assert tree is not None
    for name in re.findall(r"^\s*((?:[\w]+(?:\.py|/)\s)+)", tree[0], re.MULTILINE):
        for piece in name.split():
            places = [ROOT / piece, ROOT / "flax_attn" / piece]
            assert any(place.exists() for place in places), piece


def test_the_certificate_fits_a_page_of_838_pixels():
    """Where a cell breaks at each space: 93 letters of 7.8 pixels, and the edges of four cells."""
    table = re.search(r"<!-- short certificate of .*? -->\n(.*?)<!--", TEXT, re.DOTALL)[1]
    columns = zip(*cells(table), strict=True)
    widest = [
        max((word for cell in column for word in cell.split()), key=len) for column in columns
    ]
    assert sum(map(len, widest)) <= 93, f"README's table is too wide by its words {widest}."


def test_its_reports_are_those_that_the_page_on_porting_prints():
    (shown,) = blocks(TEXT, "text")
    wrong, right = shown.split("\n\n")
    assert "DIFFERENT" in wrong and ", 0 different" in right
    for report in (wrong, right):
        assert any(report in block for block in blocks(text_of("docs/porting.md"), "text"))


def test_its_counts_of_faults_are_those_of_the_trial():
    trial, told = text_of("docs/trial.md"), " ".join(TEXT.split())
    listed = trial.partition("<!-- listed -->")[2]
    found, _, named = re.search(r"\*\*all\*\* \| (\S+) \| (\S+) \| (\S+)", listed).groups()
    found, named = (share.replace("/", " of ") for share in (found, named))
    assert f"it finds {found}, and names {named}." in told
    allclose = re.search(r"^\| allclose 1e-3 \|.* (\d+) \| \d+ \|$", trial, re.MULTILINE)
    harness = re.search(r"^\| \*\*float64, norm-relative.* (\d+) \| \d+ \|$", trial, re.MULTILINE)
    assert f"catches {allclose[1]}, and this harness catches {harness[1]} (" in told
    assert f"Of {re.search(r'caught of ([0-9]+)', trial)[1]} faults" in told


def test_its_figures_are_those_of_the_benchmark():
    assert SPEED.search(TEXT)["table"] == speed(text_of("docs/benchmarks/xeon.md")), (
        "README.md shows other figures than docs/benchmarks/xeon.md: run "
        "`python -m parity_tests.core.pages.test_readme`, which copies them."
    )


def speed(page: str) -> str:
    """A sentence on each processor, and what memory the longest row that all have needs."""
    lines = []
    for device, section in sections(page, "flash").items():
        version = re.search(r"flax-attn ([\d.]+\d)", section)[1]
        table = rows(section, SHAPE)
        ranges = [f"{call} {_range(name, table)}" for name, call in CALLS.items()]
        where = f"**{device}, two cores, flax_attn {version}**"
        lines += [f"{where}: over all lengths and both passes, {', '.join(ranges)}."]
        both = [row for row in table if row["pass"] == "fwd+bwd"]
        memory = {(r["T"], r["competitor"]): r["memory"] for r in both}
        last = max((t for t, name in memory if name == "jax.nn"), key=int)
        shape = re.search(rf"^\| {last} \| (\d+ x \d+) \|", section, re.MULTILINE)[1]
        needs = f"{memory[last, 'flax_attn']} of temporary memory; `jax.nn` needs"
        where = f"There both passes over {shape} heads of {int(last):,} tokens"
        lines += [f"{where} need {needs} {memory[last, 'jax.nn']}."]
    return "\n\n".join(lines) + "\n"


def _range(name: str, rows: list[dict[str, str]]) -> str:
    """The smallest and largest ratio."""
    mine = (row["ratio"] for row in rows if row["competitor"] == name)
    ratios = [ratio for cell in mine for ratio in factors(cell)]
    return f"{min(ratios):.2g}x to {max(ratios):.2g}x"


def test_its_picture_of_a_report_is_of_what_the_judge_says():
    drawer = text_of("docs/report.py")
    if absent := missing(drawer):
        pytest.skip(f"the report needs {', '.join(absent)}")
    known = {"__name__": "page", "__file__": "docs/report.py"}
    printed = run(f"{drawer}\nprint(report())", "docs/report.py", known)
    alt = re.search(r"!\[(.*)\]\(docs/report.png\)", TEXT)[1]
    hint = "the tanh GELU of up, where torch has the exact GELU"
    assert f"DIFFERENT between up and down: looks like {hint}" in printed
    assert "between up and down, the tanh GELU where torch has the exact one" in alt
    assert (ROOT / "docs/report.png").stat().st_size < 60_000


if __name__ == "__main__":
    figures = speed(text_of("docs/benchmarks/xeon.md"))
    (ROOT / "README.md").write_text(fill(TEXT, SPEED, figures), "utf-8")
