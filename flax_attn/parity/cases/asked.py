"""What the command is asked for: cases, by the names of variants, cases and packages."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

from .collect import Listed, listed, modules, nothing_in, select
from .workers import Failure, Workers, attempt


class Asked(NamedTuple):
    """What was found.

    Attributes:
      cases: those that are asked for.
      known: all of their packages.
      failed: modules whose cases could not be listed, by name.
    """

    cases: list[Listed]
    known: list[Listed]
    failed: list[tuple[str, Failure]]


class _Package(NamedTuple):
    """A package's cases, and its modules that could not be read."""

    cases: list[Listed]
    failed: list[tuple[str, Failure]]


def ask(own: str, names: Sequence[str], workers: Workers) -> Asked:
    """The cases that `names` ask for: of this library, or of packages that have cases.

    Args:
      own: the package of this library's cases, which is imported here; others are by workers.
      names: variants, cases as a report prints them, packages and modules.
      workers: who imports other people's modules.

    Raises:
      ValueError: if a name is none of all.
    """
    mine = _own(own)
    packages = {
        name: package
        for name in dict.fromkeys(names)
        if "[" not in name and not select(mine.cases, [name])
        if (package := _package(name, workers)) is not None
    }
    wanted = [name for name in names if name not in packages]
    failed = [failure for package in packages.values() for failure in package.failed]
    theirs = [case for package in packages.values() for case in package.cases]
    unknown = [n for n in wanted if not select(theirs, [n]) and not select(mine.cases, [n])]
    if unknown and not failed:
        variants = ", ".join(dict.fromkeys(case.variant for case in mine.cases))
        raise ValueError(
            f"{unknown[0]!r} is neither a package, nor a case of one that is named before it, nor "
            f"one of the variants: {variants}."
        )
    if not names:
        return Asked(mine.cases, mine.cases, mine.failed)
    found: list[Listed] = []
    for package in packages.values():
        some = [name for name in wanted if select(package.cases, [name])]
        found += select(package.cases, some)
    rest = [name for name in wanted if not select(theirs, [name])]
    found += select(mine.cases, rest) if rest else []
    whole = not wanted or unknown  # else all that is asked for was found elsewhere
    return Asked(found, [*theirs, *mine.cases], failed if whole else [])


def _own(package: str) -> _Package:
    names = modules(package)
    return _read(names, [attempt(listed, (package, name)) for name in names])


def _package(name: str, workers: Workers) -> _Package | None:
    """A package's cases, or None if there is no such package."""
    if not _may_be(name):
        return None
    found = workers.call(_modules_of, name)
    if isinstance(found, Failure):
        return _Package([], [(name, found)])
    if found is None:
        return None
    if not found:
        raise ValueError(nothing_in(name))
    return _read(found, list(workers.map(listed, [(name, module) for module in found])))


def _may_be(name: str) -> bool:
    """Whether the outermost package exists; nothing is imported."""
    pieces = name.split(".")
    try:
        return all(map(str.isidentifier, pieces)) and find_spec(pieces[0]) is not None
    except ValueError:  # "__main__"
        return False


def _modules_of(package: str) -> list[str] | None:
    try:
        return modules(package)
    except ModuleNotFoundError as error:
        if error.name is None or package.startswith(error.name):
            return None
        raise


def _read(names: Sequence[str], results: Sequence[list[Listed] | Failure]) -> _Package:
    """What came of listing modules."""
    pairs = list(zip(names, results, strict=True))
    cases = [case for _, result in pairs if not isinstance(result, Failure) for case in result]
    return _Package(cases, [(name, r) for name, r in pairs if isinstance(r, Failure)])
