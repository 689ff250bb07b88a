"""The catalogue: every kind of change, a row each, the cheapest first."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from . import generic, heads
from .convolutions import CONVOLUTIONS
from .elements import ELEMENTS, operators
from .masks import masked
from .norms import LAYERS, temperatures
from .operation import Changed, Operation
from .orders import ORDERS, interleaved


class Kind(NamedTuple):
    """A kind of change.

    Attributes:
      name: of the kind.
      changes: gives all changes of this kind of an operation.
      pairs: whether it is combined with another one.
      functions: whether it puts functions around values, which may give NaN in place of numbers.
    """

    name: str
    changes: Callable[[Operation], Changed]
    pairs: bool = False
    functions: bool = False


def _by_name(rows: Mapping[str, Callable[[Operation], Changed]]) -> Callable[[Operation], Changed]:
    """The changes of operations that have a row of their own."""
    return lambda op: rows[op.name](op) if op.name in rows else iter(())


KINDS = (
    Kind("another mask", masked),
    Kind("another function, term or constant", _by_name(ELEMENTS), True),
    Kind("another norm, reduction or lookup", _by_name(LAYERS), True),
    Kind("another convolution", _by_name(CONVOLUTIONS), True),
    Kind("parts in another order", _by_name(ORDERS), True),
    Kind("heads otherwise", heads.axis),
    Kind("a table in another order", interleaved),
    Kind("left out", generic.nothing, True),
    Kind("another operator", operators, True),
    Kind("another number or flag", generic.numbers, True),
    Kind("another part", generic.slices, True),
    Kind("another axis", generic.axes, True),
    Kind("a transposed operand", generic.turned, True),
    Kind("axes in another order", generic.permuted_axes, True),
    Kind("neighbours in the other order", generic.neighbours, True),
    Kind("parts of a linear layer", heads.linear),
    Kind("another temperature", temperatures),
    Kind("twice", generic.twice),
    Kind("rolled, shifted or reversed", generic.moved),
    Kind("one function too many", generic.extra, functions=True),
)
