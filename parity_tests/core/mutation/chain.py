"""What has to be made anew with a changed module: the modules that import it, in import order.

Read from the sources alone. `from package import name` leads to the module that defines the name,
through any `__init__` that only hands it on, so that a law book that imports one name of a package
does not depend on all of it. Imports inside functions count as well.
"""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

Origin = tuple[str, str | None]  # the module, and the name in it; no name: the module itself


class Reexport(NamedTuple):
    """`package.name` is `module.attribute`, or the module itself."""

    package: str
    name: str
    module: str
    attribute: str | None


@dataclass(frozen=True, eq=False)
class Sources:
    """The modules below one folder, by their dotted names: all, or those of some packages.

    Where the project is installed, all others are below the same folder.
    """

    root: Path
    packages: frozenset[str] = frozenset()

    def __post_init__(self):
        vars(self).update(_paths={}, _trees={}, _handed={})

    def path(self, module: str) -> Path | None:
        """Its file; None for a module that is not in this folder."""
        if module not in self._paths:
            stem = self.root.joinpath(*module.split("."))
            files = (stem.with_suffix(".py"), stem / "__init__.py")
            ours = not self.packages or module.partition(".")[0] in self.packages
            found = (path for path in files if ours and path.is_file())
            self._paths[module] = next(found, None)
        return self._paths[module]

    def text(self, module: str) -> str:
        return self.path(module).read_text("utf-8")

    def tree(self, module: str) -> ast.Module:
        if module not in self._trees:
            self._trees[module] = ast.parse(self.text(module))
        return self._trees[module]

    def is_package(self, module: str) -> bool:
        return self.path(module).name == "__init__.py"

    def imports(self, module: str) -> list[str]:
        """The modules of this folder that it needs, in the order of its imports."""
        needed = []
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Import):
                needed += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._base(module, node)
                needed += [self.origin(base, alias.name)[0] for alias in node.names]
        return [name for name in dict.fromkeys(needed) if name != module and self.path(name)]

    def origin(self, module: str, name: str) -> Origin:
        """Where `from module import name` leads."""
        if self.path(module) is None or not self.is_package(module):
            return module, name
        if name in self.handed_on(module):
            base, attribute = self.handed_on(module)[name]
            if (base, attribute) != (module, name):  # else `from . import submodule`
                return self.origin(base, attribute)
        elif name in self._own_names(module):
            return module, name
        inner = f"{module}.{name}"
        return (inner, None) if self.path(inner) else (module, name)

    def handed_on(self, package: str) -> dict[str, tuple[str, str]]:
        """The names that an `__init__` imports from elsewhere: the module and the name there.

        A lazy package (`flax_attn._internal.lazy`) says them under TYPE_CHECKING.
        """
        if package not in self._handed:
            self._handed[package] = {
                alias.asname or alias.name: (self._base(package, node), alias.name)
                for statement in self.tree(package).body
                for node in (statement.body if _is_for_checkers(statement) else [statement])
                if isinstance(node, ast.ImportFrom)
                for alias in node.names
            }
        return self._handed[package]

    def _own_names(self, module: str) -> set[str]:
        body = self.tree(module).body
        made = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        stored = (n for s in body if isinstance(s, ast.Assign | ast.AnnAssign) for n in ast.walk(s))
        return made | {
            n.id for n in stored if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }

    def _base(self, module: str, node: ast.ImportFrom) -> str:
        """The absolute name of the module in `from ..module import name`."""
        if not node.level:
            return node.module
        up = node.level - self.is_package(module)
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])


@dataclass(frozen=True)
class Chain:
    """A changed module and the law books that judge it.

    Raises ValueError if no book imports the module, directly or through others.
    """

    sources: Sources
    changed: str
    books: tuple[str, ...]

    def __post_init__(self):
        if self.changed not in self.reached:
            books = ", ".join(self.books)
            raise ValueError(f"The laws of {books} never import {self.changed}.")

    @cached_property
    def reached(self) -> list[str]:
        """All that the books need, each module after those that it imports."""
        found: dict[str, None] = {}
        begun: set[str] = set()

        def visit(module: str) -> None:
            if module in begun:
                return
            begun.add(module)
            for needed in self.sources.imports(module):
                visit(needed)
            found[module] = None

        for book in self.books:
            visit(book)
        return list(found)

    @cached_property
    def above(self) -> list[str]:
        """Of these the changed module and all that import it, directly or through others."""
        users = {self.changed}
        grown = True
        while grown:  # once in import order is enough, unless imports run in a circle
            before = len(users)
            for module in self.reached:
                if not users.isdisjoint(self.sources.imports(module)):
                    users.add(module)
            grown = len(users) > before
        return [module for module in self.reached if module in users]

    @cached_property
    def reexports(self) -> dict[str, list[Reexport]]:
        """For each module that is made anew, the names that packages hand on from it."""
        handed = {module: [] for module in self.above}
        for package in sorted({p for m in self.above for p in _parents(m)} - set(self.above)):
            if self.sources.path(package) is None:
                continue
            for name in self.sources.handed_on(package):
                module, attribute = self.sources.origin(package, name)
                if module in handed and attribute is not None:
                    handed[module].append(Reexport(package, name, module, attribute))
        return handed

    def digest(self) -> str:
        """Changes with any line of code, not of a comment, that the laws could reach."""
        held = hashlib.sha256()
        for module in self.reached:
            held.update(f"{module}\n{ast.dump(self.sources.tree(module))}\n".encode())
        return held.hexdigest()[:16]


def _is_for_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module
