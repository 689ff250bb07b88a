"""Makes the .ipynb of chapters from their .py: `python notebooks/build.py 01 05`, or of all.

Runs each from top to bottom and keeps the outputs. The folded answers of the exercises are run
behind the last cell, and not kept. Names of cells and metadata are the same each time, so that a
diff shows what changed. An error in a cell stops it, and the old file stays. The minutes to read
are counted, and written into the first cell of both files.
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
WORDS_A_MINUTE = 200
SECONDS_A_LINE, SECONDS_A_FIGURE = 2, 10
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def build(path: Path) -> None:
    """Writes the notebook beside `path`."""
    book = jupytext.read(path)
    written = len(book.cells)
    book.cells += [nbformat.v4.new_code_cell(answer) for answer in answers(book)]
    NotebookClient(book, timeout=600, record_timing=False).execute(cwd=str(HERE))
    del book.cells[written:]
    set_minutes(book, path)
    book.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(book.cells):
        cell["id"], cell["metadata"] = f"cell-{number:02d}", {}
        cell.update({"outputs": joined(cell["outputs"])} if "outputs" in cell else {})
    nbformat.write(book, path.with_suffix(".ipynb"))


def answers(book: nbformat.NotebookNode) -> list[str]:
    """The blocks of Python in the text: what the exercises have as answers."""
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


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
    chapters = [path for n in sys.argv[1:] or [""] for path in HERE.glob(f"{n}*_*.py")]
    if not chapters:
        sys.exit(f"no chapter begins with {' or '.join(sys.argv[1:])}")
    for chapter in sorted(chapters):
        print(chapter.stem)
        build(chapter)
