"""Rates (frequencies) of rotary pairs, and scalings for context extension.

A scaling is plain data for `Rotary(scaling=...)`. Rates are radians per position, one for each of
the P pairs, in numpy float64 unless they depend on a traced sequence length.
"""

import math
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .._internal.arrays import dtype_of, is_count, lists_to_arrays
from .._internal.types import frozen

Rates = Float[np.ndarray, " P"] | Float[Array, " P"]


def exponents(width: int) -> Float[np.ndarray, " P"]:
    """`2 i / width` for each pair i; P is width / 2, rounded up."""
    return np.arange(0, width, 2, dtype=np.float64) / width


@lru_cache(maxsize=64)
def plain_rates(base: Any, width: int) -> Float[np.ndarray, " P"]:
    """`base ** (-2 i / width)` for each pair i; read-only.

    >>> plain_rates(4.0, 4).tolist()
    [1.0, 0.5]
    """
    rates = float(base) ** -exponents(width)
    rates.flags.writeable = False
    return rates


class Scaling:
    """Base class of scalings, which compute the rates of a `Rotary`. Subclasses are frozen."""

    @property
    def needs_length(self) -> bool:
        """Whether `rates` needs the length of the sequence."""
        return False

    @property
    def magnitude(self) -> float:
        """The factor of cos and sin."""
        return 1.0

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        """Rates of `width` components; `length` is a number, or a floating array."""
        raise NotImplementedError


@frozen
class LinearScaling(Scaling):
    """`rate / factor`: positions are interpolated.

    Also called: position interpolation (PI), linear RoPE scaling.

    Args:
      factor: ratio of the extended to the original length.

    Raises:
      ValueError: if the factor is zero or no finite number.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional
    Interpolation", 2023.

    >>> LinearScaling(4.0).rates(4.0, 4).tolist()
    [0.25, 0.125]
    """

    factor: float

    def __post_init__(self):
        _check_numbers(self, "factor", zero=False)

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        return plain_rates(base, width) / self.factor


@frozen
class DynamicScaling(Scaling):
    """Rates of the base `base (factor L / original - (factor - 1)) ** (width / (width - 2))`.

    Also called: dynamic NTK scaling, NTK-aware RoPE scaling.

    L is the length of the sequence, at least `original_length`. transformers stores the largest L
    so far in the module; here L is separate for each call.

    Args:
      factor: ratio of the extended to the original length.
      original_length: the maximum sequence length in training.
      length: L; None for the largest position of a row plus one, or if a layer's mask contains
        `Segments` that of each document; transformers takes the largest of the whole batch. Set
        it so that cached keys, parts of a sequence on several devices and calls of different
        lengths use the same rates.

    Raises:
      ValueError: if the factor is no finite number, or a length no count above zero.

    Source: "dynamic NTK" of Peng et al., "YaRN: Efficient Context Window Extension of Large
    Language Models", 2023, appendix B; with transformers' formula.

    >>> DynamicScaling(2.0, 8).rates(4.0, 4, length=8).tolist()
    [1.0, 0.5]
    >>> DynamicScaling(2.0, 8).rates(4.0, 4, length=16).round(4).tolist()
    [1.0, 0.1667]
    """

    factor: float
    original_length: int
    length: int | None = None

    def __post_init__(self):
        _check_numbers(self, "factor")
        _check_counts(self, "original_length", "length")

    @property
    def needs_length(self) -> bool:
        return self.length is None

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        longest = _at_least(self.length if length is None else length, self.original_length)
        stretch = self.factor * longest / self.original_length - (self.factor - 1)
        base = base * stretch ** (width / max(width - 2, 1))  # for width 2 the only rate is 1
        exponent = exponents(width)
        return base ** -(exponent if _is_known(base) else jnp.asarray(exponent, dtype_of(base)))


@frozen
class Llama3Scaling(Scaling):
    """Divides low rates by `factor`, keeps high ones, and interpolates between.

    Also called: Llama 3 RoPE scaling, `rope_type` "llama3".

    A rate is low if its pair makes fewer than `low_freq_factor` rotations within
    `original_length`, and high for more than `high_freq_factor`; between them the weight of the
    original rate grows linearly. With equal factors, as in Llama 4 Scout, there are none between.

    Args:
      factor: divisor of low rates.
      original_length: the maximum sequence length in training.
      low_freq_factor, high_freq_factor: numbers of rotations.

    Raises:
      ValueError: if a number is no finite one, or zero where it divides.

    Source: the code of Llama 3.1 (Grattafiori et al., "The Llama 3 Herd of Models", 2024).

    >>> Llama3Scaling(8.0, 8192).rates(1e4, 8).round(5).tolist()
    [1.0, 0.1, 0.01, 0.00021]
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        _check_numbers(self, "factor", "low_freq_factor", "high_freq_factor", zero=False)
        _check_numbers(self, "original_length")

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        rates = plain_rates(base, width)
        wavelengths = 2 * math.pi / rates
        between = self.high_freq_factor - self.low_freq_factor or 1.0  # if none, none is asked
        share = (self.original_length / wavelengths - self.low_freq_factor) / between
        share[wavelengths < self.original_length / self.high_freq_factor] = 1.0
        share[wavelengths > self.original_length / self.low_freq_factor] = 0.0
        return rates * (share * (1 - 1 / self.factor) + 1 / self.factor)


@frozen
class Yarn(Scaling):
    """Keeps high rates, divides low ones by `factor`, with a linear ramp between.

    Also called: YaRN, NTK-by-parts scaling.

    The ramp is over the index of the pair, from the one with `beta_fast` rotations within
    `original_length` to the one with `beta_slow` rotations. cos and sin are multiplied by
    `attention_factor`, or by m(mscale) / m(mscale_all_dim), or else by m(1), where
    m(s) = 0.1 s log(factor) + 1, and 1 for a factor of at most 1.

    Args:
      factor: ratio of the extended to the original length.
      original_length: the maximum sequence length in training.
      beta_fast, beta_slow: numbers of rotations at which the ramp begins and ends.
      mscale, mscale_all_dim: both or none, as in DeepSeek's configs; their attention also has
        m(mscale_all_dim) ** 2 in its scale. transformers ignores one without the other.
      attention_factor: the factor of cos and sin, instead of mscale and mscale_all_dim.
      truncate: whether to round the ends of the ramp to integers; False in gpt-oss.

    Raises:
      ValueError: if a number is no finite one, or zero where it divides, or one mscale is given
        without the other or with an attention_factor; in use, for a base of 1.

    Source: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023;
    mscale by DeepSeek-V2's code.

    >>> Yarn(4.0, 64).rates(1e4, 8).round(5).tolist()
    [1.0, 0.0625, 0.0025, 0.00025]
    >>> round(Yarn(4.0, 64).magnitude, 4)
    1.1386
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _check_numbers(self, "factor", "beta_fast", "beta_slow", zero=False)
        _check_numbers(self, "original_length", "mscale", "mscale_all_dim", "attention_factor")
        pair = [x is not None for x in (self.mscale, self.mscale_all_dim)]
        if any(pair) and (self.attention_factor is not None or not all(pair)):
            raise ValueError(
                "Yarn takes mscale and mscale_all_dim together, or attention_factor, or none of "
                f"them; got mscale={self.mscale}, mscale_all_dim={self.mscale_all_dim}, "
                f"attention_factor={self.attention_factor}."
            )
        _check_magnitude(self)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._yarn_mscale(1.0)
        return self._yarn_mscale(self.mscale) / self._yarn_mscale(self.mscale_all_dim)

    def _yarn_mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        rates, (low, high) = plain_rates(base, width), self._ends(base, width)
        ramp = np.clip((np.arange(len(rates)) - low) / (high - low), 0, 1)
        return rates * (1 - ramp) + rates / self.factor * ramp

    def _ends(self, base: float, width: int) -> tuple[float, float]:
        """The indices of the pairs at which the ramp begins and ends."""
        rotations = (self.beta_fast, self.beta_slow)
        longest = [self.original_length / (2 * math.pi * n) for n in rotations]
        if base == 1 or min(longest) <= 0:
            raise ValueError(f"Yarn has no ramp for a base of {base} and {self}.")
        low, high = (width * math.log(x) / (2 * math.log(base)) for x in longest)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(float(low), 0.0), min(float(high), width - 1.0)
        return low, high + 0.001 * (low == high)


@frozen
class LongRope(Scaling):
    """`rate / short_factors`, or `rate / long_factors` in sequences over `original_length`.

    Also called: LongRoPE, `rope_type` "longrope".

    Args:
      short_factors, long_factors: one number for each of the P pairs.
      original_length: the maximum sequence length in training.
      factor: ratio of the extended to the original length. cos and sin are multiplied by
        sqrt(1 + log(factor) / log(original_length)), and by 1 for a factor of at most 1.
      attention_factor: the factor of cos and sin, instead of that.
      length: the length of the sequence, as in `DynamicScaling`.

    Raises:
      ValueError: unless exactly one of factor and attention_factor is given, or if a number is no
        finite one, or zero where it divides; in use, if there are more or fewer factors than pairs.

    Source: Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024;
    with the factor of Phi-3's code.

    >>> scaling = LongRope((1.0, 2.0), (4.0, 8.0), original_length=16, factor=4.0)
    >>> scaling.rates(4.0, 4, length=16).tolist(), scaling.rates(4.0, 4, length=17).tolist()
    ([1.0, 0.25], [0.25, 0.0625])
    >>> round(scaling.magnitude, 4)
    1.2247
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_length: int
    factor: float | None = None
    attention_factor: float | None = None
    length: int | None = None

    def __post_init__(self):
        for name in ("short_factors", "long_factors"):
            try:
                numbers = tuple(float(x) for x in getattr(self, name))
            except (TypeError, ValueError, OverflowError):
                raise TypeError(f"{name} must hold numbers; got {getattr(self, name)!r}.") from None
            object.__setattr__(self, name, numbers)
            if not all(x and math.isfinite(x) for x in numbers):
                raise ValueError(f"{name} must hold finite numbers, not zero; got {numbers}.")
        _check_numbers(self, "original_length", "factor", "attention_factor")
        _check_counts(self, "length", least=2)
        if (self.factor is None) == (self.attention_factor is None):
            raise ValueError(
                "LongRope takes either factor or attention_factor; got "
                f"factor={self.factor}, attention_factor={self.attention_factor}."
            )
        _check_magnitude(self)

    @property
    def needs_length(self) -> bool:
        return self.length is None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        longer = math.log(max(self.factor or 0, 1))
        return math.sqrt(1 + longer / math.log(self.original_length)) if longer else 1.0

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        rates = plain_rates(base, width)
        for name in ("short_factors", "long_factors"):
            if len(getattr(self, name)) != len(rates):
                raise ValueError(
                    f"{name} needs one number for each of the {len(rates)} pairs of "
                    f"{width} components; got {len(getattr(self, name))}."
                )
        short, long = rates / np.asarray(self.short_factors), rates / np.asarray(self.long_factors)
        length = self.length if length is None else length
        if length is None or _is_known(length):
            return long if length is not None and length > self.original_length else short
        short, long = (jnp.asarray(x, dtype_of(length)) for x in (short, long))
        return jnp.where(length > self.original_length, long, short)


@frozen
class Proportional(Scaling):
    """`rate / factor` for the first `share` of the pairs, and 0 for the others.

    Also called: p-RoPE, proportional RoPE.

    Rates and pairs `(i, i + H / 2)` are those of the whole width, unlike `Rotary(width=...)`, whose
    rates and pairs are those of its width.

    Args:
      share: from 0 to 1; int(share * width // 2) pairs are rotated.
      factor: divisor of the rates.

    Raises:
      ValueError: for a share outside [0, 1], or a factor that is zero or no finite number.

    Source: the global layers of Gemma 4, as transformers computes them.

    >>> Proportional(0.5).rates(16.0, 8).tolist()
    [1.0, 0.5, 0.0, 0.0]
    """

    share: float
    factor: float = 1.0

    def __post_init__(self):
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie within 0 and 1; got {self.share!r}.")
        _check_numbers(self, "factor", zero=False)

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        rates = plain_rates(base, width) / self.factor
        return np.where(np.arange(len(rates)) < int(self.share * width // 2), rates, 0.0)


@frozen
class Frequencies(Scaling):
    """Explicit rates, one for each pair, so that 2 P components are rotated.

    For an odd rotary width w, transformers rotates w + 1 components with exponents over w, as
    `Frequencies(base ** (-np.arange(0, w, 2) / w))`.

    Args:
      values: P rates in radians per position; an array, a leaf of the pytree.
      attention_factor: the factor of cos and sin.

    Raises:
      TypeError: if the values are not floating.
      ValueError: unless they have one axis, or for an attention_factor that is no finite number;
        in use, if `Rotary` has another width or a base.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    >>> Frequencies([1.0, 0.25]).rates(1e4, 4).tolist()
    [1.0, 0.25]
    """

    values: Rates
    attention_factor: float = 1.0

    def __post_init__(self):
        lists_to_arrays(self, "values")
        if not jnp.issubdtype(dtype_of(self.values), jnp.floating):
            raise TypeError(f"Frequencies needs floating rates; got {dtype_of(self.values)}.")
        if np.ndim(self.values) != 1:
            raise ValueError(f"Frequencies needs rates of shape (P,); got {np.shape(self.values)}.")
        _check_numbers(self, "attention_factor")

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def rates(self, base: float, width: int, length: Any = None) -> Rates:
        return self.values


def _is_known(x: Any) -> bool:
    return isinstance(x, int | float | np.generic)


def _at_least(length: Any, least: int) -> Any:
    """The maximum of both; a Python number if `length` is one."""
    if length is None or _is_known(length):
        return max(length or 0, least)
    return jnp.maximum(length, least)


def _check_numbers(self: Any, *names: str, zero: bool = True) -> None:
    """Finite numbers, or None where that is the default."""
    for field in fields(self):
        x = getattr(self, field.name)
        if field.name not in names or (field.default is None and x is field.default):
            continue
        if isinstance(x, bool) or not (_is_known(x) and math.isfinite(x)) or not (x or zero):
            whose, kind = f"{field.name} of {type(self).__name__}", "" if zero else ", not zero"
            raise ValueError(f"{whose} must be a finite number{kind}; got {x!r}.")


def _check_magnitude(self: Any) -> None:
    with suppress(ValueError, ZeroDivisionError):
        if math.isfinite(self.magnitude):
            return
    raise ValueError(f"There is no finite factor of cos and sin for {self}.")


def _check_counts(self: Any, *names: str, least: int = 1) -> None:
    for name in names:
        x = getattr(self, name)
        if not (is_count(x, least) or (x is None and name == "length")):
            raise ValueError(
                f"{name} of {type(self).__name__} must be a whole number of at least {least}; "
                f"got {x!r}."
            )
