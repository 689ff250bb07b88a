"""Selects cases by the command's arguments: names of variants, cases and packages."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ...errors import ParityError
from .collect import Listed, listed, modules, nothing_in, select
from .home import File, file_of
from .known import may_be_package
from .nearest import unknown_name
from .workers import Failure, Workers, attempt


class Selection(NamedTuple):
    """The selected cases.

    Attributes:
      cases: the requested cases.
      known: all cases of their packages.
      failed: modules whose cases could not be listed, by name.
    """

    cases: list[Listed]
    known: list[Listed]
    failed: list[tuple[str, Failure]]


class _Package(NamedTuple):
    """A package's cases, and its modules that could not be imported."""

    cases: list[Listed]
    failed: list[tuple[str, Failure]]


def select_cases(library: str, names: Sequence[str], workers: Workers) -> Selection:
    """The cases selected by `names`, from this library or from other packages with cases.

    Args:
      library: the package of this library's cases.
      names: variants, titles or names of cases, Flax classes, packages, modules and file paths.
      workers: the worker processes that import the modules.

    Raises:
      ValueError: if a name matches nothing.
      ParityError: if this library's own cases cannot be listed.
    """
    mine = workers.call(_cases_of_library, library)
    if isinstance(mine, Failure):
        raise ParityError(f"The cases of {library} cannot be listed: {mine.text}")
    if not names:
        return Selection(mine.cases, mine.cases, mine.failed)
    packages, wanted = _split(mine.cases, names, workers)
    lists = [*(package.cases for package in packages.values()), mine.cases]
    exact = [name for name in wanted if any(select(cases, [name]) for cases in lists)]
    selection: list[Listed] = []
    failed, left = [], list(wanted)
    for cases, failures in packages.values():
        some = [name for name in wanted if select(cases, [name], name not in exact)]
        selection += select(cases, some, loosely=True)
        failed += [] if some else failures  # irrelevant if the names were found elsewhere
        left = [name for name in left if name not in some]
    unknown = [name for name in left if not select(mine.cases, [name], name not in exact)]
    if unknown and not any(package.failed for package in packages.values()):
        raise ValueError(unknown_name(unknown[0], list(packages), lists))
    selection += select(mine.cases, left, loosely=True) if left else []
    if unknown:  # may be defined in a module that could not be imported
        failed = [failure for package in packages.values() for failure in package.failed]
    return Selection(selection, [case for cases in lists for case in cases], failed)


def _split(
    mine: Sequence[Listed], names: Sequence[str], workers: Workers
) -> tuple[dict[str, _Package], list[str]]:
    """Splits names into packages and other names; names of known cases are not packages."""
    packages: dict[str, _Package] = {}
    wanted = []
    for name in dict.fromkeys(names):
        known = [mine, *(package.cases for package in packages.values())]
        package = None
        if not any(select(cases, [name]) for cases in known):
            package = _package(name, workers)
        if package is None:
            wanted.append(name)
        else:
            packages[name] = package
    return packages, wanted


def _cases_of_library(package: str) -> _Package:
    names = modules(package)
    return _read(names, [attempt(listed, (package, name)) for name in names])


def _package(name: str, workers: Workers) -> _Package | None:
    """A package's cases, or None if there is no such package."""
    file = file_of(name)
    if file is not None:
        workers.add_path(str(file.folder))
        names = workers.call(_module_at, file)
    else:
        names = workers.call(_modules_of, name) if may_be_package(name) else None
    if isinstance(names, Failure):
        return _Package([], [(name if file is None else file.module, names)])
    if names is None:
        return None
    package = _read(names, list(workers.map(listed, [(name, module) for module in names])))
    if not package.cases and not package.failed:
        empty = workers.call(_empty_lists, names)
        raise ValueError(nothing_in(name) if isinstance(empty, Failure) or not empty else empty)
    return package


def _modules_of(package: str) -> list[str] | None:
    try:
        return modules(package)
    except ModuleNotFoundError as error:
        if error.name is None or package.startswith(error.name):
            return None
        raise


def _module_at(file: File) -> list[str]:
    """Modules with cases at a file or folder; raises if another module shadows it."""
    spec = find_spec(file.module)
    origin = Path((spec and spec.origin) or "").resolve()
    if origin not in (file.path, file.path / "__init__.py"):
        raise ParityError(
            f"{file.path} cannot be imported: {origin}, which was found first, is a module of the "
            f"same name, {file.module}."
        )
    return modules(file.module)


def _empty_lists(names: Sequence[str]) -> str:
    """Message for modules whose lists `CASES` are empty; "" if none has a list."""
    empty = [name for name in names if hasattr(import_module(name), "CASES")]
    lists = " and ".join(f"{name}.CASES" for name in empty)
    end = "holds no case, so there is nothing to prove."
    return f"{lists} {end}" if empty else ""


def _read(names: Sequence[str], results: Sequence[list[Listed] | Failure]) -> _Package:
    """Splits the results of listing modules into cases and failures."""
    pairs = list(zip(names, results, strict=True))
    cases = [case for _, result in pairs if not isinstance(result, Failure) for case in result]
    return _Package(cases, [(name, r) for name, r in pairs if isinstance(r, Failure)])
