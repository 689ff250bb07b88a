"""Changes inside an operation that torch fuses, by its formula in simpler operations.

A port writes out what torch has as one operation: a norm, a GELU, a loss. Torch's formula of it is
recorded as a program of its own, in which one operation is changed.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from ..sides.tape import Tape, flat
from .operation import Changed, Operation
from .replay import Change, Changes, Replay

MAX_OPERATIONS = 40  # of a formula


def formula(name: str, overload: str) -> Callable[..., Any] | None:
    """Torch's formula of an operation, or None."""
    import torch
    from torch._decomp import decomposition_table

    packet = getattr(torch.ops.aten, name, None)
    return decomposition_table.get(getattr(packet, overload, None))


class Inside:
    """The formula of an operation, recorded for its arguments."""

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]):
        import torch

        self.tape = Tape()
        tensors = {str(i): x for i, x in enumerate(flat(args)) if torch.is_tensor(x)}
        with self.tape.mode(tensors):
            out = function(*args, **kwargs)
        self.several = isinstance(out, tuple | list)
        self.outs = [
            self.tape.number(x) if torch.is_tensor(x) else x
            for x in (out if self.several else [out])
        ]

    def evaluate(self, changes: Changes) -> Any:
        """The results with some changes."""
        replay = Replay(self.tape, changes)
        made = [replay.value(x) if isinstance(x, int) else x for x in self.outs]
        return tuple(made) if self.several else made[0]


@lru_cache(maxsize=1)
def _table() -> dict[tuple[int, ...], tuple[Any, Inside]]:
    """The formulas that were recorded last, by the identities of their arguments."""
    return {}


def recorded(function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Inside:
    """The recorded formula; the same for the same arguments."""
    table, key = _table(), (id(function), *map(id, flat(args)))
    if key not in table:
        if len(table) > MAX_OPERATIONS:
            table.clear()
        # The arguments are kept, so that their identities stay theirs.
        table[key] = (args, Inside(function, args, kwargs))
    return table[key][1]


def inside(rows: tuple[Callable[[Operation], Changed], ...], op: Operation) -> Changed:
    """Every change of one operation of torch's formula."""
    function = formula(op.node.name, op.node.overload)
    if function is None:
        return
    whole = recorded(function, op.args, op.kwargs)
    if not 2 <= len(whole.tape.nodes) <= MAX_OPERATIONS:
        return
    for node in whole.tape.nodes:
        inner = Operation(node, whole.tape, {})
        for row in rows:
            for sentence, change in attempted(row, inner):
                yield f"{sentence}, inside {op}", _within(function, node.number, change)


def _within(function: Callable[..., Any], number: int, change: Change) -> Change:
    return Change(lambda f, a, k: recorded(function, a, k).evaluate({number: change}))


def attempted(row: Callable[[Operation], Changed], op: Operation) -> Iterator[tuple[str, Change]]:
    """Yields changes until a row fails, since arguments of an operation vary in their kinds."""
    try:
        yield from row(op)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return
