"""Alternatives to softmax: functions from scores to weights over the last axis.

A score of -inf marks a masked key, whose weight is zero. A row that is all -inf has zero weights
and zero gradients. All compute in `promote_types(dtype, float32)`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._internal.checks import check_choice
from ._internal.types import wide

Normaliser = Callable[[jax.Array], jax.Array]


def sigmoid(scores: Float[Array, "*B T S"]) -> Float[Array, "*B T S"]:
    """`1 / (1 + exp(-scores))`elementwise, so that rows may have any sum.

    Raises nothing. Source: Ramapuram et al., "Theory, Analysis, and Best Practices for Sigmoid
    Self-Attention", 2024, which adds -log S to the scores.

    >>> sigmoid(jnp.asarray([0.0, -jnp.inf])).tolist()
    [0.5, 0.0]
    """
    return jax.nn.sigmoid(scores.astype(wide(scores.dtype))).astype(scores.dtype)


def entmax(scores: Float[Array, "*B T S"], alpha: float | int = 1.5) -> Float[Array, "*B T S"]:
    """`max(0, (alpha - 1) scores - tau) ** (1 / (alpha - 1))`, with the tau that gives sum one.

    Small scores have weight zero exactly: any that lies 1 / (alpha - 1) or more below the largest.
    The tau is found exactly, by sorting each row.

    Args:
      scores: -inf where masked.
      alpha: 1.5, or 2 for sparsemax. (1 would be softmax.)

    Raises:
      ValueError: for another alpha.

    Source: Peters, Niculae and Martins, "Sparse Sequence-to-Sequence Models", 2019; Martins and
    Astudillo, "From Softmax to Sparsemax", 2016.

    >>> entmax(jnp.asarray([3.0, 1.0, -jnp.inf])).tolist()
    [1.0, 0.0, 0.0]
    >>> entmax(jnp.asarray([0.5, 0.0, -jnp.inf]), alpha=2).tolist()
    [0.75, 0.25, 0.0]
    """
    check_choice("alpha", alpha, 1.5, 2)
    z = scores.astype(wide(scores.dtype)) * (alpha - 1)
    largest = jnp.max(z, axis=-1, keepdims=True, initial=-jnp.inf)
    some = largest > -jnp.inf
    # Scores at or below -1 have weight zero, so clipping changes nothing but removes -inf.
    z = jnp.maximum(z - jax.lax.stop_gradient(jnp.where(some, largest, 0.0)), -1.0)
    weights = (_entmax15 if alpha == 1.5 else _sparsemax)(z)
    return jnp.where(some, weights, 0.0).astype(scores.dtype)


def _threshold(z: jax.Array, taus: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """The tau of each row, for the most top scores that are all at or above their tau.

    Args:
      z: scores, with maximum 0 in each row.
      taus: maps the sorted scores and the counts 1 ... S to the tau for each number of top scores.
    """
    ordered = -jnp.sort(-z, axis=-1)
    tau = taus(ordered, jnp.cumsum(jnp.ones_like(z), axis=-1))
    count = jnp.sum(tau <= ordered, axis=-1, keepdims=True)
    return jnp.take_along_axis(tau, jnp.maximum(count - 1, 0), axis=-1)


@jax.custom_jvp
def _sparsemax(z: jax.Array) -> jax.Array:
    return jnp.maximum(z - _threshold(z, lambda x, n: (jnp.cumsum(x, -1) - 1) / n), 0.0)


@_sparsemax.defjvp
def _sparsemax_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    weights = _sparsemax(*primals)
    return weights, _centred((weights > 0).astype(weights.dtype), *tangents)


@jax.custom_jvp
def _entmax15(z: jax.Array) -> jax.Array:
    return jnp.maximum(z - _threshold(z, _taus15), 0.0) ** 2


def _taus15(ordered: jax.Array, n: jax.Array) -> jax.Array:
    """The root of `sum((x - tau) ** 2) = 1` over the first n scores."""
    mean = jnp.cumsum(ordered, -1) / n
    variance = jnp.cumsum(ordered**2, -1) / n - mean**2
    return mean - jnp.sqrt(jnp.maximum(1 / n - variance, 0.0))


@_entmax15.defjvp
def _entmax15_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    weights = _entmax15(*primals)
    some = weights > 0  # the root is not differentiable at zero
    slope = jnp.where(some, jnp.sqrt(jnp.where(some, weights, 1.0)), 0.0)
    return weights, 2 * _centred(slope, *tangents)


def _centred(slope: jax.Array, dz: jax.Array) -> jax.Array:
    """`slope * (dz - dtau)`, which sums to zero, since the weights sum to one."""
    total = jnp.sum(slope, axis=-1, keepdims=True)
    tau = jnp.sum(slope * dz, axis=-1, keepdims=True) / jnp.where(total > 0, total, 1.0)
    return slope * (dz - tau)
