"""Imports run without circles: no module of ours leads to itself, by whatever kind of import.

An arrow is every import statement, inside functions and for type checkers too. `from p import x` is
one to `p.x` where that is a module, else to `p` itself.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from parity_tests.tables import each

ROOT = Path(__file__).parents[2]
PACKAGES = ("flax_attn", "torch_ref")
# The one arrow up: a report writes its own page.
LATE = ("flax_attn.parity.report", "flax_attn.parity.show")

Graph = Mapping[str, set[str]]


def modules(root: Path, package: str) -> dict[str, Path]:
    paths = sorted((root / package).rglob("*.py"))
    names = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def arrows(name: str, path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join(filter(None, [*above, node.module]))
            full = [f"{base}.{alias.name}" for alias in node.names]
            yield from (one if one in known else base for one in full)


def graph(root: Path, package: str) -> dict[str, set[str]]:
    known = modules(root, package)
    return {m: ({*arrows(m, path, known)} & known.keys()) - {m} for m, path in known.items()}


def reached(arrows: Graph, start: str) -> set[str]:
    """Everything that a module leads to."""
    found, left = set(), [start]
    while left:
        for there in arrows[left.pop()] - found:
            found.add(there)
            left.append(there)
    return found


def circles(arrows: Graph) -> set[str]:
    """Modules that lead to themselves."""
    return {name for name in arrows if name in reached(arrows, name)}


def without(arrows: Graph, *gone: tuple[str, str]) -> Graph:
    return {name: there - {b for a, b in gone if a == name} for name, there in arrows.items()}


@each("package", PACKAGES)
def test_no_module_leads_to_itself(package):
    assert circles(without(graph(ROOT, package), LATE)) == set()


def test_the_one_exception_is_there_and_is_needed():
    arrows = graph(ROOT, "flax_attn")
    assert LATE[1] in arrows[LATE[0]] and LATE[0] in reached(arrows, LATE[1])


FILES = {
    "p/__init__.py": "from .a import x",
    "p/a.py": "from . import b, nothing",
    "p/b.py": "def f():\n    from .c import d\n",
    "p/c/__init__.py": "if TYPE_CHECKING:\n    from ..a import y\n",
    "p/c/d.py": "import p.c\nfrom .. import e\n",
    "p/e.py": "import os, numpy",
}


def test_circles_are_seen_through_packages_and_late_imports(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = graph(tmp_path, "p")
    assert found == {
        "p": {"p.a"},
        "p.a": {"p.b", "p"},
        "p.b": {"p.c.d"},
        "p.c": {"p.a"},
        "p.c.d": {"p.c", "p.e"},
        "p.e": set(),
    }
    assert circles(found) == found.keys() - {"p.e"}
    assert circles(without(found, ("p.c", "p.a"), ("p.a", "p"))) == set()
