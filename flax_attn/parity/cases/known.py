"""The variants of this library and their classes, read from its files without importing jax."""

import ast
import os
import re
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from .collect import Listed, letters, modules
from .home import LIBRARY, file_of
from .nearest import unknown_name

WORD = re.compile(r"[\w./\\-]+")
LAYERS = LIBRARY / "flax_attn" / "layers"


def check_names(library: str, names: Sequence[str]) -> None:
    """Refuses names that surely mean nothing, before anything slow is imported.

    A name that may be a package, a file or a case's is left to who reads the cases.

    Args:
      library: the package of this library's cases.
      names: what the command is asked for.

    Raises:
      ValueError: if the first of them is no variant, class, case, package or file.
    """
    plain = bool(names) and WORD.fullmatch(names[0])  # else a title, or the name of a case
    if not plain or file_of(names[0]) or may_be_package(names[0]):
        return
    known = _variants()
    words = {letters(word) for case in known for word in (case.variant, case.of)}
    if letters(names[0]) not in words and names[0] not in _strings(library):
        raise ValueError(unknown_name(names[0], [], [known]))


def may_be_package(name: str) -> bool:
    """Whether the outermost package of a dotted name exists; nothing is imported.

    It may stand in the current folder, which is no part of the command's own path.
    """
    pieces = name.split(".")
    try:
        spec = find_spec(pieces[0]) or PathFinder.find_spec(pieces[0], [os.getcwd()])
    except ValueError:  # "__main__"
        return False
    return all(map(str.isidentifier, pieces)) and spec is not None


def _variants() -> list[Listed]:
    """A case in name only for each class of each variant."""
    cases = []
    for path in sorted(LAYERS.glob("[!_]*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                cases.append(Listed("", "", 0, path.stem, "", "", of=node.name))
    return cases


def _strings(package: str) -> set[str]:
    """All texts in the modules that hold a package's cases, and so the names of all cases."""
    constants = set()
    for module in modules(package):
        spec = find_spec(module)
        tree = ast.parse(Path((spec and spec.origin) or "").read_text("utf-8"))
        constants |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return {text for text in constants if isinstance(text, str)}
