"""Where a case was written: the package that holds it, and with it its goldens."""

import sys
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
    def folder(self) -> Path:
        """The outermost package around the file, or the folder of a file in no package.

        Raises:
          ParityError: if the case stands in no file.
        """
        here = Path(self.file).resolve().parent
        if not self.file or not here.is_dir():
            raise ParityError(
                f"Cases of {self.module} stand in no file, so that they have no folder for "
                "goldens: write their list CASES into a module."
            )
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
        if flax_class.__module__.partition(".")[0] != "flax_attn" or not self.file:
            return False
        return self.folder == LIBRARY / "parity_tests"


def caller_of(case: object) -> Home:
    """Where a case under construction is being written."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_locals.get("self") is case:
        frame = frame.f_back
    facts = frame.f_globals
    return Home(str(facts.get("__name__", "__main__")), str(facts.get("__file__") or ""))


def _is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()
