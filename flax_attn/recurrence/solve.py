"""`(I + tril(a, -1))^-1 b` by matrix products, which are fast in batches on every platform."""

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 16  # rows of a block that is inverted directly


@jax.custom_vjp
def solve_unit_lower(a: jax.Array, b: jax.Array) -> jax.Array:
    """`(I + tril(a, -1))^-1 b` for a `*B C C` and b `*B C h`; the upper half of a is not read.

    The gradient of b is the transposed inverse times the cotangent; that of a is minus its outer
    product with the result. So the residuals are the inverse and the result.

    >>> a, b = jnp.asarray([[0.0, 0.0], [2.0, 0.0]]), jnp.asarray([[1.0], [5.0]])
    >>> solve_unit_lower(a, b).tolist()
    [[1.0], [3.0]]
    """
    return _forward(a, b)[0]


def _forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse(a)
    y = inverse @ b
    return y, (inverse, y)


def _backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, y = residuals
    db = inverse.mT @ dy
    return -_masked(db @ y.mT, np.tri(y.shape[-2], k=-1)), db


solve_unit_lower.defvjp(_forward, _backward)


def _inverse(a: jax.Array) -> jax.Array:
    """`(I + tril(a, -1))^-1`, by blocks of doubling size.

    The inverse of `[[P, 0], [Q, R]]` is `[[P^-1, 0], [-R^-1 Q P^-1, R^-1]]`, so two products give
    the inverse of a block twice as large.
    """
    count = a.shape[-1]
    size = 1 << (count - 1).bit_length()
    more = [(0, 0)] * (a.ndim - 2) + [(0, size - count)] * 2
    a = jnp.pad(a, more)
    step = min(size, SMALL)
    x = _small(_diagonal(a, step, 0))  # *B size/step step step
    while step < size:
        p, r = x[..., 0::2, :, :], x[..., 1::2, :, :]
        low = -r @ _diagonal(a, step, 1) @ p
        top = jnp.concatenate([p, jnp.zeros_like(p)], axis=-1)
        x = jnp.concatenate([top, jnp.concatenate([low, r], axis=-1)], axis=-2)
        step *= 2
    return x[..., 0, :count, :count]


def _small(a: jax.Array) -> jax.Array:
    """Inverse of small blocks by the same rule on full matrices, without slicing."""
    size = a.shape[-1]
    rows, columns = np.ogrid[:size, :size]
    x = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    step = 1
    while step < size:
        low = (rows // (2 * step) == columns // (2 * step)) & (rows // step > columns // step)
        x = x - x @ _masked(a, low) @ x
        step *= 2
    return x


def _diagonal(a: jax.Array, step: int, below: int) -> jax.Array:
    """Diagonal blocks of `step` rows; with below=1 the blocks under every second one."""
    count = a.shape[-1] // (step << below)
    a = a.reshape(*a.shape[:-2], count, step << below, count, step << below)
    blocks = jnp.moveaxis(jnp.diagonal(a, axis1=-4, axis2=-2), -1, -3)
    return blocks[..., step * below :, :step]


def _masked(a: jax.Array, mask: np.ndarray) -> jax.Array:
    return jnp.where(mask.astype(bool).reshape((1,) * (a.ndim - 2) + mask.shape), a, 0)
