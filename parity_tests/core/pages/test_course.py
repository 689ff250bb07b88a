"""docs/course.md: a line, a picture and hours for each chapter; and every task has an answer."""

import re
import runpy
from pathlib import Path

import pytest

from parity_tests.core.pages.pages import ROOT, text_of

PAGE = text_of("docs/course.md")
FOLDER = ROOT / "notebooks"
BUILD = str(FOLDER / "build.py")
if not FOLDER.is_dir():
    pytest.skip("the notebooks are not part of an installed wheel", allow_module_level=True)
jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")

CHAPTERS = sorted(path.with_suffix(".py") for path in FOLDER.glob("*.ipynb"))
of_all_chapters = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
TASK = re.compile(r"^> \*\*Try it\.\*\*.*\n(?:> .*\n)*", re.MULTILINE)
ANSWER = re.compile(r"\n<details>\s*<summary>Answer</summary>\n\n(.*?)</details>", re.DOTALL)


def text_in(path: Path) -> str:
    """What a chapter says in words."""
    cells = jupytext.read(path).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def minutes(path: Path) -> int:
    """The minutes to read that the chapter states."""
    return int(re.search(r"\*(\d+) minutes to read", text_in(path))[1])


def rows() -> dict[str, list[str]]:
    """The table of hours, by name of chapter."""
    table = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| [")]
    return {re.search(r"notebooks/(\w+)", cells[0])[1]: cells[1:] for cells in table}


@pytest.mark.nightly
@of_all_chapters
def test_every_task_has_an_answer(path):
    text = text_in(path)
    tasks = list(TASK.finditer(text))
    assert len(tasks) == text.count("**Try it.**") > 1
    for task in tasks:
        answer = ANSWER.match(text, task.end())
        assert answer, f"{task[0]} has no answer."
        words = re.sub(r"```python\n.*?```", "", answer[1], flags=re.DOTALL).split()
        assert "```python" in answer[1] and len(words) > 5, f"{task[0]} has a thin answer."


@pytest.mark.nightly
@of_all_chapters
def test_every_exercise_has_an_answer(path):
    exercises = re.split(r"^\*\*\d\.\*\* ", text_in(path), flags=re.MULTILINE)[1:]
    assert len(exercises) > 1
    assert all("```python" in x.partition("<summary>Answer</summary>")[2] for x in exercises)


@pytest.mark.nightly
@of_all_chapters
def test_its_section_has_a_link_and_the_picture_of_the_chapter(path):
    title = jupytext.read(path).cells[0].source.splitlines()[0].lstrip("# ")
    section = PAGE.partition(f"### [{title}](../notebooks/{path.stem}.ipynb)\n")[2]
    drawn = re.search(rf"!\[([^]]+)\]\(course/{path.stem}\.png\)", section.partition("\n### ")[0])
    assert drawn and len(drawn[1].split()) > 4
    said = section[: drawn.start()].split()
    assert 10 < len(said) < 60


@of_all_chapters
def test_a_picture_is_the_chapters_output_and_is_small(path):
    saved = (ROOT / f"docs/course/{path.stem}.png").read_bytes()
    assert saved == runpy.run_path(BUILD)["picture"](path), "build.py --pictures copies it again."
    assert saved.startswith(b"\x89PNG") and len(saved) < 60_000


def test_no_other_picture_lies_there():
    assert {p.stem for p in (ROOT / "docs/course").iterdir()} == {p.stem for p in CHAPTERS}


@pytest.mark.nightly
def test_the_hours_are_those_of_the_chapters_and_add_up():
    table = rows()
    assert [name.split("_")[0] for name in table] == [*runpy.run_path(BUILD)["TITLES"]]
    for path in CHAPTERS:
        read, work, *_ = table[path.stem]
        assert read == f"{minutes(path)} min", f"{path.stem} takes {minutes(path)} minutes to read"
        assert minutes(path) < int(work.removesuffix(" min"))
    total = sum(int(work.removesuffix(" min")) for _, work, *_ in table.values())
    (hours,) = re.findall(r"about \*\*(\d+) hours\*\*", PAGE)
    assert abs(total / 60 - int(hours)) <= 0.5, f"{total} minutes"
    assert f"takes {sum(map(minutes, CHAPTERS))} minutes" in PAGE


def test_its_lines_fit_on_a_screen():
    assert max(len(line) for line in PAGE.splitlines() if not line.startswith(("|", "!"))) <= 115
