"""Numbers in a module's attributes, which may be a base, a factor or a length."""

from collections.abc import Iterator, Mapping
from typing import Any

DEPTH = 4  # of attributes of attributes


def numbers_in(module: Any) -> tuple[float, ...]:
    """The numbers in the attributes of a torch module, its submodules and its config."""
    numbers: dict[float, None] = {}
    for part in module.modules():
        numbers |= dict.fromkeys(_inside(vars(part), DEPTH))
    return tuple(numbers)


def _inside(value: Any, depth: int) -> Iterator[float]:
    if isinstance(value, bool) or depth < 0:
        return
    if isinstance(value, int | float):
        yield float(value)
    elif isinstance(value, Mapping):
        for name, x in value.items():
            if not str(name).startswith("_") or str(name) == "_buffers":
                yield from _inside(x, depth - 1)
    elif isinstance(value, tuple | list):
        for x in value[:64]:
            yield from _inside(x, depth - 1)
    elif hasattr(value, "numel") and hasattr(value, "item"):
        if value.numel() == 1:
            yield float(value)
    elif hasattr(value, "__dict__") and not hasattr(value, "forward"):
        yield from _inside(vars(value), depth - 1)
