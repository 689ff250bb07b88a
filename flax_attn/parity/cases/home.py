"""Locates the package in which a case is defined, and with it its goldens."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ..._internal.nearest import did_you_mean
from ...errors import ParityError

LIBRARY = Path(__file__).resolve().parents[3]
OWN = "parity_tests"  # the package of this library's cases


class Home(NamedTuple):
    """The file that defines a case.

    Attributes:
      module: its name when imported.
      file: its path, "" if there is none.
      package: the package passed to `flax-attn parity`, "" if none.
    """

    module: str
    file: str
    package: str = ""

    @property
    def in_file(self) -> bool:
        """Whether the file exists; notebook cells have none."""
        return bool(self.file) and Path(self.file).resolve().parent.is_dir()

    @property
    def folder(self) -> Path:
        """The outermost package around the file, or the folder of a file outside packages.

        Raises:
          ParityError: if the case is not defined in a file.
        """
        if not self.in_file:
            raise ParityError(
                f"Cases of {self.module} stand in no file, so that they have no folder for "
                "goldens: write their list CASES into a module."
            )
        here = Path(self.file).resolve().parent
        while _is_package(here) and _is_package(here.parent):
            here = here.parent
        return here

    @property
    def name(self) -> str:
        """The name to pass to the command, relative to the current folder."""
        path = Path(self.file).resolve()
        if self.package or not self.file:
            return self.package or self.module
        if _is_package(path.parent):
            return self.folder.name
        try:
            parts = path.relative_to(Path.cwd()).with_suffix("").parts
        except ValueError:
            return self.module
        return ".".join(parts) if all(map(str.isidentifier, parts)) else self.module

    def is_own(self, flax_class: type) -> bool:
        """Whether the case is one of this library's own tests of one of its own classes."""
        from_library = is_from_this_library(flax_class) and self.in_file
        return from_library and self.folder == LIBRARY / OWN


def is_from_this_library(flax_class: type) -> bool:
    """Whether a class is defined in this library."""
    return flax_class.__module__.partition(".")[0] == "flax_attn"


class File(NamedTuple):
    """A Python file, or the folder of a package.

    Attributes:
      path: its path.
      folder: the folder to import it from.
      module: its module name there.
    """

    path: Path
    folder: Path
    module: str


def file_of(name: str) -> File | None:
    """The file or package at a path; None if `name` is not a path of either.

    Raises:
      ValueError: if the file does not exist, or its name is not a valid module name.
    """
    path = Path(name).resolve()
    if path.name == "__init__.py":
        path = path.parent
    is_file = name.endswith(".py") and path.suffix == ".py"
    if not is_file and not (Path(name).name != name and _is_package(path)):
        return None
    if is_file and not path.is_file():
        others = [file.name for file in path.parent.glob("*.py")] or ["no file of Python"]
        raise ValueError(f"There is no file {name}: {did_you_mean(path.name, others, 'there is')}")
    folder, parts = path.parent, [path.stem if is_file else path.name]
    while _is_package(folder):
        folder, parts = folder.parent, [folder.name, *parts]
    if not all(map(str.isidentifier, parts)):
        raise ValueError(f"{name} cannot be imported: {'.'.join(parts)} is no module's name.")
    return File(path, folder, ".".join(parts))


def caller_of(case: object) -> Home:
    """The module that is constructing `case`, found by walking up the stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is case:
        frame = frame.f_back
    facts = frame.f_globals
    return Home(str(facts.get("__name__", "__main__")), str(facts.get("__file__") or ""))


def quoted(text: str) -> str:
    """Quotes `text` for a shell, always with quotes.

    >>> print(quoted("a[b|c]"), quoted("it's"))
    'a[b|c]' 'it'"'"'s'
    """
    return "'" + text.replace("'", "'\"'\"'") + "'"


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()
