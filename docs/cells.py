"""A notebook's cells as its page shows them: outputs are plain, imports and drawings folded."""

import ast
import builtins
import re
from collections.abc import Iterator

from nbformat import NotebookNode

CODES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")  # of a terminal: colors, movements
UNDONE = re.compile(r"[^\n]*\r(?!\n)")  # what a terminal has overwritten
BAR = re.compile(r"[━╸╺█▏▎▍▌▋▊▉]{2,} ?")
# Whose functions a drawing calls: matplotlib's, numpy's, Python's, and those of the notebooks.
DRAWERS = {"plt", "diagram", "heat", "draw"}
PREPARERS = {"np", "ListedColormap", *vars(builtins)} - {"print"}
READERS = {"items", "keys", "values", "max", "min"}  # methods that look at what is drawn
IMPORTS = {ast.Import, ast.ImportFrom}
NO_DRAWING = (ast.Assert, *IMPORTS, ast.FunctionDef, ast.ClassDef)


def prepare(notebook: NotebookNode) -> None:
    """Cleans the outputs, and marks the cells whose code is to be folded."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    trees = [ast.parse(cell.source) for cell in cells]
    for place, (cell, tree) in enumerate(zip(cells, trees, strict=True)):
        for output in cell.outputs:
            _clean(output)
        if _only_imports(tree):
            cell.metadata["folded"] = "Imports"
        elif _only_draws(tree, trees[place + 1 :]):
            cell.metadata["folded"] = "Drawing"


def _clean(output: NotebookNode) -> None:
    """Leaves the text of what a terminal showed; HTML beside it would repeat the colors."""
    if "text" in output:
        output["text"] = plain(output["text"])
    data = output.get("data", {})
    if "text/plain" in data:
        data["text/plain"] = plain(data["text/plain"])
        data.pop("text/html", None)


def plain(text: str) -> str:
    """A text without codes for a terminal, without what was overwritten, and without bars."""
    return BAR.sub("", UNDONE.sub("", CODES.sub("", text))).rstrip() + "\n"


def _only_imports(tree: ast.Module) -> bool:
    """Whether a cell imports, perhaps under a condition, and at most prints something besides."""
    kinds = {type(node) for node in tree.body}
    calls = {n for node in tree.body if isinstance(node, ast.Expr) for n in _called(node, set())}
    is_plain = kinds <= IMPORTS | {ast.If, ast.Try, ast.Expr} and calls <= {"print"}
    return is_plain and bool(kinds & IMPORTS)


def _only_draws(tree: ast.Module, later: list[ast.Module]) -> bool:
    """Whether a cell does nothing but draw, and makes nothing that a later cell reads."""
    if any(isinstance(node, NO_DRAWING) for node in ast.walk(tree)):
        return False
    made = _stored(tree)
    called = {*_called(tree, DRAWERS | made)}
    is_drawing = bool(called & DRAWERS) and called <= DRAWERS | PREPARERS | made
    return is_drawing and not any(_is_read(name, later) for name in made)


def _called(tree: ast.AST, drawers: set[str]) -> Iterator[str]:
    """The first name of each call, `plt` of `plt.subplots()`, except of those that are drawn."""
    root = _root(tree.func) if isinstance(tree, ast.Call) else None
    if root:
        yield root
    if root not in drawers:
        for node in ast.iter_child_nodes(tree):
            yield from _called(node, drawers)


def _root(called: ast.expr) -> str | None:
    """The name that a call begins with; None for a method that only looks."""
    if isinstance(called, ast.Attribute) and called.attr in READERS:
        return None
    while isinstance(called, ast.Attribute | ast.Call | ast.Subscript):
        called = called.func if isinstance(called, ast.Call) else called.value
    return called.id if isinstance(called, ast.Name) else None


def _stored(tree: ast.AST) -> set[str]:
    """The names that a cell makes, those of arguments included."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return arguments | {node.id for node in names if isinstance(node.ctx, ast.Store)}


def _is_read(name: str, later: list[ast.Module]) -> bool:
    """Whether the next cell that has this name reads it before it makes one of its own."""
    for tree in later:
        uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
        if uses:
            return name not in _stored(tree)
    return False
