"""The `Rotary` of this library that rotates by measured rates, and the Python that builds it.

Each scaling has a function that solves its numbers from the rates; none is trusted, and what they
yield is compared with all rates by calling the scaling itself.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice, product
from typing import Any

import numpy as np

from ..positions import (
    Frequencies,
    LinearScaling,
    Llama3Scaling,
    Proportional,
    Rotary,
    Scaling,
    Yarn,
)
from ..positions.scaling import plain_rates
from .rotation import Rotation

# How closely rates are to agree, unless they are so slow that they are not known as well.
AGREE = 1e-9
# A solved number is read as one of the module's that is this close to it,
CLOSE = 1e-6
# or as one of so few digits that is this close.
DIGITS, CLOSER = 6, 1e-8
# With a factor of any digits much fits the rates of fewer pairs.
ENOUGH_PAIRS, FEW_DIGITS = 8, 3
# The lengths that models were trained with, where a module does not store them.
POWERS = tuple(2**n for n in range(4, 22))
# Of more numbers than these the pairs of them would take seconds.
MOST_NUMBERS = 40
# Numbers of rotations are small; lengths and bases are among the numbers, too.
MOST_ROTATIONS = 1024

# Pairs that many guesses are compared with at once; those that fit are compared with all.
MOST_COMPARED = 12
# A length of training is no smaller.
SHORTEST = 8
# Of a base in float64.
MOST_EXPONENT = 700.0
# Numbers from this one on are easier to read as 5e5.
FEW_ZEROS = 1e4

Solved = tuple[float, Scaling | None]


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What the solvers know.

    Attributes:
      rates: P rates above zero, but for those at the end, which may be zero.
      precision: absolute error of a rate.
      magnitude: the factor of cos and sin.
      numbers: those of the module that are above zero, in its order.
      agree: how closely rates and the factor are to agree.
    """

    rates: np.ndarray
    precision: float
    magnitude: float
    numbers: tuple[float, ...]
    agree: float = AGREE

    @property
    def width(self) -> int:
        return 2 * len(self.rates)

    @property
    def some(self) -> np.ndarray:
        """Numbers of so many pairs that few guesses fit all their rates by chance."""
        return np.unique(np.linspace(0, len(self.rates) - 1, MOST_COMPARED).astype(int))

    def errors(self, rates: np.ndarray) -> np.ndarray:
        """By how much rates may differ from the measured ones."""
        return np.maximum(self.agree * np.abs(rates), self.precision)

    def bases(self) -> list[float]:
        """Bases that the rates or the module's numbers suggest.

        The first two pairs show it if they are not scaled, and the last two if they are scaled
        alike.
        """
        pairs = [self.rates[:2], self.rates[-2:]] if len(self.rates) > 1 else []
        tidy = [x for a, b in pairs if b > 0 for x in self.tidy(self.power(a / b))]
        return [x for x in dict.fromkeys([*tidy, Rotary.base, *self.numbers]) if x > 1]

    def power(self, quotient: float) -> float:
        """The base whose neighbouring rates have this quotient."""
        exponent = math.log(quotient) * self.width / 2
        return math.exp(exponent) if exponent < MOST_EXPONENT else math.inf

    def tidy(self, number: float) -> list[float]:
        """Numbers that a solved one may stand for, itself last."""
        if not 0 < number < math.inf:
            return []
        number = float(number)
        # A base solved from the quotient of neighbouring rates has its error times their number.
        loose = 0.0 if self.agree == AGREE else 4 * self.width * self.agree
        close = [x for x in self.numbers if abs(x / number - 1) < max(CLOSE, loose)]
        digits = DIGITS if self.agree == AGREE else FEW_DIGITS
        short = float(f"{number:.{digits}g}")
        close += [short] if abs(short / number - 1) < max(CLOSER, loose) else []
        return [*dict.fromkeys([*close, number])]

    def is_tidy(self, base: float, scaling: Scaling | None) -> bool:
        """Whether all numbers are the module's, or have few digits."""
        values = [base, *(vars(scaling).values() if scaling is not None else ())]
        floats = [x for x in values if isinstance(x, float)]
        return all(x in self.numbers or float(f"{x:.{DIGITS}g}") == x for x in floats)


def name_rotary(
    rotation: Rotation, head_dim: int, numbers: Collection[float], agree: float = AGREE
) -> list[Rotary]:
    """Every `Rotary` that rotates by the measured rates, one for each class of scaling.

    Args:
      head_dim: number of components of a head.
      numbers: attributes of the module that may be a base, factor or length, likely ones first.
      agree: how closely rates are to agree; float32 tables show them to some 1e-7.

    The simplest is first, but one with a number that the module does not hold and that has many
    digits comes after others; last is always one with `Frequencies`. None without rotation.
    """
    if not rotation.width:
        return []
    measured = _measured(rotation, numbers, agree)
    named = [(rotation.width, *solved) for solved in _verified(measured, SOLVERS)]
    if rotation.layout == "interleaved" and rotation.magnitude == 1 and rotation.width < head_dim:
        # Interleaved pairs that a share leaves out look like components that never rotate.
        width = head_dim - head_dim % 2
        padded = np.pad(measured.rates, (0, width // 2 - len(measured.rates)))
        wider = dataclasses.replace(measured, rates=padded)
        named += [(width, *solved) for solved in _verified(wider, [_proportional])]
    named.sort(key=lambda x: not measured.is_tidy(*x[1:]))
    direction = {"layout": rotation.layout, "reverse": rotation.reverse}
    rotaries = [
        Rotary(base, width=None if width == head_dim else width, scaling=scaling, **direction)
        for width, base, scaling in named
    ]
    general = Frequencies(np.array(rotation.rates), rotation.magnitude)
    return [*rotaries, Rotary(scaling=general, **direction)]


def _measured(rotation: Rotation, numbers: Collection[float], agree: float) -> Measured:
    usable = [float(x) for x in numbers if not isinstance(x, bool) and 0 < x < math.inf]
    usable = tuple(dict.fromkeys(usable))[:MOST_NUMBERS]
    return Measured(np.array(rotation.rates), rotation.precision, rotation.magnitude, usable, agree)


def _verified(
    measured: Measured, solvers: Sequence[Callable[[Measured], Iterator[Solved]]]
) -> Iterator[Solved]:
    """The first that each solver yields and that makes the measured rates."""
    slow = measured.rates <= 0
    if (np.diff(slow.astype(int)) < 0).any():
        return  # after a pair that rotates the other way, or never, one that does
    for solver in solvers:
        yield from islice((x for x in solver(measured) if _makes(measured, *x)), 1)


def _makes(measured: Measured, base: float, scaling: Scaling | None) -> bool:
    """Whether these rates and this factor of cos and sin are the measured ones."""
    magnitude = 1.0 if scaling is None else scaling.magnitude
    if abs(magnitude / measured.magnitude - 1) > measured.agree:
        return False
    width = measured.width
    rates = plain_rates(base, width) if scaling is None else scaling.rates(base, width)
    difference = np.abs(np.asarray(rates) - measured.rates)
    return bool((difference <= measured.errors(measured.rates)).all())


def _plain(measured: Measured) -> Iterator[Solved]:
    for base in _geometric_bases(measured):
        yield base, None


def _geometric_bases(measured: Measured) -> Iterator[float]:
    """The base, where the rates of all pairs that rotate are a geometric series."""
    rates = measured.rates
    if len(rates) < 2 or rates[1] <= 0:
        yield Rotary.base  # any base does
        return
    yield from measured.tidy(measured.power(rates[0] / rates[1]))


def _proportional(measured: Measured) -> Iterator[Solved]:
    """Zeros at the end; the first rate is that of any base."""
    pairs, rotated = len(measured.rates), int((measured.rates > 0).sum())
    if rotated == pairs:
        return
    shares = [x for x in measured.numbers if x < 1]
    # The middle of a step, where the quotient is rounded below it.
    shares += [rotated / pairs, (rotated + 0.5) / pairs]
    shares = [x for x in shares if int(x * measured.width // 2) == rotated]
    factors = measured.tidy(1 / measured.rates[0])
    for factor, base, share in product(factors, _geometric_bases(measured), shares[:1]):
        yield base, Proportional(share, factor)


def _linear(measured: Measured) -> Iterator[Solved]:
    if abs(measured.rates[0] - 1) <= measured.agree:
        return
    for factor, base in product(measured.tidy(1 / measured.rates[0]), _geometric_bases(measured)):
        yield base, LinearScaling(factor)


def _llama3(measured: Measured) -> Iterator[Solved]:
    """Low and high numbers of rotations show only as quotients with the length."""
    pairs = np.array([(1.0, 4.0), *_rotations(measured)])
    usual = np.array([(length, *pair) for pair in pairs for length in _lengths(measured)])
    for base in _blended_bases(measured):
        by_rates = _llama3_by_rates(measured, base, pairs)
        rows = np.concatenate([by_rates[:1], usual, by_rates[1:]])
        length, low, high = rows.T[..., None]
        rotations = length * plain_rates(base, measured.width)[measured.some] / (2 * math.pi)
        ramp = (high - rotations) / np.where(high > low, high - low, 1.0)
        ramps = np.where(high > low, np.clip(ramp, 0, 1), rotations <= low)
        for row, factor in _base_last(base, rows, _factors(measured, base, ramps)):
            length, low, high = rows[row].tolist()
            yield base, Llama3Scaling(factor, int(length), low, high)


def _llama3_by_rates(measured: Measured, base: float, pairs: np.ndarray) -> np.ndarray:
    """Lengths for pairs of low and high, n 3, if the last rate is divided by the whole factor.

    They are those with which the middle one of the rates between would be as measured.
    """
    plain = plain_rates(base, measured.width)
    drops = 1 - measured.rates / plain
    shares = 1 - drops / drops[-1]
    middle = int(np.abs(shares - 0.5).argmin())
    low, high = pairs.T
    rotations = low + shares[middle] * (high - low)
    lengths = np.round(2 * math.pi * rotations / plain[middle])
    fits = (0 < shares[middle] < 1) & (lengths >= SHORTEST)
    return np.column_stack([lengths, pairs])[fits]


def _yarn(measured: Measured) -> Iterator[Solved]:
    betas = [(32.0, 1.0), *((fast, slow) for slow, fast in _rotations(measured) if fast > slow)]
    lengths = _lengths(measured)
    stored = [x for x in lengths if x in measured.numbers]
    rows = np.array(
        [
            (length, fast, slow, truncate)
            for group in (stored, [x for x in lengths if x not in stored])
            for truncate in (True, False)
            for (fast, slow), length in product(betas, group)
        ]
    )
    for base in _blended_bases(measured):
        ramps = _yarn_ramps(base, measured.width, rows)[:, measured.some]
        for row, factor in _base_last(base, rows, _factors(measured, base, ramps)):
            length, fast, slow, truncate = rows[row].tolist()
            scaling = Yarn(factor, int(length), fast, slow, truncate=bool(truncate))
            yield base, scaling
            for factor_of_cos in measured.tidy(measured.magnitude):
                yield base, dataclasses.replace(scaling, attention_factor=factor_of_cos)


def _yarn_ramps(base: float, width: int, rows: np.ndarray) -> np.ndarray:
    """For each row the shares of the divided rates, n P, as `Yarn` computes them."""
    length, fast, slow, truncate = rows.T[..., None]
    low, high = (
        width * np.log(length / (2 * math.pi * rotations)) / (2 * math.log(base))
        for rotations in (fast, slow)
    )
    low, high = np.where(truncate, np.floor(low), low), np.where(truncate, np.ceil(high), high)
    low, high = np.maximum(low, 0.0), np.minimum(high, width - 1.0)
    high = high + 0.001 * (low == high)
    return np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)


def _blended_bases(measured: Measured) -> list[float]:
    """Bases with which later pairs are slowed more than earlier ones, and some at all."""
    bases = []
    for base in measured.bases():
        plain = plain_rates(base, measured.width)
        errors = measured.errors(plain) / plain
        drops = 1 - measured.rates / plain
        slows = drops[-1] > errors[-1] and (drops >= -errors).all() and (drops < 1).all()
        if slows and (np.diff(drops) >= -errors[1:] - errors[:-1]).all():
            bases.append(base)
    return bases


def _rotations(measured: Measured) -> list[tuple[float, float]]:
    """Pairs of the module's numbers, the first at most the second."""
    small = [x for x in measured.numbers if x <= MOST_ROTATIONS]
    return [(low, high) for low, high in product(small, repeat=2) if low <= high]


def _lengths(measured: Measured) -> list[int]:
    """Lengths that the model may have been trained with, the module's own numbers first."""
    whole = [int(x) for x in measured.numbers if x == int(x) >= SHORTEST]
    return [*dict.fromkeys([*whole, *POWERS])]


def _factors(measured: Measured, base: float, ramps: np.ndarray) -> Iterator[tuple[int, float]]:
    """The rows of ramps of some pairs that make their rates with some factor, and the factor.

    Rates are `plain * (1 - ramp * (1 - 1 / factor))`, so that least squares give the factor.
    """
    plain = plain_rates(base, measured.width)[measured.some]
    drops = 1 - measured.rates[measured.some] / plain
    errors = measured.errors(plain) / plain
    weighted = ramps / errors**2
    squares = np.maximum((ramps * weighted).sum(1), np.finfo(float).tiny)
    parts = (weighted * drops).sum(1) / squares
    # Each side has its error; the scaling itself decides later.
    fits = (np.abs(drops - parts[:, None] * ramps) <= 4 * errors).all(1) & (parts < 1)
    whole = ramps.min(1) == 1  # which `LinearScaling` says
    rows = np.flatnonzero(fits & ~whole)
    few = len(measured.rates) < ENOUGH_PAIRS
    if few:
        rows = rows[_is_usual_factor(measured, 1 / (1 - parts[rows]))]
    for row in rows.tolist():
        factors = measured.tidy(1 / (1 - parts[row]))
        for factor in factors[:1] if few else factors:
            yield row, factor


def _is_usual_factor(measured: Measured, factors: np.ndarray) -> np.ndarray:
    """Which factors have few digits, or are numbers of the module."""
    unit = 10.0 ** (np.floor(np.log10(factors)) + 1 - FEW_DIGITS)
    usual = np.abs(np.round(factors / unit) * unit / factors - 1) < CLOSER
    for number in measured.numbers:
        usual |= np.abs(number / factors - 1) < CLOSE
    return usual


def _base_last(
    base: float, rows: np.ndarray, guesses: Iterator[tuple[int, float]]
) -> list[tuple[int, float]]:
    """Guesses in order, but after all others those whose length is the number of the base."""
    return sorted(guesses, key=lambda guess: rows[guess[0], 0] == base)


SOLVERS = (_plain, _proportional, _linear, _llama3, _yarn)


def rotary_text(rotary: Rotary) -> str:
    """Python that builds a rotary from public names, without the arguments that are defaults.

    >>> rotary_text(Rotary(5e5, "interleaved", scaling=LinearScaling(4.0)))
    "Rotary(base=5e5, layout='interleaved', scaling=LinearScaling(4.0))"
    """
    return _python(rotary)


def _python(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        arguments = []
        for field in dataclasses.fields(value):
            argument = getattr(value, field.name)
            if field.default is dataclasses.MISSING:
                arguments.append(_python(argument))
            elif argument != field.default:
                arguments.append(f"{field.name}={_python(argument)}")
        return f"{type(value).__name__}({', '.join(arguments)})"
    if isinstance(value, tuple):
        return "(" + "".join(f"{_python(x)}, " for x in value).strip() + ")"
    if isinstance(value, float):
        return _shortest(float(value))
    if hasattr(value, "tolist"):
        return "[" + ", ".join(map(_python, value.tolist())) + "]"
    return repr(value)


def _shortest(number: float) -> str:
    """The shortest text of a number, such as 5e5."""
    if abs(number) < FEW_ZEROS:
        return repr(number)
    powers = (f"{number:.{digits}e}" for digits in range(17))
    mantissa, power = next(x for x in powers if float(x) == number).split("e")
    return min(repr(number), f"{mantissa}e{int(power)}", key=len)
