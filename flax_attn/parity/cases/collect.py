"""Finding cases: every module of a package that has a list `CASES`."""

import ast
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from .case import Case


def collect(package: str) -> list[Case]:
    """The cases of a package or module, in order of its modules' names.

    Only modules that have `CASES` at their top level are imported.

    Raises:
      ModuleNotFoundError: if there is no such package.
      ValueError: if it has no cases, or a list holds something else.
    """
    found: list[Case] = []
    for name in _modules(package):
        cases = import_module(name).CASES
        if not all(isinstance(case, Case) for case in cases):
            raise ValueError(f"{name}.CASES must hold flax_attn.parity.Case objects only.")
        found += cases
    if not found:
        raise ValueError(f"{package} has no module with a list CASES of flax_attn.parity.Case.")
    return found


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases whose variant is, or whose text holds, one of `names`; all without names."""
    if not names:
        return list(cases)
    return [
        case
        for case in cases
        if any(name == case.variant or ("[" in name and name in str(case)) for name in names)
    ]


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
    """Whether a file assigns `CASES` at its top level; it is not imported to find out."""
    source = path.read_text("utf-8")
    if "CASES" not in source:
        return False
    assigned = (
        node for node in ast.parse(source).body if isinstance(node, ast.Assign | ast.AnnAssign)
    )
    targets = (
        target
        for node in assigned
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    )
    return any(isinstance(target, ast.Name) and target.id == "CASES" for target in targets)
