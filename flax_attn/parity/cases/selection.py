"""Selects cases by the command's arguments: files and packages, and names of cases."""

import os
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from ..._internal.nearest import did_you_mean
from ...errors import ParityError
from .collect import Listed, listed, modules, nothing_in
from .home import File, file_of, quoted
from .workers import Failure, Workers


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
    """The cases selected by `names`, from this library or from files and packages with cases.

    A name is a path, or the name of a case that is known already, or a package; else a part of a
    title. It selects from the packages that are named too if it is found there, else from this
    library. A package from which no name selects is proven whole.

    Args:
      library: the package of this library's cases.
      names: files, packages and modules; variants, titles, classes and names of cases.
      workers: the worker processes that import the modules; with names, none runs already.

    Raises:
      ValueError: if a name matches nothing, or a file or package has no cases.
    """
    files = {name: file_of(name) for name in dict.fromkeys(names)}
    workers.folders = tuple(str(file.folder) for file in files.values() if file is not None)
    default = _Package([], [])
    if not names or None in files.values():
        default = _read(library, None, workers)
    if not names:
        return Selection(default.cases, default.cases, default.failed)
    packages: dict[str, _Package] = {}
    wanted, empty = [], []
    for name, file in files.items():
        known = [case for package in (default, *packages.values()) for case in package.cases]
        if file is None and (exactly(known, name) or not is_package(name)):
            wanted.append(name)
            continue
        package = _read(name, file, workers)
        if package.cases or package.failed:
            packages[name] = package
        elif file is not None:
            raise ValueError(nothing_in(name))
        else:  # such as a part of a title that is also a module of Python's
            empty.append(name)
            wanted.append(name)
    selected: set[Listed] = set()
    failed, left = [], list(wanted)
    for cases, failures in packages.values():
        matches = {name: some for name in wanted if (some := select(cases, name))}
        selected.update(*(matches.values() if matches else [cases]))
        failed += [] if matches else failures
        left = [name for name in left if name not in matches]
    failures = [failure for package in packages.values() for failure in package.failed]
    for name in left:
        matches = select(default.cases, name)
        selected.update(matches)
        if not matches and failures:
            failed = failures  # it may be in one of them
        elif not matches:
            raise ValueError(
                nothing_in(name) if name in empty else _unknown(name, packages, default)
            )
    known = [case for package in (*packages.values(), default) for case in package.cases]
    known = list(dict.fromkeys(known))
    return Selection([case for case in known if case in selected], known, failed)


def select(cases: Sequence[Listed], name: str) -> list[Listed]:
    """The cases of this name; else those whose title contains it.

    Case, dashes and underscores do not count.
    """
    part = letters(name)
    in_titles = [case for case in cases if part and part in letters(case.title)]
    return exactly(cases, name) or in_titles


def exactly(cases: Sequence[Listed], name: str) -> list[Listed]:
    """The cases with this title; else of this variant, Flax class or name of their own."""
    word = letters(name)
    return [case for case in cases if name == case.title] or [
        case for case in cases if word and word in map(letters, (case.variant, case.of, case.name))
    ]


def letters(name: str) -> str:
    """Normalises a name by removing dashes and underscores and lowering case.

    >>> letters("CausalAttention") == letters("causal-attention") == letters("causal_attention")
    True
    """
    return name.replace("-", "").replace("_", "").lower()


def is_package(name: str) -> bool:
    """Whether the outermost package of a dotted name exists; imports nothing.

    Also looks in the current folder, which is not on the command's own import path.
    """
    pieces = name.split(".")
    try:
        spec = find_spec(pieces[0]) or PathFinder.find_spec(pieces[0], [os.getcwd()])
    except ValueError:  # "__main__"
        return False
    return all(map(str.isidentifier, pieces)) and spec is not None


def _read(name: str, file: File | None, workers: Workers) -> _Package:
    """The cases of a file, or of the package with this name; each module is work of its own."""
    names = workers.call(_modules_of, name) if file is None else workers.call(_modules_at, file)
    if isinstance(names, Failure):
        return _Package([], [(name if file is None else file.module, names)])
    cases, failed = [], []
    results = workers.map(listed, [(name, module) for module in names])
    for module, result in zip(names, results, strict=True):
        if isinstance(result, Failure):
            failed.append((module, result))
        else:
            cases += result
    return _Package(cases, failed)


def _modules_of(package: str) -> list[str]:
    """Modules with cases of a package; none if there is no such package."""
    try:
        return modules(package)
    except ModuleNotFoundError as error:
        if error.name is None or package.startswith(error.name):
            return []
        raise


def _modules_at(file: File) -> list[str]:
    """Modules with cases at a file or folder; raises if another module shadows it."""
    spec = find_spec(file.module)
    origin = Path((spec and spec.origin) or "").resolve()
    if origin not in (file.path, file.path / "__init__.py"):
        raise ParityError(
            f"{file.path} cannot be imported: {origin}, which was found first, is a module of the "
            f"same name, {file.module}."
        )
    return modules(file.module)


def _unknown(name: str, packages: dict[str, _Package], default: _Package) -> str:
    """Error message for a name that matches nothing, with the nearest names."""
    named = [case for package in packages.values() for case in package.cases]
    if "[" in name:
        known = [quoted(case.title) for case in (*named, *default.cases)]
    else:
        known = [fact for case in named for fact in (case.variant, case.of, case.name) if fact]
        known += [case.variant for case in default.cases]
        known += [fact for case in default.cases for fact in (case.of, case.name) if fact]
        known += [path.stem for path in Path.cwd().glob("*.py")]
        known += [path.parent.name for path in Path.cwd().glob("*/__init__.py")]
    text = f"{name!r} is no file, no package with cases, and no name of a case or part of one"
    return f"{text}: {did_you_mean(name, known, 'the names are')}"
