"""The notebooks: both halves of a pair alike, run through, and written on the public surface alone.

`pytest --nbmake notebooks` runs them.
"""

import ast
import json
import re
import runpy
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import flax_attn
from flax_attn import parity, recurrence, sharding, taps

FOLDER = Path(__file__).parents[3] / "notebooks"
if not FOLDER.is_dir():
    pytest.skip("the notebooks are not part of an installed wheel", allow_module_level=True)
jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")

CHAPTERS = sorted(FOLDER.glob("*.ipynb"))
PUBLIC = {
    "flax_attn": flax_attn.__all__,
    "flax_attn.parity": parity.__all__,
    "flax_attn.recurrence": vars(recurrence),
    "flax_attn.sharding": sharding.__all__,
    "flax_attn.taps": vars(taps),
}
of_all_chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)


EXPLAINED = [path for path in CHAPTERS if path.stem[:2] in ("00", "01", "02", "03", "04", "po")]


def cells(path):
    book = jupytext.read(path)
    return [(cell.cell_type, cell.source.strip()) for cell in book.cells]


def outputs(path):
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        yield from ((cell, out) for out in cell.get("outputs", ()))


def test_every_chapter_has_both_halves():
    names = {path.stem for path in CHAPTERS}
    assert names == {p.stem for p in FOLDER.glob("*.py")} - {"build", "climb", "conftest"}


@pytest.mark.nightly
@of_all_chapters
def test_both_halves_say_the_same(path):
    assert cells(path) == cells(path.with_suffix(".py"))


@of_all_chapters
def test_notebooks_were_run_from_top_to_bottom(path):
    book = json.loads(path.read_text("utf-8"))
    ran = [cell["execution_count"] for cell in book["cells"] if cell["cell_type"] == "code"]
    assert ran == list(range(1, len(ran) + 1))
    kinds = {out["output_type"] for _, out in outputs(path)}
    assert "error" not in kinds and "display_data" in kinds
    assert not any(out.get("name") == "stderr" for _, out in outputs(path))


@pytest.mark.nightly
@of_all_chapters
def test_notebooks_import_public_names_only(path):
    code = "\n\n".join(source for kind, source in cells(path) if kind == "code")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names if alias.name.startswith("flax_attn")}
            assert names <= {*PUBLIC}, f"{names} are not all public."
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flax_attn"):
            assert node.module in PUBLIC, f"{node.module} is not public."
            for alias in node.names:
                assert alias.name in PUBLIC[node.module] and not alias.name.startswith("_")
    assert not re.search(r"/(home|root|tmp|work)/", path.read_text("utf-8"))


@of_all_chapters
def test_notebooks_have_several_assertions(path):
    code = "\n".join(source for kind, source in cells(path) if kind == "code")
    assert len(re.findall(r"^\s*(assert |np\.testing\.assert_)", code, re.MULTILINE)) > 5


@of_all_chapters
def test_links_of_notebooks_exist(path):
    text = "\n".join(source for kind, source in cells(path) if kind == "markdown")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    inside = re.findall(r"\]\(#(.*?)\)", text)
    assert {*inside} <= {heading.replace(" ", "-") for heading in headings}
    for file in re.findall(r"\]\((?!http)([^#)]+)\)", text):
        assert (FOLDER / file).exists(), file


@of_all_chapters
def test_a_cell_is_one_idea(path):
    lengths = [len(source.splitlines()) for kind, source in cells(path) if kind == "code"]
    assert median(lengths) <= 6 and max(lengths) <= 30


@of_all_chapters
def test_the_minutes_to_read_are_counted(path):
    book = jupytext.read(path)
    minutes = runpy.run_path(str(FOLDER / "build.py"))["reading_minutes"](book)
    assert f"*{minutes} minutes to read, " in book.cells[0].source, f"now {minutes} minutes"


@of_all_chapters
def test_notebooks_begin_with_text_and_a_picture(path):
    """The idea, then at most one short cell of imports, and the first cell that draws."""
    book = jupytext.read(path)
    first, second = [cell for cell in book.cells if cell.cell_type == "code"][:2]
    assert book.cells[0].cell_type == "markdown"
    assert len(first.source.splitlines()) <= 7 and "import" in first.source
    assert any("image/png" in out.get("data", {}) for out in second.outputs)


@of_all_chapters
def test_the_helpers_come_after_the_first_idea(path):
    """What climb.py brings is imported when the first picture and its text have shown the idea."""
    before = []
    for kind, source in cells(path):
        if kind == "code" and re.search(r"^(from|import) climb\b", source, re.MULTILINE):
            break
        before.append((kind, source))
    assert [kind for kind, _ in before[:4]] == ["markdown", "code", "code", "markdown"]
    assert len(before) < len(cells(path))
    text = [source for kind, source in before if kind == "markdown"]
    assert "climb" in text[-1], "The text before it says what it is for."


def test_a_new_name_is_explained_where_it_first_comes():
    """Names of jax, nnx and optax that numpy has not; in the text of that cell or before it."""
    text = ""
    for path in EXPLAINED:
        for kind, source in cells(path):
            if kind == "markdown":
                text += source
                continue
            for home, name in re.findall(r"\b(jax|jnp|nnx|optax)((?:\.\w+)+)", source):
                if (home == "jnp" and hasattr(np, name.split(".")[1])) or name == ".numpy":
                    continue
                assert f"{home}{name}" in text, f"{path.stem} uses {home}{name} without a word."
