"""Makes the .ipynb of chapters from their .py: `python notebooks/build.py 01 05`, or of all.

Runs each from top to bottom and keeps the outputs. The folded answers of the exercises are run
behind the last cell, and not kept. Names of cells and metadata are the same each time, so that a
diff shows what changed. An error in a cell stops it, and the old file stays.
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def build(path: Path) -> None:
    """Writes the notebook beside `path`."""
    book = jupytext.read(path)
    written = len(book.cells)
    book.cells += [nbformat.v4.new_code_cell(answer) for answer in answers(book)]
    NotebookClient(book, timeout=600, record_timing=False).execute(cwd=str(HERE))
    del book.cells[written:]
    book.metadata = {"kernelspec": KERNEL}
    for number, cell in enumerate(book.cells):
        cell["id"], cell["metadata"] = f"cell-{number:02d}", {}
        cell.update({"outputs": joined(cell["outputs"])} if "outputs" in cell else {})
    nbformat.write(book, path.with_suffix(".ipynb"))


def answers(book: nbformat.NotebookNode) -> list[str]:
    """The blocks of Python in the text: what the exercises have as answers."""
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


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
