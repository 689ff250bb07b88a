"""Constants that are fitted: another epsilon, slope, scale or shift than torch's."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..sides.tape import Ref
from .generic import arounds
from .operation import Operation, around, number_text, with_arguments
from .replay import Changes
from .span import Cause, Span

STEPS = 10  # of Newton's method
STEP = 1e-6  # relative, of the difference that gives the derivative
ENOUGH = 8  # number of values for one constant of many digits
DIGITS, CLOSE = 7, 1e-3  # of a short number, and how near it must be to the fitted one
FEW_DIGITS = 3  # of a number that is fitted to fewer values, such as a loss


def fitted(span: Span) -> Iterator[Cause]:
    """Changes with a constant that makes the program give Flax's value."""
    for families in (_constants, _factors_and_terms):
        for what, nodes in span.sites:
            for sentence, start, change in families(span.operation(nodes[0])):
                if span.budget.spent:
                    return

                def changes(c: float, change: Any = change, nodes: Any = nodes) -> Changes:
                    return {node.number: change(c) for node in nodes}

                constant = _solved(span, changes, start)
                if constant is not None:
                    text = sentence.format(_unlike(constant, start))
                    yield Cause(f"{text}{what}", changes(constant), fitted=True)


def _unlike(x: float, other: float) -> str:
    """A number in so many digits that it can be told from another one."""
    return number_text(x) if number_text(x) != number_text(other) else repr(float(x))


Family = tuple[str, float, Callable[[float], Any]]


def _constants(op: Operation) -> Iterator[Family]:
    """Another constant where torch has one: sentence, torch's, and the change by it."""
    for i, x in enumerate(op.node.args):
        if isinstance(x, float) or (isinstance(x, int) and _counts(op, i, x)):
            name = [*op.node.schema][i] if i < len(op.node.schema) else "constant"
            word = "epsilon" if name == "eps" else "constant"
            text = f"another {word} of {op}: {{}}, torch {number_text(x)}"
            yield text, float(x), lambda c, i=i: with_arguments({i: c})
        elif isinstance(x, Ref) and _is_constant(op, i):
            value = float(op.args[i])
            yield (
                f"another constant of {op}: {{}}, torch {number_text(value)}",
                value,
                lambda c, i=i: around(lambda y: y * 0 + c, i),
            )


def _is_constant(op: Operation, place: int) -> bool:
    """Whether an argument is one number that the program does not compute."""
    x = op.args[place]
    outside = op.tape.producers[op.node.args[place].value] < 0
    return outside and x.numel() == 1 and x.is_floating_point()


def _factors_and_terms(op: Operation) -> Iterator[Family]:
    """A factor or a term where torch has none."""
    for place, label in arounds(op).items():
        x = op.out if place < 0 else op.args[place]
        if (x.is_floating_point() or x.is_complex()) and x.numel():
            yield (
                f"another scale: {label} times {{}}",
                1.0,
                lambda c, p=place: around(lambda y: y * c, p),
            )
            yield (
                f"{{}} added to {label}",
                0.0,
                lambda c, p=place: around(lambda y: y + c, p),
            )


def _counts(op: Operation, i: int, x: int) -> bool:
    """Whether a whole number is a factor or a term, and not an axis or a size."""
    return op.name in ("mul", "div", "add", "sub", "rsub", "pow") and not isinstance(x, bool)


def _solved(span: Span, changes: Callable[[float], Changes], start: float) -> float | None:
    """The constant by Newton's method, or None; of small positive numbers the logarithm."""
    small = 0 < start < 0.1
    unpack = np.exp if small else lambda u: u
    u = np.log(start) if small else start

    def gap(u: float) -> np.ndarray | None:
        made = span.evaluate(changes(float(unpack(u))))
        return None if made is None else span.target.gap(made)

    before = np.inf
    for _ in range(STEPS):
        h = STEP * max(abs(u), 1.0)
        here, ahead = gap(u), gap(u + h)
        if here is None or ahead is None:
            return None
        size = float(np.linalg.norm(np.nan_to_num(here)))
        if size <= 1e-9 * span.target.size or size > 0.98 * before:
            break
        before = size
        slope = np.nan_to_num((ahead - here) / h)
        steep = float(np.vdot(slope, slope).real)
        if not steep:
            return None
        u = float(u - np.vdot(slope, np.nan_to_num(here)).real / steep)
    return _rounded(span, changes, float(unpack(u)), start)


def _rounded(
    span: Span, changes: Callable[[float], Changes], c: float, torch: float
) -> float | None:
    """A short number near `c` that gives Flax's value; None if there is none.

    A number without a short form depends on the data, and is no constant of a program.
    """
    digits = DIGITS if span.target.got.size >= ENOUGH else FEW_DIGITS
    for guess in short_numbers(c, torch, digits):
        if abs(guess - c) <= CLOSE * max(abs(c), abs(guess)) and span.explains(changes(guess)):
            return guess
    return None


def short_numbers(c: float, torch: float = 0.0, up_to: int = DIGITS) -> Iterator[float]:
    """Numbers of few digits, their inverses and roots, and multiples of torch's constant."""
    if not np.isfinite(c):
        return
    for digits in range(1, up_to + 1):

        def short(x: float, digits: int = digits) -> np.float64:
            return np.float64(f"{x:.{digits}g}")

        yield float(short(c))
        if c:
            yield float(1 / short(1 / c))
            yield float(np.copysign(np.sqrt(short(c * c)), c))
            yield float(np.copysign(1 / np.sqrt(short(1 / (c * c))), c))
        if torch and c:
            yield float(torch * short(c / torch))
            yield float(torch / short(torch / c))
            yield float(torch + short(c - torch))
