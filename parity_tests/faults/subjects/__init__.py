"""Ports that are right, by the file that they are in: what faults are made in."""

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ...port import Port


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every file here that has `PORTS`."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    found = (import_module(f"{__name__}.{file}") for file in files)
    return tuple(module for module in found if hasattr(module, "PORTS"))


@cache
def homes() -> dict[str, tuple[ModuleType, Port]]:
    """By the name of a port, its file and itself.

    Raises:
      ValueError: for a name that two ports have.
    """
    known: dict[str, tuple[ModuleType, Port]] = {}
    for module in modules():
        for port in module.PORTS:
            if port.name in known:
                raise ValueError(f"Two subjects are called {port.name!r}.")
            known[port.name] = (module, port)
    return known


def changed(port: Port, source: str) -> Port:
    """The port of the same name in another text of its file; the original stays."""
    home, right = homes()[port.name]
    module = ModuleType(home.__name__)
    module.__package__, module.__file__ = home.__package__, home.__file__
    exec(compile(source, home.__file__ or "", "exec"), module.__dict__)
    (wrong,) = (other for other in module.PORTS if other.name == port.name)
    return Port(right.name, right.theirs, wrong.mine, right.inputs, wrong.rules, wrong.options)
