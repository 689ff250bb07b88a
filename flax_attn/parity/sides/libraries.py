"""Which library a function computes with, read from the names in its code."""

import dis
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .jax.precision import is_user_code

# Package of a value -> the library that it belongs to.
LIBRARIES = {"torch": "torch"} | dict.fromkeys(("jax", "jaxlib", "flax", "optax"), "jax")


def libraries(function: Callable[..., Any], helpers: bool = True) -> set[str]:
    """Returns "torch", "jax" or both: what a function's code names, itself or in its `helpers`.

    >>> import jax.numpy as jnp
    >>> libraries(lambda x: jnp.tanh(x)), libraries(lambda x: x + 1)  # the second runs on both
    ({'jax'}, set())
    """
    named: set[str] = set()
    visited: dict[int, Any] = {}
    pending: list[Any] = [function]
    while pending:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited[id(value)] = value
        owner = getattr(value, "__objclass__", value)  # of a method such as `torch.Tensor.abs`
        home = value.__name__ if isinstance(value, ModuleType) else getattr(owner, "__module__", "")
        library = LIBRARIES.get(str(home).partition(".")[0])
        if library is not None:
            named.add(library)
        elif helpers or value is function:
            pending += _names(value)
    return named


def _names(value: Any) -> Iterator[Any]:
    """Yields what a function or callable object refers to: globals, closure, what it wraps."""
    for name in ("func", "__self__", "__func__", "__wrapped__"):
        yield getattr(value, name, None)
    if isinstance(value, FunctionType):
        is_read = is_user_code(value.__code__.co_filename)
        for name in _global_names(value.__code__) if is_read else ():
            yield value.__globals__.get(name, sys.modules.get(name.partition(".")[0]))
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # not assigned yet
                yield cell.cell_contents
    elif not isinstance(value, type | ModuleType):
        for kind in type(value).__mro__:
            yield from (kind, vars(kind).get("__call__"))


def _global_names(code: CodeType) -> Iterator[str]:
    """Names that a function's code, or that of a function in it, loads or imports."""
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "IMPORT_NAME"):
            yield str(step.argval)
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _global_names(part)
