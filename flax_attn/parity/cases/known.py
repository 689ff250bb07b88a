"""The variants of this library and their classes, read from source without importing jax."""

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
    """Rejects names that cannot match anything, before slow imports.

    A name that may be a package, a file or a case is accepted and checked later.

    Args:
      library: the package of this library's cases.
      names: the names passed to the command.

    Raises:
      ValueError: if the first of them is not a variant, class, case, package or file.
    """
    plain = bool(names) and WORD.fullmatch(names[0])  # otherwise a title or a case name
    if not plain or file_of(names[0]) or may_be_package(names[0]):
        return
    known = _variants()
    words = {letters(word) for case in known for word in (case.variant, case.of)}
    if letters(names[0]) not in words and names[0] not in _strings(library):
        raise ValueError(unknown_name(names[0], [], [known]))


def may_be_package(name: str) -> bool:
    """Whether the outermost package of a dotted name exists; imports nothing.

    Also looks in the current folder, which is not on the command's own import path.
    """
    pieces = name.split(".")
    try:
        spec = find_spec(pieces[0]) or PathFinder.find_spec(pieces[0], [os.getcwd()])
    except ValueError:  # "__main__"
        return False
    return all(map(str.isidentifier, pieces)) and spec is not None


def _variants() -> list[Listed]:
    """Placeholder cases with only the variant and class, one per class of each variant."""
    cases = []
    for path in sorted(LAYERS.glob("[!_]*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                cases.append(Listed("", "", 0, path.stem, "", "", of=node.name))
    return cases


def _strings(package: str) -> set[str]:
    """All string constants in the modules of a package's cases; these include all case names."""
    constants = set()
    for module in modules(package):
        spec = find_spec(module)
        tree = ast.parse(Path((spec and spec.origin) or "").read_text("utf-8"))
        constants |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    return {text for text in constants if isinstance(text, str)}
