"""Witnesses whose path of import does not say enough: loaded by their file, or changed first.

The functions of the other files here are what a `Case` names by `made_by=`. Each returns a torch
module, and imports torch and the module's package only when it is called.
"""

import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType


def by_path(name: str, file: str) -> ModuleType:
    """A file of an installed distribution as a module, without the package around it.

    For packages whose `__init__` imports what must not be installed here. The file may import no
    neighbour of its package.

    Args:
      name: of the distribution, as pip knows it.
      file: its path there, such as "vit_pytorch/cait.py".

    Raises:
      ModuleNotFoundError: if the distribution is not installed, or has no such file.

    >>> by_path("rich", "rich/errors.py").StyleError.__name__
    'StyleError'
    """
    try:
        path = distribution(name).locate_file(file)
    except PackageNotFoundError as error:
        raise ModuleNotFoundError(f"{name} is not installed", name=name) from error
    alias = f"{__name__}.{name}/{file}"
    if alias not in sys.modules:
        spec = spec_from_file_location(alias, str(path))
        assert spec is not None and spec.loader is not None, file
        module = sys.modules[alias] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[alias]
            if isinstance(error, FileNotFoundError):
                raise ModuleNotFoundError(f"{name} has no file {file}", name=alias) from error
            raise
    return sys.modules[alias]
