"""Every name of this library in a page or a notebook is one, in code and in sentences."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

from parity_tests.core.pages.pages import ROOT, blocks
from parity_tests.tables import each

LIBRARY = "flax_attn"
WRITTEN = re.compile(rf"(?<![\w./-]){LIBRARY}(?:\.[A-Za-z_]\w*)+")
PAGES = sorted({*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"})
CHAPTERS = sorted((ROOT / "notebooks").glob("*.py"))


def names_of(path: Path) -> Iterator[str]:
    """Dotted names, by what is written in sentences and by what code imports and asks for."""
    text = path.read_text("utf-8")
    for name in WRITTEN.findall(text):
        if not name.endswith((".py", ".npz")):
            yield name
    for code in [text] if path.suffix == ".py" else blocks(text):
        yield from names_in(code)


def names_in(code: str) -> Iterator[str]:
    """The names that a program has from this library."""
    tree, known = ast.parse(code), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.split(".")[0] == LIBRARY]
            yield from (alias.name for alias in ours)
            known |= {alias.asname or LIBRARY: alias.asname and alias.name for alias in ours}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in known:
                yield f"{known[node.value.id] or LIBRARY}.{node.attr}"


def is_there(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@each("path", [*PAGES, *CHAPTERS])
def test_every_name_in_it_is_there(path):
    gone = sorted({name for name in names_of(path) if not is_there(name)})
    assert not gone, f"{path.name} speaks of {', '.join(gone)}, which flax_attn does not have."


def test_names_are_read_wherever_they_stand():
    code = "import flax_attn as fa, flax_attn.parity\nfrom flax_attn.weights import Rule\n"
    code += "fa.attend(flax_attn.Window)"
    assert {*names_in(code)} == {
        *("flax_attn", "flax_attn.parity", "flax_attn.weights.Rule"),
        *("flax_attn.attend", "flax_attn.Window"),
    }
    assert WRITTEN.findall("`flax_attn.families.attention`, flax_attn/x.py, my.flax_attn.y") == [
        "flax_attn.families.attention"
    ]
    assert is_there("flax_attn.parity.Case.check") and is_there("flax_attn.layers.luong")
    assert not is_there("flax_attn.atend") and not is_there("flax_attn.parity.Case.chek")
