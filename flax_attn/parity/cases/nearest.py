"""Error messages for unknown names, with the nearest known name as a suggestion."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from ..._internal.nearest import listed
from .collect import Listed, letters
from .home import quoted


def unknown_name(name: str, packages: Sequence[str], lists: Sequence[Sequence[Listed]]) -> str:
    """Error message for an unknown name, with a suggestion.

    Args:
      name: the unknown name.
      packages: the packages named before it.
      lists: the cases of each of them, followed by those of this library.
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
    """Names under which a case can be selected."""
    names = [n for case in cases for n in (case.variant, case.name, case.of, case.title) if n]
    return list(dict.fromkeys(names))


def _modules_here() -> list[str]:
    """Modules and packages in the current folder."""
    names = [path.stem for path in Path.cwd().glob("*.py")]
    return names + [path.parent.name for path in Path.cwd().glob("*/__init__.py")]


def _nearest(name: str, names: Sequence[str]) -> str:
    """The most similar name, quoted for a shell if needed; "" if none is similar."""
    by_letters = {letters(known): known for known in reversed(names)}
    matches = get_close_matches(letters(name), list(by_letters), 1, cutoff=0.7)
    suggestion = by_letters[matches[0]] if matches else ""
    return quoted(suggestion) if "[" in suggestion else suggestion
