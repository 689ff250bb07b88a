"""What is said of a name that means nothing: the name it is nearest to."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ..._internal.nearest import listed
from .collect import Listed, letters
from .home import quoted


def unknown_name(name: str, packages: Sequence[str], lists: Sequence[Sequence[Listed]]) -> str:
    """That a name is none of a case, and which one may be meant.

    Args:
      name: that means nothing.
      packages: those that were named before it.
      lists: the cases of each of them, and of this library.
    """
    *package_cases, library_cases = lists
    package_cases = [case for cases in package_cases for case in cases]
    suggestion = _nearest(name, _names(package_cases)) or _nearest(
        name, [*_names(library_cases), *_modules_here()]
    )
    if packages:
        has = listed(quoted(case.title) for case in package_cases)
        text = f"{name!r} is neither a case of {' or '.join(packages)}, nor another package"
        return (
            f"{text}: did you mean {suggestion}?"
            if suggestion
            else f"{text}; the cases are: {has}."
        )
    text = (
        f"{name!r} is neither a package, nor a variant, nor a case of one that is named before it"
    )
    variants = listed(dict.fromkeys(case.variant for case in library_cases))
    return (
        f"{text}: did you mean {suggestion}?"
        if suggestion
        else f"{text}; the variants are: {variants}."
    )


def _names(cases: Sequence[Listed]) -> list[str]:
    """All that a case can be asked for by."""
    names = [n for case in cases for n in (case.variant, case.name, case.of, case.title) if n]
    return list(dict.fromkeys(names))


def _modules_here() -> list[str]:
    """Modules and packages of the folder where one stands."""
    names = [path.stem for path in Path.cwd().glob("*.py")]
    return names + [path.parent.name for path in Path.cwd().glob("*/__init__.py")]


def _nearest(name: str, names: Sequence[str]) -> str:
    """The name that is most alike, as a shell takes it; "" if none is."""
    by_letters = {letters(known): known for known in reversed(names)}
    matches = get_close_matches(letters(name), list(by_letters), 1, cutoff=0.7)
    suggestion = by_letters[matches[0]] if matches else ""
    return quoted(suggestion) if "[" in suggestion else suggestion
