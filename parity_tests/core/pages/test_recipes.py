"""The pages of recipes are true: each block runs by itself and asserts what its section says."""

import re
import sys
import tomllib

import pytest

from parity_tests.core.pages.pages import (
    BLOCK,
    ROOT,
    blocks,
    missing,
    packages,
    run,
    sections,
    text_of,
)
from parity_tests.tables import with_nightly

TEXTS = {name: text_of(f"docs/{name}.md") for name in ("recipes", "models", "moving")}
SECTIONS = {title: body for text in TEXTS.values() for title, body in sections(text).items()}
BROUGHT = {"orbax": "flax"}  # by whom, where the extras name it not
of_all_pages = pytest.mark.parametrize("page", TEXTS)
of_all_sections = pytest.mark.parametrize("title", SECTIONS)


NOW = [  # the programs that newcomers look for
    "A language model: train, evaluate, generate",
    "A layer with ALiBi or a softcap",
    "A decoder with scan, remat, dropout and a cache",
    "Mixed precision: bfloat16 training, float32 weights",
    "From a torch state_dict in memory",
    "Decoding inside flax's nnx.MultiHeadAttention",
]


@pytest.mark.parametrize("title", with_nightly(SECTIONS, commit=NOW))
def test_the_code_of_a_recipe_runs_alone(title, tmp_path, monkeypatch):
    (block,) = blocks(SECTIONS[title])
    if absent := missing(block):
        pytest.skip(f"the recipe needs {', '.join(absent)}, which is not installed")
    monkeypatch.chdir(tmp_path)  # for the files it writes
    monkeypatch.setenv("MPLBACKEND", "agg")
    run(block, title)
    if "matplotlib" in packages(block):
        sys.modules["matplotlib.pyplot"].close("all")
        assert [*tmp_path.glob("*.png")]


@of_all_sections
def test_a_recipe_has_an_assertion_and_a_trap(title):
    (block,) = blocks(SECTIONS[title])
    assert "assert " in block and "**The trap" in SECTIONS[title]


@of_all_sections
def test_ci_installs_what_it_needs(title):
    (block,) = blocks(SECTIONS[title])
    needed = packages(block) - sys.stdlib_module_names - {"flax_attn"}
    assert {BROUGHT.get(package, package) for package in needed} <= _extra("dev")


FAULTS = """
def first(change, **changed):
    model = engine(**changed)
    nnx.update(model, jax.tree.map(change, nnx.state(model)))
    write("fault.json", model, tokens)
    return first_unexplained("fault.json", "folder")


def rounded(x, steps):
    unit = abs(x.astype(jnp.float32)).max(0) / steps
    return ((x / unit).round() * unit).astype(x.dtype) if x.ndim == 2 else x


same = lambda x: x
tokens = jax.random.randint(jax.random.key(SEED), (32,), 0, 97)
assert first(same) is None
assert first(same, sliding_window=9) >= 9
assert first(lambda x: x - 1 if x.ndim == 1 else x) == 1  # norms without their offset
assert first(lambda x: rounded(x, 7)) is not None  # int4
assert first(lambda x: x * (1 + 2**-8)) is None  # a rounding in each weight
"""


@pytest.mark.nightly
def test_the_same_model_is_known_from_faulty_ones(tmp_path, monkeypatch):
    (block,) = blocks(SECTIONS["Is it the same model?"])
    monkeypatch.chdir(tmp_path)
    page = {"__name__": "page"}
    run(block, "the same model", page)
    for seed in (2, 3, 4):
        text = run(FAULTS.replace("SEED", str(seed)), f"seed {seed}", page)
        assert text.count("the text is not explained") == 3


def _extra(name: str) -> set[str]:
    """The packages that an extra installs, with those of the extras it takes in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted, found = [*project["dependencies"], f"flax-attn[{name}]"], set()
    while wanted:
        package, extras = re.match(r"([\w-]+)(?:\[(.*?)\])?", wanted.pop()).groups()
        if package == "flax-attn":
            wanted += [y for x in extras.split(",") for y in project["optional-dependencies"][x]]
        found.add(package)
    return found


@of_all_pages
def test_every_section_is_linked_at_the_top(page):
    titles = sections(TEXTS[page])
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    head, _, _ = TEXTS[page].partition("\n## ")
    assert re.findall(r"\(#(.*?)\)", head) == anchors


def test_no_title_stands_on_two_pages():
    assert len(SECTIONS) == sum(len(sections(text)) for text in TEXTS.values())


@of_all_pages
def test_its_lines_are_no_longer_than_a_screen_is_wide(page):
    text = TEXTS[page]
    assert max(map(len, BLOCK.sub("", text).splitlines())) <= 115
    assert max(len(line) for block in blocks(text) for line in block.splitlines()) <= 100
