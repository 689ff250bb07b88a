"""All known porting mistakes, by torch operation."""

from collections.abc import Callable

from ..sides.changes import Mistakes, Named, Operation
from .convolutions import CONVOLUTIONS
from .elements import ELEMENTS
from .layers import LAYERS
from .orders import ORDERS

KINDS: dict[str, Callable[[Operation, Named], Mistakes]] = {
    **ELEMENTS,
    **ORDERS,
    **CONVOLUTIONS,
    **LAYERS,
}


def mistakes(op: Operation, named: Named) -> Mistakes:
    """Yields the mistakes for an operation, as a description and a replacement.

    Args:
      op: the operation.
      named: returns a tensor's name, or "".
    """
    if op.name in KINDS:
        yield from KINDS[op.name](op, named)
