"""Finds cases: in every module of a package that has a list `CASES`."""

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ...errors import ParityError
from .home import Home
from .traces import may_have_cases

if TYPE_CHECKING:  # importing Case imports jax, which listing names does not need
    from .case import Case


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

    Only modules that mention `CASES`, or star-import from one that does, are imported.

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
    """Names of a package's modules that may define `CASES`, determined from their source.

    Raises:
      ModuleNotFoundError: if there is no such package.
    """
    return list(_modules(package))


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
            home = sys.modules[case.home.module] if _is_listed(case, package) else imported
            case.home = Home(home.__name__, getattr(home, "__file__", None) or "", package)
    _add_class_names(module, cases)
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


def select(cases: Sequence[Listed], names: Sequence[str], loosely: bool = False) -> list[Listed]:
    """The cases selected by `names`; all if there are no names.

    A name is matched, in this order, to: a case's title; a variant; a case's own name or its Flax
    class; a part of a title, if the name contains a bracket.

    Args:
      cases: the cases to select from.
      names: the names to match.
      loosely: whether variants and classes also match by letters and digits only.
    """
    if not names:
        return list(cases)
    chosen = {case for name in names for case in _matching(cases, name, loosely)}
    return [case for case in cases if case in chosen]


def nothing_in(package: str) -> str:
    """Error message for a package without cases."""
    return (
        f"{package} has no module with a list CASES of flax_attn.parity.Case. Name a file or a "
        "package that has one. For one torch module without cases, flax_attn.parity has compare "
        "and record."
    )


def letters(name: str) -> str:
    """Normalises a name by removing dashes and underscores and lowering case.

    >>> letters("CausalAttention") == letters("causal-attention") == letters("causal_attention")
    True
    """
    return name.replace("-", "").replace("_", "").lower()


def _matching(cases: Sequence[Listed], name: str, loosely: bool) -> list[Listed]:
    if not letters(name):
        return []
    ways = [
        lambda case: name == case.title,
        lambda case: name == case.variant,
        lambda case: name in (case.name, case.of),
        lambda case: "[" in name and name in case.title,
        lambda case: loosely and letters(name) in (letters(case.variant), letters(case.of)),
    ]
    matches = ([case for case in cases if way(case)] for way in ways)
    return next((some for some in matches if some), [])


def _is_listed(case: "Case", package: str) -> bool:
    """Whether the module of the package that created a case lists it in its own `CASES`."""
    name = case.home.module
    cases = getattr(sys.modules.get(name), "CASES", ())
    return name.startswith(f"{package}.") and any(case is other for other in cases)


def _add_class_names(module: str, cases: "Sequence[Case]") -> None:
    """Adds the Flax class to the titles of cases that share one, if the classes differ."""
    for second_pass in (False, True):
        by_title: dict[str, list[Case]] = {}
        for case in cases:
            by_title.setdefault(str(case), []).append(case)
        for title, same in by_title.items():
            names = [case.flax_class.__name__ for case in same]
            if len(same) > 1 and (second_pass or len({*names}) < len(names)):
                raise ParityError(
                    f"{module}.CASES holds {len(same)} cases with one name, {title} (of the Flax "
                    f"classes {', '.join(names)}): give each a name of its own, Case(name=...)."
                )
            for case in same:
                case.tells_class = case.tells_class or len(same) > 1


def _modules(package: str) -> Iterator[str]:
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"There is no package {package!r} to take cases from.")
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        yield from [package] if file.suffix == ".py" and may_have_cases(file) else []
    for root in spec.submodule_search_locations or ():
        for path in sorted(Path(root).rglob("*.py")):
            if may_have_cases(path):
                inside = path.relative_to(root).with_suffix("").parts
                yield ".".join((package, *(part for part in inside if part != "__init__")))
