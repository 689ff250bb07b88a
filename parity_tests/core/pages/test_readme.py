"""The README is true: its blocks run, its counts and report are those of the pages behind it."""

import re
import runpy

import pytest

import torch_ref
from flax_attn.parity.cases import markdown
from flax_attn.parity.cases.case import has_torch
from parity_tests.core.pages.pages import ROOT, blocks, missing, run, text_of

TEXT = text_of("README.md")
BLOCKS = blocks(TEXT)
WORDS = 1100  # that a reader reads in some minutes


BLOCKS += blocks(text_of("docs/migrating.md"))


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_blocks_of_the_readme_run(block):
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


COMMANDS = ("git clone ADDRESS flax_attn && cd flax_attn", "pip install . && flax-attn parity")
COMMANDS += ('pip install -e ".[dev]" && pytest',)
HEADINGS = ["Who it is for", "Coming from another library", "What is proven"]
HEADINGS += ["Use: a layer in a training step", "Port: a torch module"]
HEADINGS += ["Learn: from six words to fast attention", "Benchmark: speed and memory", "More"]


def test_the_first_screen_holds_what_it_is_a_layer_a_picture_and_commands():
    first, *rest = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    assert [part.partition("\n")[0] for part in rest] == HEADINGS
    layer, commands = re.findall(r"```\w*\n(.*?)```", first, re.DOTALL)
    assert first.startswith("# flax_attn\n\n48 attention and recurrent layers ")
    assert len([*filter(None, layer.splitlines())]) == 6 and "from flax_attn import" in layer
    assert first.index(layer) < first.index("](docs/identical.png)") < first.index(commands)
    lines = commands.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [*COMMANDS]
    assert all(re.search(r"# (a minute|\d+ minutes): ", line) for line in lines[1:])
    assert len(first.splitlines()) <= 40


def test_every_page_says_the_same_version_and_the_changelog_is_short():
    changes, citation = text_of("CHANGELOG.md"), text_of("CITATION.cff")
    (now, day), *_ = re.findall(r"^## (\S+) \((\S+)\)$", changes, re.MULTILINE)
    assert f'version = "{now}"' in text_of("pyproject.toml")
    assert f"version: {now}\n" in citation and f"date-released: {day}\n" in citation
    assert f"Version {now}, a beta" in TEXT
    assert f'git tag -a v{now} -m "flax_attn {now}"' in text_of("CONTRIBUTING.md")
    assert len(changes.split()) <= 1200


def test_the_readme_is_short_and_no_line_of_code_is_cut_at_838_pixels():
    assert len(TEXT.split()) <= WORDS
    code = re.findall(r"```\w*\n(.*?)```", TEXT, re.DOTALL)
    assert max(len(line) for block in code for line in block.splitlines()) <= 90


def test_its_counts_of_layers_and_originals_are_those_of_the_certificate():
    rows = markdown.rows(markdown.MARKS.search(text_of("docs/certificate.md"))["table"])
    only = [row for row in rows.values() if not re.search(r"(^|; )(?!torch_ref\.)", row[1])]
    assert (
        f"{len(rows)} attention and recurrent layers" in TEXT
        and f"[All {len(rows)}](docs/layers.md)" in TEXT
    )
    told = " ".join(TEXT.split())
    assert f"for {len(rows) - len(only)}, code of torch, " in told
    assert f"for {len(only)}, plain PyTorch" in told
    device = text_of("docs/benchmarks/h100.md")
    assert f"**{len(rows)} layers**, 433 recorded results" in device and "no time for 153" in device
    assert "all of 433 recorded results" in told and "153 others were not tried" in told


def test_the_page_of_layers_is_made_of_their_docstrings_and_of_the_certificate():
    page = runpy.run_path(str(ROOT / "docs/reference.py"))["layers_page"]()
    assert text_of("docs/layers.md") == page, "python docs/reference.py writes docs/layers.md."
    assert page.count("\n| ") == 48 + 2 * page.count("\n## ")


def test_its_report_is_the_beginning_of_what_the_page_on_porting_prints():
    (shown,) = blocks(TEXT, "text")
    assert "DIFFERENT" in shown and "(docs/porting.md#the-example)" in TEXT
    assert any(block.startswith(shown) for block in blocks(text_of("docs/porting.md"), "text"))


def test_its_counts_of_faults_are_those_of_the_trial():
    trial, told = text_of("docs/trial.md"), " ".join(TEXT.split())
    listed = trial.partition("<!-- listed -->")[2]
    found, _, named = re.search(r"\*\*all\*\* \| (\S+) \| (\S+) \| (\S+)", listed).groups()
    found, named = (share.replace("/", " of ") for share in (found, named))
    found, named = f"finds {found} faults", f"names {named} causes"
    assert f"`compare` {found} made on purpose, and {named} " in told
    count = found.split()[1]
    assert f"| {count} listed faults in right ports are all found, " in text_of("docs/contracts.md")


def test_the_picture_of_a_report_is_of_what_the_judge_says():
    drawer = text_of("docs/report.py")
    if absent := missing(drawer):
        pytest.skip(f"the report needs {', '.join(absent)}")
    known = {"__name__": "page", "__file__": "docs/report.py"}
    printed = run(f"{drawer}\nprint(report())", "docs/report.py", known)
    alt = re.search(r"!\[(.*)\]\(report.png\)", text_of("docs/mistakes.md"))[1]
    hint = "the tanh GELU of up, where torch has the exact GELU"
    assert f"DIFFERENT between up and down: looks like {hint}" in printed
    assert "between up and down, the tanh GELU where torch has the exact one" in alt
    assert (ROOT / "docs/report.png").stat().st_size < 60_000
