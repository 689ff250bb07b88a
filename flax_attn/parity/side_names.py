"""What a report calls its two sides: torch and Flax, or the names of two JAX functions."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ..errors import ParityError

Sides = tuple[str, str]
SIDES: Sides = ("torch", "Flax")
# Neither `torch.nn.Linear` nor `torch_call=` is the side's name.
FIRST, SECOND = re.compile(r"\b[Tt]orch\b(?![._])"), re.compile(r"\bFlax\b")


def side_names(first: str, second: str) -> Sides:
    """The names of two JAX sides, told apart where they are the same or no names.

    >>> side_names("naive", "flash"), side_names("attention", "attention")
    (('naive', 'flash'), ('attention (first)', 'attention (second)'))
    >>> side_names("<lambda>", "flash")
    ('the first', 'flash')
    """
    if first == second and first.isidentifier():
        return f"{first} (first)", f"{second} (second)"
    return (
        first if first.isidentifier() else "the first",
        second if second.isidentifier() else "the second",
    )


def worded(text: str, sides: Sides) -> str:
    """A sentence about torch and Flax, said of these sides.

    >>> worded("Flax drew 2 masks, torch 1; torch's own error", ("naive", "flash"))
    "flash drew 2 masks, naive 1; naive's own error"
    """
    if sides == SIDES:
        return text
    return SECOND.sub(lambda _: sides[1], FIRST.sub(lambda _: sides[0], text))


@contextmanager
def worded_errors(sides: Sides) -> Iterator[None]:
    """Words the ParityErrors of the block."""
    try:
        yield
    except ParityError as error:
        error.args = (worded(str(error), sides), *error.args[1:])
        raise


def all_worded(value: Any, sides: Sides, keep: Callable[[str], bool] = lambda name: False) -> Any:
    """Words every string inside dataclasses, mappings and sequences, except fields to `keep`."""
    if sides == SIDES:
        return value
    if isinstance(value, str):
        return worded(value, sides)
    if isinstance(value, Mapping):
        return {k: x if keep(k) else all_worded(x, sides, keep) for k, x in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(all_worded(x, sides, keep) for x in value)
    if is_dataclass(value) and not isinstance(value, type):
        named = {x.name: getattr(value, x.name) for x in fields(value) if not keep(x.name)}
        return replace(value, **{k: all_worded(x, sides, keep) for k, x in named.items()})
    return value
