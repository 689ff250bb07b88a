"""Checks from its source whether a file may define `CASES`; importing may have side effects."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

LIST = "CASES"
SIGNS = re.compile(rb"\bCASES\b|import\s*\*|globals\(\)|vars\(\)|locals\(\)")
NAMESPACES = ("globals", "vars", "locals")


def may_have_cases(path: Path) -> bool:
    """Whether a file mentions `CASES`, or star-imports from a file that does.

    Also True if it adds computed names to its `globals()`, or mentions `CASES` and cannot be
    parsed; importing it then decides. Nothing is imported here.
    """
    tree = _tree(path)
    if tree is None:
        return LIST.encode() in path.read_bytes()
    return any(map(_computes_a_name, _outside_functions(tree))) or _has_name(path, frozenset())


def _has_name(path: Path, visited: frozenset[Path]) -> bool:
    """Whether `CASES` occurs in a file, or in a file it star-imports from."""
    tree = _tree(path)
    if tree is None or path in visited:
        return False
    nodes = list(ast.walk(tree))
    stars = (n for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*")
    return any(map(_names_it, nodes)) or any(
        _has_name(file, visited | {path}) for star in stars for file in _files(star, path)
    )


def _tree(path: Path) -> ast.Module | None:
    """Parses a file, empty if it has no relevant names; None if it cannot be parsed."""
    source = path.read_bytes()
    try:
        return ast.parse(source if SIGNS.search(source) else b"")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def _names_it(node: ast.AST) -> bool:
    """Whether a node binds or reads the name `CASES`; reading another object's attribute is not."""
    match node:
        case (
            ast.Name(id="CASES")
            | ast.Constant(value="CASES")
            | ast.alias(name="CASES")
            | ast.alias(asname="CASES")
            | ast.keyword(arg="CASES")
            | ast.Attribute(attr="CASES", ctx=ast.Store())
        ):
            return True
        case ast.Global(names=names):
            return LIST in names
    return False


def _computes_a_name(node: ast.AST) -> bool:
    """Whether a node is `globals()[...] =` with a non-literal key, or `globals().update(...)`."""
    match node:
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id=of), args=[]), slice=key, ctx=ast.Store()
        ):
            return of in NAMESPACES and not isinstance(key, ast.Constant)
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name(id=of), args=[]), attr="update")
        ):
            return of in NAMESPACES
    return False


def _files(star: ast.ImportFrom, path: Path) -> list[Path]:
    """The files of the module that `from module import *` in `path` refers to."""
    parts = star.module.split(".") if star.module else []
    if star.level:
        roots = [path.parents[star.level - 1]] if star.level <= len(path.parents) else []
    else:
        roots = _roots(parts.pop(0))
    places = [root.joinpath(*parts) for root in roots]
    files = [f for place in places for f in (place.with_suffix(".py"), place / "__init__.py")]
    return [file for file in files if file.is_file()]


def _roots(package: str) -> list[Path]:
    """Locations of a top-level package or module."""
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    folders = spec.submodule_search_locations
    return [Path(folder) for folder in folders] if folders else [Path(spec.origin or "")]
