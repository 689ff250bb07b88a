"""Numbers that are fitted: another epsilon, slope, scale or shift, or a share of a change."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..sides.tape import STATISTICS, Node, Ref
from .chains import Chain, capped, instead
from .elements import SMALL, keeps
from .generic import arounds
from .operation import Operation, around, computed, number_text, with_arguments
from .replay import Changes
from .span import Cause, Span

STEPS = 16  # of Newton's method
STEP = 1e-6  # relative, of the difference that gives the derivative
EXACT = 1e-15  # relative size of a difference that is rounding
ENOUGH = 8  # number of values for one constant of many digits
DIGITS, CLOSE = 7, 1e-3  # of a short number, and how near it must be to the fitted one
LARGEST = 1 << 16  # number of which a scale is said to be the root
MANY = 64  # number of values for a constant without a short form
FEW_DIGITS = 3  # of a number that is fitted to fewer values, such as a loss
SMALL_GAP = 1e-2  # relative size of a difference that may be a share of a fault


class Family(NamedTuple):
    """Changes by a number.

    Attributes:
      sentence: in words, with a place for the number.
      start: at which torch has no change, or a first guess.
      changes: by the number.
      allowed: whether a number without a short form, or a short one, is possible.
    """

    sentence: str
    start: float
    changes: Callable[[float], Changes]
    allowed: Callable[[float, bool], bool] = lambda number, short: short


def constants(span: Span) -> Iterator[Cause]:
    """Another number in the place of each of torch's, that makes the program give Flax's value."""
    return _of_families(span, _constants)


def momenta(span: Span) -> Iterator[Cause]:
    """Another share of the new in a moving average, whose two factors sum to one."""
    nodes = span.tape.nodes
    for node in (node for node in span.nodes if node.name == "add"):
        made = [span.tape.producers[x] for x in node.operands]
        factors = [nodes[n] for n in made if n >= 0 and nodes[n].name == "mul"]
        numbers = {x.number: x.args[1] for x in factors if isinstance(x.args[-1], float)}
        alpha = node.kwargs.get("alpha", 1)
        old, new = (*numbers, node.number, node.number)[:2]
        kept, fresh = (*numbers.values(), alpha, alpha)[:2]
        if not numbers or not abs(kept + fresh - 1) < CLOSE**2:
            continue

        def changes(c: float, old: int = old, new: int = new, node: Node = node) -> Changes:
            second = with_arguments({1: c}) if new != node.number else _with_alpha(c)
            return {old: with_arguments({1: 1 - c}), new: second}

        text = f"another momentum: {{}} of the new, torch {fresh:g}"
        yield from _solutions(span, Family(text, float(fresh), changes))


def _with_alpha(c: float) -> Any:
    return computed(lambda func, args, kwargs: func(*args, **{**kwargs, "alpha": c}))


def softcaps(span: Span) -> Iterator[Cause]:
    """Another cap in the place of each of torch's."""
    for row, cap in capped(span):

        def changes(c: float, row: Chain = row) -> Changes:
            return {row.last.number: instead(row, lambda x: c * (x / c).tanh())}

        yield from _solutions(span, Family(f"another softcap: {{}}, torch {cap:g}", cap, changes))


def factors_and_terms(span: Span) -> Iterator[Cause]:
    """A factor, a term, a cap or a sink that torch does not have."""
    return _of_families(span, _factors_and_terms)


def _of_families(span: Span, families: Callable[..., Iterator[Family]]) -> Iterator[Cause]:
    for what, nodes in span.sites:
        for family in families(span.operation(nodes[0]), nodes):
            yield from _solutions(span, family, what)


def _solutions(span: Span, family: Family, what: str = "") -> Iterator[Cause]:
    constant = _solved(span, family)
    if constant is not None:
        text = family.sentence.format(_unlike(constant, family.start))
        yield Cause(f"{text}{what}", family.changes(constant), fitted=True)


def shares(span: Span, causes: Iterable[Cause]) -> Iterator[Cause]:
    """A small share of a change, as of a fault that is blended into what is right."""
    gap = span.target.gap(span.tape.values[span.target.number])
    if gap is None or not np.linalg.norm(np.nan_to_num(gap)) < SMALL_GAP * span.target.size:
        return
    for cause in causes:
        if span.budget.spent:
            return

        def changes(share: float, cause: Cause = cause) -> Changes:
            return {n: replace(change, share=share) for n, change in cause.changes.items()}

        text = f"{cause.sentence}, {{}} of it"
        yield from _solutions(span, Family(text, 0.0, changes, _is_share))


def _is_share(number: float, short: bool) -> bool:
    return short and 0 < number < 1 and float(f"{number:.{FEW_DIGITS}g}") == number


def _is_blended(torch: float) -> Callable[[float, bool], bool]:
    """Whether a number is short or, as a blend of torch's and another one is, close to torch's."""
    return lambda number, short: short or abs(number - torch) < SMALL_GAP * abs(torch)


def _unlike(x: float, other: float) -> str:
    """A number in so many digits that it can be told from another one; and the root that it is."""
    text = number_text(x) if number_text(x) != number_text(other) else repr(float(x))
    for inverse, words in ((False, "the root of"), (True, "1 over the root of")):
        root = 1 / x if inverse and x else abs(x)
        whole = root * root
        if 1 < whole < LARGEST and _is_whole(whole) and not _is_whole(root):
            return f"{text} ({words} {round(whole)})"
    return text


def _is_whole(x: float) -> bool:
    return abs(x - round(x)) < CLOSE**2


def of_nodes(nodes: list[Node], change: Callable[[Any], Any]) -> Callable[[Any], Changes]:
    """The same change, by a number or several, of each of some operations."""
    return lambda c: {node.number: change(c) for node in nodes}


def _constants(op: Operation, nodes: list[Node]) -> Iterator[Family]:
    """Another constant where torch has one."""
    for i, x in enumerate(op.node.args):
        if isinstance(x, float) or (isinstance(x, int) and _counts(op, i, x)):
            name = [*op.node.schema][i] if i < len(op.node.schema) else ""
            text = _text(op, float(x), name == "eps")
            change = of_nodes(nodes, lambda c, i=i: with_arguments({i: c}))
            yield Family(text, float(x), change, _is_blended(float(x)))
        elif isinstance(x, Ref) and _is_constant(op, i):
            value = float(op.args[i])
            text = _text(op, value)
            change = of_nodes(nodes, lambda c, i=i: around(lambda y: y * 0 + c, i))
            yield Family(text, value, change, _is_blended(value))


def _text(op: Operation, torch: float, eps: bool = False) -> str:
    if eps or (op.name == "add" and 0 < abs(torch) < SMALL):
        return f"another epsilon: {{}}, not {number_text(torch)}"
    if keeps(op):
        return f"another kept share, 1 less the dropout rate: {{}}, torch {number_text(torch)}"
    if op.name in STATISTICS.values():
        return f"another share of the new in {op}, its momentum: {{}}, torch {number_text(torch)}"
    word = "scale" if op.name in ("mul", "div") else "constant"
    return f"another {word} of {op}: {{}}, torch {number_text(torch)}"


def _is_constant(op: Operation, place: int) -> bool:
    """Whether an argument is one number that the program does not compute."""
    x = op.args[place]
    outside = op.tape.producers[op.node.args[place].value] < 0
    return outside and x.numel() == 1 and x.is_floating_point()


def _factors_and_terms(op: Operation, nodes: list[Node]) -> Iterator[Family]:
    """A factor, a term or a cap where torch has none, or more in a softmax's denominator."""
    if op.name in ("_softmax", "_safe_softmax"):
        text = "{} more in the softmax's denominator, as a sink adds"
        yield Family(text, 0.0, of_nodes(nodes, lambda c: _with_sink(c, op.args[1])))
    for place, label in arounds(op).items():
        x = op.out if place < 0 else op.args[place]
        if not (x.is_floating_point() or x.is_complex()) or not x.numel():
            continue
        hot = place == 0 and "softmax" in op.name
        text = f"another {'temperature' if hot else 'scale'}: {label} times {{}}"
        yield Family(text, 1.0, of_nodes(nodes, lambda c, p=place: around(lambda y: y * c, p)))
        text = f"{{}} added to {label}"
        yield Family(text, 0.0, of_nodes(nodes, lambda c, p=place: around(lambda y: y + c, p)))
        if x.is_floating_point() and x.isfinite().any():
            yield from _bounded(op, nodes, place, label, float(x[x.isfinite()].abs().max()))


def _bounded(
    op: Operation, nodes: list[Node], place: int, label: str, most: float
) -> Iterator[Family]:
    """A cap or a bound that torch does not have, from a first guess below the largest number."""
    ways: dict[str, Callable[[Any, float], Any]] = {
        "a softcap of {} of": lambda y, c: c * (y / c).tanh(),
        "clipped at {} and its negative:": lambda y, c: y.clamp(-abs(c), abs(c)),
        "never below {}:": lambda y, c: y.clamp(min=c),
    }
    for words, way in ways.items():
        change = of_nodes(nodes, lambda c, way=way: around(lambda y: way(y, c), place))
        for start in (most / 8, most / 2):
            text = f"{words} {label}, where torch has it as it is"
            yield Family(text, start, change, lambda c, short: short and c > 0)


def _with_sink(c: float, axis: int) -> Any:
    """A softmax with more in its denominator."""

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        total = (args[0] - args[0].amax(axis, keepdim=True)).exp().sum(axis, keepdim=True)
        return func(*args, **kwargs) * total / (total + c)

    return computed(change)


def _counts(op: Operation, i: int, x: int) -> bool:
    """Whether a whole number is a factor or a term, and not an axis or a size."""
    return op.name in ("mul", "div", "add", "sub", "rsub", "pow") and not isinstance(x, bool)


def _solved(span: Span, family: Family) -> float | None:
    """The constant by Newton's method, or None: of the number, its inverse, or its logarithm."""
    start, changes = family.start, family.changes
    ways: list[tuple[Any, Any]] = [(float, float)]
    if start not in (0.0, 1.0):
        ways.append((np.reciprocal, np.reciprocal))
    if 0 < start < SMALL:
        ways.append((np.log, np.exp))
    for pack, unpack in ways:
        c = newton(span, lambda u, f=unpack: changes(float(f(u))), float(pack(start)))
        number = None if c is None else float(unpack(c))
        constant = None if number is None else _short_form(span, family, number)
        if constant is not None:
            return constant
    return None


def newton(span: Span, changes: Callable[[float], Changes], u: float) -> float | None:
    """The number whose changes give Flax's value, from a first guess, or None."""

    def gap(u: float) -> np.ndarray | None:
        made = span.evaluate(changes(u))
        return None if made is None else span.target.gap(made)

    sizes: list[float] = []
    least = min(abs(u) or 1.0, 1.0)
    for _ in range(STEPS):
        h = STEP * max(abs(u), least)
        here, ahead = gap(u), gap(u + h)
        if here is None or ahead is None:
            return None
        size = float(np.linalg.norm(np.nan_to_num(here)))
        stays = bool(sizes) and size > 0.98 * sizes[-1]
        sizes.append(size)
        if stays or size <= EXACT * span.target.size:
            break
        slope = np.nan_to_num((ahead - here) / h)
        steep = float(np.vdot(slope, slope).real)
        if not steep:
            return None
        u = float(u - np.vdot(slope, np.nan_to_num(here)).real / steep)
    close = min(sizes) <= max(CLOSE * sizes[0], 10 * EXACT * span.target.size)
    return u if close else None


def _short_form(span: Span, family: Family, c: float) -> float | None:
    """A short number near `c` that gives Flax's value; None if there is none.

    A number without a short form mostly depends on the data, and is no constant of a program.
    """
    digits = DIGITS if span.target.got.size >= ENOUGH else FEW_DIGITS
    for guess in short_numbers(c, family.start, digits):
        close = abs(guess - c) <= CLOSE * max(abs(c), abs(guess)) and family.allowed(guess, True)
        if close and span.explains(family.changes(guess)):
            return guess
    blended = span.target.got.size >= MANY and family.allowed(c, False)
    return c if blended and span.explains(family.changes(c)) else None


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
