"""The import hook that marks the modules of flax_attn, in the process of the tests and in children.

Nothing but the standard library is imported, so that a child of a test starts no more slowly. A
child is reached by a `sitecustomize` on its PYTHONPATH, and adds the marks that it enters to a
file.
"""

import ast
import builtins
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

from .marks import NAME, mark

ROOT = Path(__file__).parents[3]
PACKAGE = "flax_attn"
VARIABLE = "FLAX_ATTN_ENTERED"  # of the environment: the file that children add to
SITE = f"from {__name__} import follow\n\nfollow()\n"


def install(enter: Callable[[str], None]) -> None:
    """Marks all modules of flax_attn that are imported from here on; `enter` hears every mark."""
    setattr(builtins, NAME, enter)
    if not isinstance(sys.meta_path, Finders):
        sys.meta_path = Finders([Finder(), *sys.meta_path])


def tell_children(folder: Path) -> Path:
    """Lets every process that this one starts add its marks to a file in the folder."""
    file, path = folder / "entered", os.environ.get("PYTHONPATH", "")
    if os.environ.get(VARIABLE) != str(file):
        (folder / "sitecustomize.py").write_text(SITE, "utf-8")
        file.touch()
        os.environ[VARIABLE] = str(file)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), str(ROOT), path)))
    return file


def follow() -> None:
    """Adds each mark that this process enters, once, to the file that the environment names."""
    entered: set[str] = set()
    file = Path(os.environ[VARIABLE])

    def enter(name: str) -> None:
        if name not in entered:
            entered.add(name)
            append(file, name)

    install(enter)


def append(file: Path, line: str) -> None:
    """Adds a line in one write, so that lines of several processes are never mixed."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


class Finders(list):
    """`sys.meta_path` with an entry that stays first, before pytest's, which rewrites plugins."""

    def insert(self, index: Any, finder: Any) -> None:
        super().insert(max(int(index), 1), finder)


class Loader(SourceFileLoader):
    """Loads a module with a mark at the head of every block."""

    def get_code(self, fullname: str) -> Any:
        path = Path(self.get_filename(fullname))
        tree = ast.parse(path.read_text("utf-8"), path)
        mark(tree, path.relative_to(ROOT).as_posix())
        return compile(tree, path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules of flax_attn in this checkout, and no other."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        origin = Path(spec.origin or "") if spec else Path()
        if spec is None or origin.suffix != ".py" or not origin.is_relative_to(ROOT):
            return None
        spec.loader = Loader(fullname, str(origin))
        return spec
