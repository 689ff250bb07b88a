"""Rotary position embeddings: angles, rotation in both layouts, and `Rotary` for layers."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .._internal.arrays import iota, vmap_leading
from .._internal.types import frozen, wide
from ..token_layouts import positions_of
from .axes import Axial, Sections
from .scaling import Frequencies, Rates, Scaling, exponents, plain_rates

Layout = Literal["half", "interleaved"]


def rotary_angles(
    positions: Int[Array, "*B T"], width: int, base: float, dtype: Any
) -> Float[Array, "*B T P"]:
    """`position * base ** (-2 i / width)` for each of the P = width // 2 pairs, in radians.

    Args:
      positions: integers.
      width: number of rotated components; even.
      base: the longest wavelength is about 2 pi base.
      dtype: of the angles; the powers are computed in float64.

    Raises:
      TypeError: for a string that names no dtype.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    >>> import jax.numpy as jnp
    >>> rotary_angles(jnp.asarray([0, 2]), 4, 4.0, jnp.float32).tolist()
    [[0.0, 0.0], [2.0, 1.0]]
    """
    rates = jnp.asarray(_rates(base, width, None, None, dtype), dtype)
    return positions[..., None].astype(dtype) * rates.reshape((1,) * positions.ndim + (-1,))


def _rates(base: Any, width: int, scaling: Scaling | None, length: Any, dtype: Any) -> Rates:
    """Rates of `width` components, in numpy float64 unless the base is an array."""
    if scaling is not None:
        return scaling.rates(base, width, length)
    if isinstance(base, int | float | np.generic):
        return plain_rates(base, width)
    return jnp.asarray(base, dtype) ** -jnp.asarray(exponents(width), dtype)


def rotate(
    x: Float[Array, "*B T N H"],
    angles: Float[Array, "*#B T P"],
    layout: Layout = "half",
    *,
    magnitude: float = 1.0,
) -> Float[Array, "*B T N H"]:
    """Rotates each pair `(a, b)` to `(a cos - b sin, b cos + a sin)`; others are unchanged.

    Also called: applying rotary position embeddings (RoPE), `apply_rotary_pos_emb`.

    Args:
      x: queries or keys; the first 2 P components are rotated.
      angles: radians, from `rotary_angles`.
      layout: pairs are `(i, i + P)` for "half" (GPT-NeoX, Llama) and `(2 i, 2 i + 1)` for
        "interleaved" (the paper, GPT-J).
      magnitude: the factor of cos and sin.

    Raises:
      TypeError: if x and the angles do not broadcast.

    Source: Su et al., RoFormer, 2021.

    >>> import jax.numpy as jnp
    >>> x = jnp.asarray([1.0, 0.0]).reshape(1, 1, 2)
    >>> rotate(x, jnp.asarray([[jnp.pi / 2]])).round(4).ravel().tolist()
    [-0.0, 1.0]
    """
    return _rotate(x, angles, layout, magnitude)


@partial(jax.jit, static_argnames=("layout", "magnitude"), inline=True)  # eagerly one program
def _rotate(x: jax.Array, angles: jax.Array, layout: Layout, magnitude: float) -> jax.Array:
    pairs = angles.shape[-1]
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]  # *B T 1 P
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    rotated_part, passed = x[..., : 2 * pairs].astype(angles.dtype), x[..., 2 * pairs :]
    axis = -2 if layout == "half" else -1
    split = (2, pairs) if layout == "half" else (pairs, 2)
    parts = jnp.moveaxis(rotated_part.reshape(*x.shape[:-1], *split), axis, 0)
    a, b = parts[0], parts[1]  # unpacking a sharded array outside jit loses its sharding
    rotated_part = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis).reshape(
        *x.shape[:-1], 2 * pairs
    )
    if not passed.shape[-1]:  # an empty slice of a sharded array loses its sharding
        return rotated_part.astype(x.dtype)
    return jnp.concatenate([rotated_part.astype(x.dtype), passed], axis=-1)


@frozen
class Rotary:
    """Rotary position embedding for layers: `rotary(x, positions=None)`.

    Also called: rotary position embedding (RoPE).

    Args:
      base: the longest wavelength is about 2 pi base.
      layout: "half" or "interleaved", see `rotate`.
      width: number of rotated components, the first ones; None for all.
      scaling: changes the rates and the factor of cos and sin: `LinearScaling`,
        `DynamicScaling`, `Llama3Scaling`, `Yarn`, `LongRope`, `Proportional` or `Frequencies`.
      axes: `Sections` or `Axial`, if a token has several positions.
      reverse: whether to rotate in the opposite direction, as for negative positions.

    Rates are computed in float64 unless they depend on the sequence length, angles in float32, or
    in float64 for float64 inputs. x is `*B T N H`; positions are integers that broadcast to `*B T`,
    or with `axes` to `A *B T`, where the axis A does not broadcast. Positions default to
    0, 1, ... T - 1, on each axis of `Sections`.

    Raises:
      ValueError: for another layout, an odd width, a base of zero or less, a base or width with
        `Frequencies`; in use, if the width exceeds H, or positions do not fit or are missing for
        `Axial`.
      TypeError: for a scaling or axes of another class; for an array as base with a scaling.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    >>> import jax.numpy as jnp
    >>> from flax_attn import Rotary, Yarn
    >>> Rotary()(jnp.ones((5, 3, 4))).shape
    (5, 3, 4)
    >>> far = Rotary(1e6, scaling=Yarn(4.0, 32768))
    >>> far(jnp.ones((5, 3, 4))).shape
    (5, 3, 4)
    """

    base: float = 10_000.0
    layout: Layout = "half"
    width: int | None = None
    scaling: Scaling | None = None
    axes: Sections | Axial | None = None
    reverse: bool = False

    def __post_init__(self):
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f'layout must be "half" or "interleaved"; got {self.layout!r}.')
        if self.width is not None and (self.width < 0 or self.width % 2):
            raise ValueError(f"width must be an even count of components; got {self.width}.")
        if isinstance(self.base, int | float) and not self.base > 0:
            raise ValueError(f"base must be above zero; got {self.base}.")
        _check_parts(self)

    def __call__(
        self,
        x: Float[Array, "*B T N H"],
        positions: Int[Array, "*A T"] | None = None,
        lengths: Int[Array, "*#B #T"] | None = None,
    ) -> Float[Array, "*B T N H"]:
        """Rotates x by `positions`, by default 0, 1, ... T - 1 in the order of the layout.

        `lengths` are the lengths of the tokens' sequences, for a scaling that depends on them; None
        uses the largest position of a row plus one.
        """
        if positions is None and not isinstance(self.axes, Axial):
            tokens = positions_of(x, -3)  # in a permuted layout
            positions = None if tokens is None else self.positions_from_indices(tokens)
        width, dtype = self._width(x.shape[-1]), wide(x.dtype)
        if lengths is None and self.needs_length:
            lengths = _lengths(positions, x.shape[:-2], self.axes)
        angles = self._angles(positions, width, x.shape[:-2], dtype, lengths)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return _rotate(x, angles, self.layout, magnitude=magnitude)

    @property
    def needs_length(self) -> bool:
        """Whether the rates depend on the length of a sequence."""
        return self.scaling is not None and self.scaling.needs_length

    def positions_from_indices(self, indices: Any) -> Any:
        """Positions from token indices: equal on all axes, as for text.

        None for `Axial`, whose rows and columns do not follow from the index.
        """
        if self.axes is None:
            return indices
        if isinstance(self.axes, Axial):
            return None
        arrays = np if isinstance(indices, np.ndarray) else jnp  # concrete values stay concrete
        return arrays.broadcast_to(indices, (self.axes.count, *indices.shape))

    def _width(self, head_dim: int) -> int:
        """Number of rotated components per head."""
        width = head_dim if self.width is None else self.width
        if isinstance(self.scaling, Frequencies):
            width = 2 * len(self.scaling.values)
        if width > head_dim or width % 2:
            raise ValueError(
                f"Rotary rotates an even count of components; got {width} of width {head_dim}."
            )
        return width

    def _angles(
        self, raw_positions: Any, width: int, whole: tuple[int, ...], dtype: Any, lengths: Any
    ) -> Float[Array, "*B T P"]:
        """The angle of each pair, from its axis of the positions if they have axes."""
        lists = 1 if self.axes is None else self.axes.lists
        if lengths is None or isinstance(lengths, int):
            rates = _rates(self.base, width // lists, self.scaling, lengths, dtype)  # P
        else:
            rates = self._rates_of(width // lists, jnp.asarray(lengths, dtype))  # *B T P
        positions = _positions(raw_positions, self.axes, whole)
        if self.axes is None:
            positions = positions[..., None]  # *B T 1
        else:
            axis, rate = self.axes.assign(width // 2)
            positions = jnp.moveaxis(positions, 0, -1)[..., axis]  # *B T P
            rates = rates[..., rate]
        rates = jnp.asarray(-rates if self.reverse else rates, dtype)
        rates = rates.reshape((1,) * (len(whole) + 1 - rates.ndim) + rates.shape)
        return positions.astype(dtype) * rates

    def _rates_of(self, width: int, lengths: Array) -> Array:
        """Rates of `width` components for each length."""

        def of_length(length: Array) -> Array:
            rates = _rates(self.base, width, self.scaling, length, length.dtype)
            return jnp.asarray(rates, length.dtype)

        return vmap_leading(of_length, lengths.ndim)(lengths)


def _check_parts(rotary: Rotary) -> None:
    scaling, axes = rotary.scaling, rotary.axes
    if not isinstance(scaling, Scaling | None):
        raise TypeError(f"scaling must be a scaling such as Yarn; got {type(scaling).__name__}.")
    if not isinstance(axes, Sections | Axial | None):
        raise TypeError(f"axes must be Sections, Axial or None; got {type(axes).__name__}.")
    if scaling is not None and not isinstance(rotary.base, int | float | np.generic):
        raise TypeError(f"base must be a number with a scaling; got {type(rotary.base).__name__}.")
    if not isinstance(scaling, Frequencies):
        return
    if rotary.base != Rotary.base or rotary.width is not None or isinstance(axes, Axial):
        raise ValueError(
            "Frequencies say the rate of every rotary pair: leave base and width out, and "
            f"use Sections for axes; got base={rotary.base}, width={rotary.width}, axes={axes}."
        )


def _lengths(positions: Any, whole: tuple[int, ...], axes: Sections | Axial | None) -> Any:
    """Largest position per row plus one: an int if concrete and equal for all, else `*B 1`."""
    if positions is None:
        return whole[-1]
    arrays = np if isinstance(positions, np.ndarray) else jnp
    positions = arrays.asarray(positions)
    positions = positions if axes is None else positions.max(axis=0)
    rows = positions.max(axis=-1, keepdims=True, initial=-1) + 1
    if arrays is np and (rows == rows.max(initial=0)).all():
        return int(rows.max(initial=0))
    return rows.reshape((1,) * (len(whole) - rows.ndim) + rows.shape)


def _positions(positions: Any, axes: Sections | Axial | None, whole: tuple[int, ...]) -> Array:
    """Positions that broadcast to `*B T`, or with `axes` to `A *B T`; default 0 ... T - 1."""
    if axes is None and positions is None:
        return jnp.asarray(iota(whole[-1])).reshape((1,) * (len(whole) - 1) + whole[-1:])
    if axes is None:
        return _aligned(jnp.asarray(positions), whole)
    if positions is None and isinstance(axes, Axial):
        raise ValueError(
            f"Axial needs positions of shape ({axes.count}, *batch, length): the row and the "
            "column of each token; got none."
        )
    if positions is None:
        positions = _counted((axes.count, whole[-1]))
    positions = jnp.asarray(positions)
    if positions.ndim < 2 or positions.shape[0] != axes.count:
        raise ValueError(
            f"positions must broadcast to (axes, *batch, length) = {(axes.count, *whole)}, with "
            f"all {axes.count} axes there; got shape {positions.shape}."
        )
    aligned = _aligned(positions[0], whole)
    return positions.reshape(axes.count, *aligned.shape)


def _counted(shape: tuple[Any, ...]) -> Any:
    """0 ... T - 1 along the last axis: concrete, unless the length is symbolic."""
    counted = iota(shape[-1])
    arrays = np if isinstance(counted, np.ndarray) else jnp
    return arrays.broadcast_to(counted, shape)


def _aligned(positions: Array, whole: tuple[int, ...]) -> Array:
    """`positions` with as many axes as `*B T`; raises ValueError unless it broadcasts."""
    shape = (1,) * (len(whole) - positions.ndim) + positions.shape
    fits = len(shape) == len(whole) and shape[-1] == whole[-1]
    if not fits or any(n not in (1, of) for n, of in zip(shape, whole, strict=True)):
        raise ValueError(
            f"positions must broadcast to (*batch, length) = {whole}; got shape {positions.shape}."
        )
    return positions.reshape(shape)
