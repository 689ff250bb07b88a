"""What one proof on trained weights is, and what must be installed for it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec

from flax_attn.parity import Report

from .fetch import RealError, Wheel

# The variant, whose attention with which trained weights, and every comparison.
Proof = tuple[str, str, Report]
Proofs = Iterator[Proof]
Say = Callable[[str], None]
VARIANT = "transformer_multi_head"  # of ANARCII and MiniLM


def prove(wheel: Wheel, proven_equal_to: str, report: Report, variant: str = VARIANT) -> Proof:
    """A line of the table; the report says whose weights they are and under which licence."""
    note = f"weights of {wheel.model}, from {wheel.requirement}; their licence is {wheel.licence}"
    return variant, proven_equal_to, replace(report, notes=(*report.notes, note))


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
