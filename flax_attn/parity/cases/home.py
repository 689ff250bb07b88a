"""Where a case was written: the package that holds it, and with it its goldens."""

import sys
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...errors import ParityError

LIBRARY = Path(__file__).resolve().parents[3]


class Home(NamedTuple):
    """The file that holds a case.

    Attributes:
      module: its name where it was imported.
      file: its path, "" where there is none.
      package: what `flax-attn parity` was asked for, "" where it was not asked.
    """

    module: str
    file: str
    package: str = ""

    @property
    def stands(self) -> bool:
        """Whether there is such a file; a notebook's cells have none."""
        return bool(self.file) and Path(self.file).resolve().parent.is_dir()

    @property
    def folder(self) -> Path:
        """The outermost package around the file, or the folder of a file in no package.

        Raises:
          ParityError: if the case stands in no file.
        """
        if not self.stands:
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
        """What the command is asked for, from where one stands."""
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
        """Whether this library's own tests hold the case, and the library its class."""
        from_library = is_from_this_library(flax_class) and self.stands
        return from_library and self.folder == LIBRARY / "parity_tests"


def is_from_this_library(flax_class: type) -> bool:
    """Whether a class is one of this library's."""
    return flax_class.__module__.partition(".")[0] == "flax_attn"


class File(NamedTuple):
    """A file, or the folder of a package, by its path.

    Attributes:
      path: of it.
      folder: where it is imported from.
      module: its name there.
    """

    path: Path
    folder: Path
    module: str


def file_of(name: str) -> File | None:
    """What a path names; None if `name` is no path of a Python file or a package.

    Raises:
      ValueError: if there is no such file, or its name cannot be a module's.
    """
    path = Path(name).resolve()
    if path.name == "__init__.py":
        path = path.parent
    is_file = name.endswith(".py") and path.suffix == ".py"
    if not is_file and not (Path(name).name != name and _is_package(path)):
        return None
    if is_file and not path.is_file():
        similar = get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], 1)
        raise ValueError(
            f"There is no file {name}{f': did you mean {similar[0]}?' if similar else '.'}"
        )
    folder, parts = path.parent, [path.stem if is_file else path.name]
    while _is_package(folder):
        folder, parts = folder.parent, [folder.name, *parts]
    if not all(map(str.isidentifier, parts)):
        raise ValueError(f"{name} cannot be imported: {'.'.join(parts)} is no module's name.")
    return File(path, folder, ".".join(parts))


def caller_of(case: object) -> Home:
    """Where a case under construction is being written."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is case:
        frame = frame.f_back
    facts = frame.f_globals
    return Home(str(facts.get("__name__", "__main__")), str(facts.get("__file__") or ""))


def quoted(text: str) -> str:
    """`text` as one word of a shell's line, in quotes.

    >>> print(quoted("a[b|c]"), quoted("it's"))
    'a[b|c]' 'it'"'"'s'
    """
    return "'" + text.replace("'", "'\"'\"'") + "'"


def has_torch() -> bool:
    """Whether torch can be imported."""
    return find_spec("torch") is not None


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()
