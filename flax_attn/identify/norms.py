"""What a head goes through before its rotation and product: a norm, or a clamp."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .attention import Attention, Leaves
from .roles import Unclear

SMALL, LARGE = 1e-3, 1e4
# Of two float64 results of some hundred operations each.
CLOSE = 1e-7


@dataclass(frozen=True)
class Norm:
    """A norm of heads.

    Attributes:
      kind: "rms" or "layer".
      eps: inside the root.
      over_heads: whether it is over all heads of a token together.
      gain, bias: names of its parameters; None without.
      plus_one: whether the gain is added to one.
    """

    kind: str
    eps: float
    over_heads: bool
    gain: str | None
    bias: str | None
    plus_one: bool


@dataclass(frozen=True)
class Side:
    """Queries or keys between their projection and their product.

    Attributes:
      role: "query" or "key".
      norm: its norm, or None.
      clip: the bound of a clamp, or None.
    """

    attention: Attention
    role: str
    norm: Norm | None = None
    clip: float | None = None

    @property
    def width(self) -> int:
        return self.attention.roles.head_dim

    @property
    def count(self) -> int:
        return len(getattr(self.attention.heads, self.role))

    @property
    def takes_any(self) -> bool:
        """Whether `at` takes another vector for each head and row of the batch."""
        return self.norm is None or self.norm.kind == "rms" or self.norm.gain is None

    @property
    def loses_mean(self) -> bool:
        """Whether no head behind the norm has a mean."""
        return self.norm is not None and self.norm.kind == "layer" and self.norm.gain is None

    @property
    def gain_size(self) -> int:
        """Number of the norm's gains; 0 without."""
        name = None if self.norm is None else self.norm.gain
        return 0 if name is None else parameter(self.attention, name).size

    def at(self, vector: np.ndarray, leaves: Leaves) -> tuple[Leaves, float]:
        """Leaves with a head that is this vector behind norm and clamp, and its factor.

        Args:
          vector: `head_dim`, or what broadcasts to `batch token head head_dim`, see `takes_any`.
        """
        put = self.attention.put
        if self.norm is None:
            factor = 1.0 if self.clip is None else min(1.0, self.clip / 2)
            return put(self.role, factor * vector, leaves), factor
        if self.norm.kind == "rms":
            leaves = put(self.role, 1e6 * vector, leaves)
            size = np.sqrt((vector**2).sum(-1).max() / self.width)
            return leaves | self._neutral(), 1 / size
        if self.norm.gain is None:
            return put(self.role, 1e6 * vector, leaves), 1 / float(vector.std(-1).max())
        start = np.random.RandomState(1).standard_normal(self.width)
        normed = (start - start.mean()) / np.sqrt(start.var() + self.norm.eps)
        gains = self._parameter(self.norm.gain, vector / normed - self.norm.plus_one)
        biases = self._parameter(self.norm.bias, np.zeros(self.width))
        return put(self.role, start, leaves) | gains | biases, 1.0

    def normed(self, vector: np.ndarray, rotate: np.ndarray, after: bool) -> np.ndarray:
        """A head behind norm and rotation, by the parameters of the recorded run.

        Args:
          vector: a head, which is that of every head of the token.
          rotate: matrix of the rotation.
          after: whether the norm comes after the rotation.
        """
        norm = self.norm
        if norm is None:
            return rotate @ vector
        vector = rotate @ vector if after else vector
        centred = vector - vector.mean() if norm.kind == "layer" else vector
        made = centred / np.sqrt((centred**2).mean() + norm.eps)
        if norm.gain is not None:
            made = made * (
                parameter(self.attention, norm.gain).ravel()[: self.width] + norm.plus_one
            )
        if norm.bias is not None:
            made = made + parameter(self.attention, norm.bias).ravel()[: self.width]
        return made if after else rotate @ made

    def _neutral(self) -> Leaves:
        assert self.norm is not None
        gain = np.full(self.width, 1.0 - self.norm.plus_one)
        return self._parameter(self.norm.gain, gain) | self._parameter(
            self.norm.bias, np.zeros(self.width)
        )

    def _parameter(self, name: str | None, vector: np.ndarray) -> Leaves:
        if name is None:
            return {}
        size = parameter(self.attention, name).size
        return self.attention.named({name: np.resize(vector, size)})


def parameter(attention: Attention, name: str) -> np.ndarray:
    """A parameter's value in the recorded run."""
    tape = attention.program.tape
    numbers = [x for x, known in tape.names.items() if known == name and tape.producers[x] < 0]
    return attention.program.array(numbers[0])


class Probed:
    """The part of the logits that is odd in the heads of one side, at given heads."""

    def __init__(self, attention: Attention, role: str, logits: Any):
        self.attention, self.role, self.logits = attention, role, logits
        random = np.random.RandomState(3)
        self.width = attention.roles.head_dim
        self.vector = random.standard_normal(self.width)
        other = "key" if role == "query" else "query"
        count = len(getattr(attention.heads, other))
        self.rest = attention.put(other, random.standard_normal((count, self.width)))

    def __call__(self, vector: np.ndarray, more: Leaves | None = None) -> np.ndarray:
        """`batch head query key`; NaN where hidden."""
        put = self.attention.put
        one, two = (put(self.role, x, self.rest) | (more or {}) for x in (vector, -vector))
        return (self.logits(one) - self.logits(two)) / 2


def side_of(attention: Attention, role: str, logits: Any) -> Side:
    """Measures norm and clamp of one side.

    Args:
      logits: from leaves to `batch head query key`, NaN where hidden.

    Raises:
      Unclear: for what is neither.
    """
    odd = Probed(attention, role, logits)
    large, larger = odd(LARGE * odd.vector), odd(10 * LARGE * odd.vector)
    if _same(10 * large, larger) and _same(odd(SMALL * odd.vector) * LARGE / SMALL, large):
        return Side(attention, role)
    if not _same(large, larger):
        raise Unclear(f"the logits are no linear function of the {role}, and not normalised")
    signs = np.sign(odd.vector)
    if _same(odd(LARGE * signs), large):
        if not _same(odd(10 * SMALL * signs), 10 * odd(SMALL * signs)):
            raise Unclear(f"a norm of the {role} behind a clamp")
        clip = SMALL * _ratio(odd(LARGE * signs), odd(SMALL * signs))
        return Side(attention, role, clip=_short(clip))
    return Side(attention, role, norm=_norm(attention, role, odd, large))


def _norm(attention: Attention, role: str, odd: Probed, large: np.ndarray) -> Norm:
    layer = _same(odd(LARGE * (odd.vector + 5.0)), large)
    heads = np.ones((len(getattr(attention.heads, role)), 1))
    heads[0] = 3.0
    coupled = len(heads) > 1 and not _same(odd(LARGE * odd.vector * heads), large)
    gain, bias, plus_one = _parameters(attention, role, odd, large)
    bias = bias if layer else None
    vector = odd.vector - odd.vector.mean() if layer else odd.vector
    eps = _epsilon(odd, large, float((vector**2).mean()))
    return Norm("layer" if layer else "rms", eps, coupled, gain, bias, plus_one)


def _parameters(
    attention: Attention, role: str, odd: Probed, large: np.ndarray
) -> tuple[str | None, str | None, bool]:
    """Names of gain and bias, and whether the gain is added to one."""
    gain, bias, plus_one = None, None, False
    sizes = {odd.width, odd.width * len(getattr(attention.heads, role))}
    for name in attention.path[role]:
        value = parameter(attention, name)
        if value.size not in sizes:
            continue
        doubled = odd(LARGE * odd.vector, attention.named({name: 2 * value}))
        if not _same(doubled, large):
            gain = name
            zero = odd(LARGE * odd.vector, attention.named({name: 0 * value}))
            plus_one = bool(np.nanmax(np.abs(zero)) > CLOSE * np.nanmax(np.abs(large)))
        else:
            bias = name
    return gain, bias, plus_one


def _epsilon(odd: Probed, large: np.ndarray, mean: float) -> float:
    """Epsilon inside the root, from vectors so short that it matters."""
    for c in 10.0 ** np.arange(1, -8.5, -0.5):
        ratio = _ratio(odd(c * odd.vector), large)
        if ratio < 0.9:
            eps = c**2 * mean * (1 / ratio**2 - 1)
            again = _ratio(odd(c / 3 * odd.vector), large)
            other = (c / 3) ** 2 * mean * (1 / again**2 - 1)
            if abs(other / eps - 1) > 1e-4:
                raise Unclear("an epsilon that is not inside the root")
            return _short(eps)
    return 0.0


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    size = max(float(np.nanmax(np.abs(other))), np.finfo(float).tiny)
    return bool(np.nanmax(np.abs(one - other)) <= CLOSE * size)


def _ratio(one: np.ndarray, other: np.ndarray) -> float:
    known = np.isfinite(one) & np.isfinite(other)
    a, b = one[known], other[known]
    return float((a * b).sum() / (b * b).sum())


def _short(x: float) -> float:
    """The number of few digits that a measurement shows."""
    return float(f"{x:.5g}")
