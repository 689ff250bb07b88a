"""The rotation of a head's queries and keys, from the bilinear forms of its logits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ..positions import Layout

# Forms are measured to some 1e-14 of their largest entry; an entry below this is no coupling, and
# a form that differs from the fitted rotation by more is none.
TOLERANCE = 1e-12
# A scale this close to the usual one is the usual one, whose last digits the caller knows.
USUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Rotation:
    """How positions rotate the P pairs of components of one head.

    Attributes:
      scale: the factor of the logits.
      magnitude: the factor of cos and sin; 1.0 if all components rotate, where it is in the scale.
      width: number of rotated components, the first ones; 0 without rotation.
      layout: which components are pairs, as in `Rotary`.
      rates: P rates in radians per position, in float64, from minus pi to pi divided by the largest
        common divisor of the distances; 0.0 where no angle shows.
      reverse: whether the first pair that rotates does so against `Rotary`.
      precision: absolute error of a rate.
    """

    scale: float
    magnitude: float
    width: int
    layout: Layout
    rates: np.ndarray
    reverse: bool
    precision: float = 0.0

    def matrix(self, position: int, head_dim: int) -> np.ndarray:
        """What a head at a position is multiplied by, H H."""
        pairs, sign = Pairs.of(self.layout, self.width), -1 if self.reverse else 1
        numbers = self.magnitude * np.exp(1j * sign * position * self.rates)
        return pairs.forms(numbers[None], 1.0, head_dim)[0].T


@dataclass(frozen=True)
class Pairs:
    """The components of P pairs.

    Attributes:
      layout: as in `Rotary`.
      first, second: P numbers of components.
    """

    layout: Layout
    first: np.ndarray
    second: np.ndarray

    @classmethod
    def of(cls, layout: Layout, width: int) -> "Pairs":
        numbers = np.arange(width // 2)
        if layout == "half":
            return cls(layout, numbers, numbers + width // 2)
        return cls(layout, 2 * numbers, 2 * numbers + 1)

    def numbers(self, forms: np.ndarray) -> np.ndarray:
        """The complex number `r exp(i angle)` of each pair of each form, n P."""
        i, j = self.first, self.second
        real, imaginary = forms[:, i, i] + forms[:, j, j], forms[:, i, j] - forms[:, j, i]
        return (real + 1j * imaginary) / 2

    def forms(self, numbers: np.ndarray, others: float, head_dim: int) -> np.ndarray:
        """The forms of such numbers, n H H, with `others` for components that do not rotate."""
        forms = np.tile(others * np.eye(head_dim), (len(numbers), 1, 1))
        i, j = self.first, self.second
        forms[:, i, i] = forms[:, j, j] = np.real(numbers)
        forms[:, i, j], forms[:, j, i] = np.imag(numbers), -np.imag(numbers)
        return forms


def rotation_of(
    forms: Mapping[tuple[int, int], np.ndarray],
    usual_scale: float | None = None,
    tolerance: float = TOLERANCE,
) -> Rotation | None:
    """Tells the rotation of queries and keys by their positions; None if there is another relation.

    Args:
      forms: for a query's token t and a key's token s the `H H` matrix M in float64, where the
        logit is `q @ M @ k` of the components before the rotation.
      usual_scale: the scale to report where the measured one is equal but for its last digits.
      tolerance: by how much a form may differ from the rotation's, of the largest entry.

    The tokens should have distances t - s without a common divisor, and a large one, since the
    precision of rates grows with it. None also if M is zero, depends on t and s themselves, or
    rotates other components than the first ones.
    """
    if not forms:
        return None
    distances = np.array([t - s for t, s in forms])
    measured = np.stack([np.asarray(form, np.float64) for form in forms.values()])
    largest = float(np.abs(measured).max(initial=0.0))
    if not 0 < largest < np.inf:
        return None
    measured = measured / largest
    for pairs in _coupled_layouts(measured, tolerance):
        rotation = _fitted_rotation(measured, distances, pairs, tolerance)
        if rotation is not None:
            return _in_units(rotation, largest, usual_scale)
    return None


def _in_units(rotation: Rotation, unit: float, usual_scale: float | None) -> Rotation:
    """The rotation of forms that were not divided by `unit`."""
    scale = rotation.scale * unit
    if usual_scale is not None and abs(scale / usual_scale - 1) < USUAL:
        scale = float(usual_scale)
    values = rotation.magnitude, rotation.width, rotation.layout, rotation.rates, rotation.reverse
    return Rotation(scale, *values, rotation.precision)


def _coupled_layouts(forms: np.ndarray, tolerance: float) -> Iterator[Pairs]:
    """Pairs that have the first coupling of different components; the others are not read."""
    head_dim = forms.shape[1]
    coupled = (np.abs(forms).max(0) > tolerance) & ~np.eye(head_dim, dtype=bool)
    one, other = np.nonzero(np.triu(coupled | coupled.T))
    if not len(one):
        yield Pairs.of("half", 0)
        return
    offset = int(other[0] - one[0])
    if 2 * offset <= head_dim:
        yield Pairs.of("half", 2 * offset)
    if offset == 1:
        yield Pairs.of("interleaved", head_dim - head_dim % 2)


def _fitted_rotation(
    forms: np.ndarray, distances: np.ndarray, pairs: Pairs, tolerance: float
) -> Rotation | None:
    """The rotation of these pairs; None if it does not make the forms."""
    head_dim = forms.shape[1]
    rates = _pair_rates(pairs.numbers(forms), distances, tolerance / 10)
    width = 2 * len(rates)
    if pairs.layout == "interleaved":
        width = _rotated_width(forms, rates, tolerance)
        pairs, rates = Pairs.of(pairs.layout, width), rates[: width // 2]
    numbers = pairs.numbers(forms)
    radius = float(np.abs(numbers).mean()) if width else 1.0
    others = np.diagonal(forms, axis1=1, axis2=2)[:, width:]
    scale = float(others.mean()) if width < head_dim else radius
    made = pairs.forms(radius * np.exp(1j * distances[:, None] * rates), scale, head_dim)
    if np.abs(made - forms).max() > tolerance or (width and scale <= 0):
        return None
    magnitude = (radius / scale) ** 0.5 if width else 1.0
    magnitude = 1.0 if abs(magnitude - 1) < tolerance else magnitude
    reverse = bool((rates[rates != 0][:1] < 0).any())
    rates = -rates if reverse else rates
    precision = tolerance / 10 / max(int(np.abs(distances).max()), 1)
    return Rotation(scale, magnitude, width, pairs.layout, rates + 0.0, reverse, precision)


def _rotated_width(forms: np.ndarray, rates: np.ndarray, tolerance: float) -> int:
    """Number of interleaved components that rotate, those whose angle never shows included.

    Where cos and sin have a factor, all that have it do; else those up to the last that shows.
    """
    numbers = np.abs(Pairs.of("interleaved", 2 * len(rates)).numbers(forms)).mean(0)
    radii = np.repeat(numbers, 2)
    if forms.shape[1] > len(radii):
        radii = np.append(radii, forms[:, -1, -1].mean())
    different = np.flatnonzero(np.abs(radii - radii[0]) > tolerance)
    if len(different):
        return int(different[0])
    return 2 + 2 * max(np.flatnonzero(rates).tolist(), default=-1)


def _pair_rates(numbers: np.ndarray, distances: np.ndarray, smallest: float) -> np.ndarray:
    """The rate of each pair from its complex numbers, n P, at n distances.

    A small distance tells the angles at the larger ones up to whole rotations, and all distances
    together tell the rate. Angles are means of several entries, and so better known than an entry:
    those under `smallest` are 0.
    """
    zeros = np.zeros(numbers.shape[1])
    units = {}
    for distance in sorted({*np.abs(distances).tolist()} - {0}):
        ahead, behind = numbers[distances == distance], numbers[distances == -distance]
        total = ahead.sum(0) + behind.conj().sum(0)
        units[distance] = total / np.maximum(np.abs(total), np.finfo(float).tiny)
    if not units:
        return zeros
    step, unit = _common_step(units)
    rough, rates = np.angle(unit) / step, zeros
    for distance, unit in units.items():
        expected = rough * distance
        angle = expected + np.angle(unit * np.exp(-1j * expected))
        rates = rates + distance * angle
    rates = rates / sum(distance**2 for distance in units)
    return np.where(np.abs(rates) * max(units) < smallest, 0.0, rates)


def _common_step(units: Mapping[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """The largest common divisor of the distances, and the numbers of it, by Euclid's algorithm."""
    step, unit = 0, np.ones_like(next(iter(units.values())))
    for distance, other in units.items():
        while distance:
            times, remainder = divmod(step, distance)
            unit, other = other, unit * other.conj() ** times
            step, distance = distance, remainder
    return step, unit
