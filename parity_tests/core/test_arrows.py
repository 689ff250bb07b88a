"""Imports run one way, folder by folder, and without circles: no module leads to itself.

An arrow is every import statement, inside functions and for type checkers too. `from p import x` is
one to `p.x` where that is a module, else to `p` itself.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from parity_tests.core.sources import imports, ours
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
def test_no_module_imports_itself_through_others(package):
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


def test_import_cycles_are_found_through_packages_and_late_imports(tmp_path):
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


# The folders and the files of the root, floor by floor: each may import what stands below it.
FLOORS = """
_internal
< errors, taps, quantized
< places, token_layouts
< masks, positions, norms, normalisers, dropout, where
< scores
< rules
< reference
< backends
< sharding
< recurrence, attend
< by_weights, drop_in, cache
< layers
< families
< bench
< device_check
< identify
< command
"""
# What stands beside the floors: what it may import, and who may import it.
ASIDE = {
    "weights": {"_internal", "errors", "taps"},
    "parity": {"_internal", "errors", "taps", "weights"},
}
KNOW = {
    "weights": {"bench", "families", "identify"},
    "parity": {"bench", "command", "device_check", "identify"},
}
# The front of a folder that names, for its users, what stands above it.
FRONTS = {("parity", "__init__"): "identify"}
IN_ROOT = """
attend by_weights reference rules where scores dropout normalisers norms places token_layouts
quantized taps errors __init__ __main__"""


def may_import() -> dict[str, set[str]]:
    """By folder or file of the root, what it may import."""
    table, below = {**ASIDE, "__main__": {"command"}}, set()
    for floor in FLOORS.split("<"):
        names = {name.strip() for name in floor.split(",")}
        for name in names:
            table[name] = below | {aside for aside, who in KNOW.items() if name in who}
        below = below | names
    return {**table, "__init__": below - {"command", "bench", "device_check", "identify"}}


TABLE = may_import()


@each("path", sorted((ROOT / "flax_attn").rglob("*.py")))
def test_a_folder_imports_what_stands_below_it(path):
    part = path.relative_to(ROOT / "flax_attn").with_suffix("").parts
    outside = {name.split(".")[0] for name in imports(path)} & {"torch_ref", "parity_tests"}
    assert not outside, f"The library does not know {outside}."
    assert part[0] in TABLE, f"{part[0]} has no floor in FLOORS above: say what it may import."
    allowed = TABLE[part[0]] | ({part[0]} if len(part) > 1 else set())
    for name, of in ours(path):
        if FRONTS.get(part) == of:
            continue
        assert of in allowed, f"imports {name}, which stands above it or aside."
        if part[0] == of == "backends" and part[-1] != "__init__":
            known = ([], ["protocol"], ["hoist"], ["sinks"], [part[1]])
            assert name.split(".")[2:3] in known, f"imports {name}: another backend."


def test_the_root_holds_what_a_reader_calls():
    assert {path.stem for path in (ROOT / "flax_attn").glob("*.py")} == {*IN_ROOT.split()}
