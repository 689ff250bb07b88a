"""Imports cases: the lists `CASES` of the modules of a package."""

import re
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ParityError
from .home import Home

if TYPE_CHECKING:  # importing Case imports jax, which listing names does not need
    from .case import Case

# A line of a file that is imported with its package: it begins with CASES, or imports it.
LINE = re.compile(rb"^\s*(CASES\b|from\b.*\bimport\b.*\bCASES\b)", re.MULTILINE)


class Listed(NamedTuple):
    """The position of a case, with the facts available without importing its module.

    Attributes:
      package, module, at: the package, the module with the list `CASES`, and the index in it.
      variant, reference, title: of the case; the title is `str(case)`.
      name: the name passed to the case, or "".
      of: name of its Flax class.
    """

    package: str
    module: str
    at: int
    variant: str
    reference: str
    title: str
    name: str = ""
    of: str = ""


def collect(package: str) -> "list[Case]":
    """The cases of a package or module, ordered by module name.

    Raises:
      ModuleNotFoundError: if there is no such package.
      ValueError: if it has no cases, or a list contains anything else.
      ParityError: if two cases of a list have the same name.
    """
    cases = [
        case
        for name in modules(package)
        for case in cases_in(package, name)
        if case.home.module == name
    ]
    if not cases:
        raise ValueError(nothing_in(package))
    return cases


def modules(package: str) -> list[str]:
    """Names of a package's modules with a line for `CASES`; a module's own name.

    Raises:
      ModuleNotFoundError: if there is no such package.
    """
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"There is no package {package!r} to take cases from.")
    if spec.submodule_search_locations is None:
        return [package]
    names = []
    for root in spec.submodule_search_locations:
        for path in sorted(Path(root).rglob("*.py")):
            if LINE.search(path.read_bytes()):
                inside = path.relative_to(root).with_suffix("").parts
                names.append(".".join((package, *(part for part in inside if part != "__init__"))))
    return names


def cases_in(package: str, module: str) -> "list[Case]":
    """The list of one module, empty if it has none; `package` is the one that was requested.

    A case that occurs in several lists belongs to the module that created it, if that one lists it,
    else to the module that was read first.

    Raises:
      ValueError: if the list contains anything but cases.
      ParityError: if two cases have the same name.
    """
    from .case import Case

    imported = import_module(module)
    cases = getattr(imported, "CASES", [])
    if not isinstance(cases, list | tuple) or not all(isinstance(case, Case) for case in cases):
        raise ValueError(f"{module}.CASES must be a list of flax_attn.parity.Case objects only.")
    for case in cases:
        if case.home.package != package:
            creator = sys.modules.get(case.home.module)
            lists_it = any(case is other for other in getattr(creator, "CASES", ()))
            inside = case.home.module.startswith(f"{package}.")
            home = creator if creator is not None and lists_it and inside else imported
            case.home = Home(home.__name__, getattr(home, "__file__", None) or "", package)
    titles = [str(case) for case in cases]
    for case, title in zip(cases, titles, strict=True):
        case.tells_class = case.tells_class or titles.count(title) > 1
    for title, count in Counter(map(str, cases)).items():
        if count > 1:
            raise ParityError(
                f"{module}.CASES holds {count} cases with one name, {title}: give each a name of "
                "its own, Case(name=...)."
            )
    return list(cases)


def listed(place: tuple[str, str]) -> list[Listed]:
    """Describes the cases of one module; `place` is its package and its name."""
    package, module = place
    entries = []
    for at, case in enumerate(cases_in(package, module)):
        if case.home.module == module:
            facts = case.variant, case.proven_equal_to, str(case), case.name
            entries.append(Listed(package, module, at, *facts, case.flax_class.__name__))
    return entries


def nothing_in(package: str) -> str:
    """Error message for a file or a package without cases."""
    return (
        f"{package} holds no case: it has no list CASES of flax_attn.parity.Case, or an empty one. "
        "For one torch module without cases, flax_attn.parity has compare and record."
    )
