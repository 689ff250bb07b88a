"""Lazily importing packages, for a fast `import flax_attn`."""

import sys
from importlib import import_module

from .renamed import warn_renamed


class Lazy(type(sys)):  # ModuleType, without importing `types`
    """A package that imports each name in its table `_HOMES` on first access.

    `_HOMES` maps a name to its module, as in an import: ".attend", "..errors"; "." means the
    submodule of that name. The package's imports under TYPE_CHECKING repeat it for type checkers
    and editors. `_RENAMED` maps an old name to the new one and the release with which it goes; an
    old name works, with a DeprecationWarning. A submodule that is in neither table is imported on
    first access too.

    Set as the class of a package: `sys.modules[__name__].__class__ = Lazy`.
    """

    _HOMES: dict[str, str]
    _RENAMED: dict[str, tuple[str, str]] = {}  # noqa: RUF012
    __all__: list[str]

    def __getattr__(self, name: str) -> object:
        if name in self._RENAMED:
            return self._renamed(name)
        home = self._HOMES.get(name)
        if home is not None:
            whole = home == "."
            module = self._imported(f".{name}" if whole else home)
            value = self.__dict__[name] = module if whole else getattr(module, name)
            return value
        full = f"{self.__name__}.{name}"
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        from importlib.util import find_spec

        if find_spec(full) is not None:
            return import_module(full)
        from .known_elsewhere import instead_of

        hint = instead_of(name, self.__all__)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        # The import system sets submodules as attributes, which must not replace a function.
        if not (self._HOMES.get(name, ".") != "." and isinstance(value, type(sys))):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted(self.__all__)

    def _imported(self, home: str) -> object:
        try:
            return import_module(home, self.__name__)
        except (AttributeError, ImportError) as error:  # as of a flax that is too old for this jax
            from .versions import does_not_fit

            if does_not_fit():
                raise ImportError(does_not_fit()) from error
            raise

    def _renamed(self, name: str) -> object:
        new, goes = self._RENAMED[name]
        warn_renamed(f"{self.__name__}.{name}", f"{self.__name__}.{new}", goes, stacklevel=3)
        return getattr(self, new)
