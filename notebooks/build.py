"""Makes the .ipynb of chapters from their .py: `python notebooks/build.py 01 positions`, or of all.

Runs each from top to bottom and keeps the outputs. The folded answers are run where they stand, and
are not kept: neither their outputs nor the names that they set. Names of cells and metadata are the
same each time, so that a diff shows what changed. An error in a cell stops it, and the old file
stays. The minutes to read are counted, and written into the first cell of both files. One picture
of each chapter is copied for docs/course.md; `python notebooks/build.py --pictures` copies all of
them and runs nothing.
"""

import base64
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
PICTURES = HERE.parent / "docs" / "course"
WORDS_A_MINUTE = 200
SECONDS_A_LINE, SECONDS_A_FIGURE = 2, 10
# All chapters in the order in which they are read, each with a part of the code, mostly the title,
# of the cell whose picture stands on docs/course.md.
TITLES = {
    "00": "after 1,000 steps",
    "01": "weights, T x T",
    "02": "Variance of the scores",
    "03": "weights: the mean of the past",
    "04": "Two heads group the same six words in two ways",
    "positions": "on the clocks of a head",
    "05": "additive (Bahdanau)",
    "06": 'label="held-out text"',
    "07": "scores of the first sentence",
    "08": "measured, four heads",
    "09": "Shared heads and latents keep less",
    "10": "In a long text the next token is cheaper",
    "11": "A sum mixes up names when there are many",
    "12": "Keys and values on each device",
}
# Runs the code of an answer, and takes back what it named.
RUN = """
def _run(code, names):
    before = {{**names}}
    exec(code, names)
    names.clear()
    names.update(before)

_run({!r}, globals())
"""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def build(path: Path) -> None:
    """Writes the notebook beside `path`."""
    book = jupytext.read(path)
    written = book.cells
    book.cells = [part for cell in written for part in (cell, *answers(cell))]
    NotebookClient(book, timeout=600, record_timing=False).execute(cwd=str(HERE))
    book.cells = written
    set_minutes(book, path)
    book.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(book.cells):
        cell["id"], cell["metadata"] = f"cell-{number:02d}", {}
        cell.update({"outputs": joined(cell["outputs"])} if "outputs" in cell else {})
    count(book)
    nbformat.write(book, path.with_suffix(".ipynb"))
    save_picture(path)


def answers(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """A cell that runs the blocks of Python in a text, if it has any."""
    blocks = re.findall(r"```python\n(.*?)```", cell.source, re.DOTALL)
    if cell.cell_type != "markdown" or not blocks:
        return []
    return [nbformat.v4.new_code_cell(RUN.format("\n".join(blocks)))]


def count(book: nbformat.NotebookNode) -> None:
    """Numbers the cells of code, as if no answers had run between them."""
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        for part in (cell, *cell.outputs):
            part.update({"execution_count": number} if "execution_count" in part else {})


def picture(path: Path) -> bytes:
    """The chapter's picture on docs/course.md: the output of the cell that has its title."""
    book, title = nbformat.read(path.with_suffix(".ipynb"), 4), TITLES[path.stem.split("_")[0]]
    (cell,) = [c for c in book.cells if c.cell_type == "code" and title in c.source]
    (drawn,) = [out.data["image/png"] for out in cell.outputs if "image/png" in out.get("data", {})]
    return base64.b64decode(drawn)


def save_picture(path: Path) -> None:
    """Copies the chapter's picture to where docs/course.md shows it."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / f"{path.stem}.png").write_bytes(picture(path))


def reading_minutes(book: nbformat.NotebookNode) -> int:
    """200 words of text a minute, 2 seconds a line of code and 10 a picture; no folded answers."""
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    words = re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL).split()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    lines = [line for cell in code for line in cell.source.splitlines() if line.strip()]
    figures = sum("image/png" in out.get("data", {}) for cell in code for out in cell.outputs)
    seconds = SECONDS_A_LINE * len(lines) + SECONDS_A_FIGURE * figures
    return round(len(words) / WORDS_A_MINUTE + seconds / 60)


def set_minutes(book: nbformat.NotebookNode, path: Path) -> None:
    """Writes the minutes to read into the first cell, and into the .py."""
    minutes = f"*{reading_minutes(book)} minutes to read"
    old = re.compile(r"\*\d+ minutes to read")
    book.cells[0].source = old.sub(minutes, book.cells[0].source, count=1)
    path.write_text(old.sub(minutes, path.read_text("utf-8"), count=1), "utf-8")


def joined(outputs: list) -> list:
    """The outputs, with what one stream printed in pieces as one."""
    found = []
    for output in outputs:
        last = found[-1] if found else {}
        if output.get("name") == last.get("name") is not None:
            last["text"] += output["text"]
        else:
            found.append(output)
    return found


if __name__ == "__main__":
    asked = [word for word in sys.argv[1:] if word != "--pictures"]
    chapters = [path for name in TITLES for path in HERE.glob(f"{name}*.py")]
    chapters = [path for path in chapters if path.stem.startswith((*asked,) or "")]
    if not chapters:
        sys.exit(f"no chapter begins with {' or '.join(asked)}")
    for chapter in chapters:
        print(chapter.stem)
        (save_picture if "--pictures" in sys.argv else build)(chapter)
