"""The mistakes that a porter may make in the place of one of torch's operations."""

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
    """Each as a sentence, and what the operation gives with it.

    Args:
      op: the operation.
      named: what a tensor is called, "" if nobody gave it a name.
    """
    if op.name in KINDS:
        yield from KINDS[op.name](op, named)
