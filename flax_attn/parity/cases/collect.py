"""Finding cases: every module of a package that has a list `CASES`."""

import ast
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from .case import Case
from .home import Home


class Listed(NamedTuple):
    """A case by its place, and what must be known of it without its module.

    Attributes:
      package, module, at: whose list it is, and the place there.
      variant, witness, title: of the case; the title is its text.
    """

    package: str
    module: str
    at: int
    variant: str
    witness: str
    title: str

    def __str__(self) -> str:
        return self.title


@runtime_checkable
class Named(Protocol):
    """A case, or what is known of one."""

    @property
    def variant(self) -> str: ...


C = TypeVar("C", bound=Named)


def collect(package: str) -> list[Case]:
    """The cases of a package or module, in order of its modules' names.

    Only modules that have `CASES` at their top level are imported.

    Raises:
      ModuleNotFoundError: if there is no such package.
      ValueError: if it has no cases, or a list holds something else.
    """
    found = [case for name in modules(package) for case in cases_in(package, name)]
    if not found:
        raise ValueError(nothing_in(package))
    return found


def modules(package: str) -> list[str]:
    """The names of a package's modules that have `CASES` at their top level, or cannot be read.

    Raises:
      ModuleNotFoundError: if there is no such package.
    """
    return list(_modules(package))


def cases_in(package: str, module: str) -> list[Case]:
    """The list of one module; the package is the one that was asked for.

    Raises:
      ValueError: if it holds something else than cases.
    """
    held = import_module(module)
    cases = getattr(held, "CASES", None)
    if not isinstance(cases, list | tuple) or not all(isinstance(case, Case) for case in cases):
        raise ValueError(f"{module}.CASES must be a list of flax_attn.parity.Case objects only.")
    for case in cases:
        case.home = Home(module, getattr(held, "__file__", None) or "", package)
    return list(cases)


def listed(place: tuple[str, str]) -> list[Listed]:
    """What is known of the cases of one module, by its package and its name."""
    package, module = place
    return [
        Listed(package, module, at, case.variant, case.proven_equal_to, str(case))
        for at, case in enumerate(cases_in(package, module))
    ]


def select(cases: Sequence[C], names: Sequence[str]) -> list[C]:
    """The cases whose variant is, or whose text is or holds, one of `names`; all without names."""
    if not names:
        return list(cases)
    whole = {str(case) for case in cases}
    return [case for case in cases if any(_is_meant(case, name, whole) for name in names)]


def nothing_in(package: str) -> str:
    """What is said of a package without cases."""
    return f"{package} has no module with a list CASES of flax_attn.parity.Case."


def _is_meant(case: Named, name: str, whole: set[str]) -> bool:
    if name in whole:
        return name == str(case)
    return name == case.variant or ("[" in name and name in str(case))


def _modules(package: str) -> Iterator[str]:
    spec = find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"There is no package {package!r} to take cases from.")
    if spec.submodule_search_locations is None:
        yield from [package] if spec.origin and _has_cases(Path(spec.origin)) else []
    for root in spec.submodule_search_locations or ():
        for path in sorted(Path(root).rglob("*.py")):
            if _has_cases(path):
                inside = path.relative_to(root).with_suffix("").parts
                yield ".".join((package, *(part for part in inside if part != "__init__")))


def _has_cases(path: Path) -> bool:
    """Whether a file assigns `CASES` at its top level; it is not imported to find out.

    True of a file that names them and cannot be read: importing it says why.
    """
    source = path.read_bytes()
    if b"CASES" not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    assigned = (node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
    targets = (
        target
        for node in assigned
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return any(isinstance(target, ast.Name) and target.id == "CASES" for target in targets)
