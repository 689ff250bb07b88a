"""Changes inside an operation that torch fuses, by its formula in simpler operations.

A port writes out what torch has as one operation: a norm, a GELU, a loss. Torch's formula of it is
recorded as a program of its own, in which one operation is changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..sides.tape import Ref, Tape, flat
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

        self.function, self.tape = function, Tape()
        tensors = {str(i): x for i, x in enumerate(flat(args)) if torch.is_tensor(x)}
        with self.tape.mode(tensors):
            out = function(*args, **kwargs)
        self.several = isinstance(out, tuple | list)
        results = out if self.several else [out]
        self.outs = [Ref(self.tape.number(x)) if torch.is_tensor(x) else x for x in results]

    def evaluate(self, changes: Changes) -> Any:
        """The results with some changes."""
        replay = Replay(self.tape, changes)
        made = [replay.value(x.value) if isinstance(x, Ref) else x for x in self.outs]
        return tuple(made) if self.several else made[0]


def inside(rows: tuple[Callable[[Operation], Changed], ...], op: Operation) -> Changed:
    """Every change of one operation of torch's formula."""
    function = formula(op.node.name, op.node.overload)
    if function is None:
        return
    whole = Inside(function, op.args, op.kwargs)
    if not 2 <= len(whole.tape.nodes) <= MAX_OPERATIONS:
        return
    for node in whole.tape.nodes:
        inner = Operation(node, whole.tape, {})
        for row in rows:
            for sentence, change in attempted(row, inner):
                yield f"{sentence}, inside {op}", _within(whole, op.args, node.number, change)


def _within(whole: Inside, known: Sequence[Any], number: int, change: Change) -> Change:
    """The operation by its formula with one change; recorded anew for other arguments."""

    def evaluate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        same = all(x is y for x, y in zip(flat(args), flat(known), strict=True))
        formula = whole if same else Inside(whole.function, args, kwargs)
        return formula.evaluate({number: change})

    return Change(evaluate)


def attempted(row: Callable[[Operation], Changed], op: Operation) -> Iterator[tuple[str, Change]]:
    """Yields changes until a row fails, since arguments of an operation vary in their kinds."""
    try:
        yield from row(op)
    except (TypeError, ValueError, IndexError, AttributeError, RuntimeError):
        return
