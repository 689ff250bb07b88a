"""Equivalent rewrites: other numbers on the way, the same function. None may be flagged."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from . import trial_flax as right
from .setup import Setup
from .sizes import CAP, LAYER_EPS


@dataclass(frozen=True)
class Rewrite:
    """One faithful port, written otherwise."""

    name: str
    setup: Setup

    def __str__(self) -> str:
        return self.name


def put(*parts, **setup):
    """Parts by name and function, everywhere."""
    return Setup(parts=tuple(("", name, f) for name, f in parts), **setup)


def _scaled_queries(q, k):
    return right.product(q / q.shape[-1] ** 0.5, k)


def _grouped_product(q, k):
    """Key heads shared by an axis of the group, none repeated."""
    b, t, n, h = q.shape
    grouped = q.reshape(b, t, k.shape[2], -1, h)
    return jnp.einsum("btkgh,bskh->bkgts", grouped, k).reshape(b, n, t, -1)


def _grouped_mix(weights, v):
    b, n, t, s = weights.shape
    grouped = weights.reshape(b, v.shape[2], -1, t, s)
    return jnp.einsum("bkgts,bskh->btkgh", grouped, v).reshape(b, t, n, -1)


def _tile_and_reorder(x, times):
    k = x.shape[2]
    order = np.arange(times * k).reshape(times, k).T.ravel()
    return jnp.tile(x, (1, 1, times, 1))[:, :, order]


def _base_two(scores):
    raised = jnp.exp2((scores - scores.max(-1, keepdims=True)) * jnp.log2(jnp.e))
    return raised / raised.sum(-1, keepdims=True)


def _by_logarithm(scores):
    return jnp.exp(scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))


def _in_blocks(scores, size=4):
    """Online: the maximum and the sum are carried from block to block."""
    blocks = [scores[..., i : i + size] for i in range(0, scores.shape[-1], size)]
    top, total = jnp.full_like(scores[..., :1], -1e30), jnp.zeros_like(scores[..., :1])
    for block in blocks:
        new = jnp.maximum(top, block.max(-1, keepdims=True))
        total = total * jnp.exp(top - new) + jnp.exp(block - new).sum(-1, keepdims=True)
        top = new
    return jnp.exp(scores - top) / total


def _added(scores, visible):
    return scores + jnp.where(visible, 0.0, -jnp.inf)


def _low_number(scores, visible):
    return jnp.where(visible, scores, -1e4)


def _by_n(old, mean, var, n):
    return 0.9 * old[0] + 0.1 * mean, 0.9 * old[1] + 0.1 * var


def _from_row_zero(scores, z):
    distance = (jnp.arange(z.T)[:, None] - jnp.arange(z.S)).astype(scores.dtype)
    return scores - right.slopes(z.N, scores.dtype)[:, None, None] * distance


def _distance_both_ways(scores, z):
    distance = jnp.abs(right.distance(z)).astype(scores.dtype)
    return scores - right.slopes(z.N, scores.dtype)[:, None, None] * distance


def _complex_turn(x, positions):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    angle = right.angles(positions, x.shape[-1], wide.dtype)
    pairs = jax.lax.complex(*jnp.split(wide, 2, axis=-1))
    turned = pairs * jnp.exp(1j * angle)[..., None, :]
    return jnp.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def _norm_by_moments(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(-1, keepdims=True) + LAYER_EPS) * scale + bias


def _by_dot_general(x, kernel, bias):
    return jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))) + bias


def _linear_by_sum(x, kernel, bias):
    return (x[..., None] * kernel).sum(-2) + bias


def _cap_by_exponential(x):
    return CAP * (1 - 2 / (jnp.exp(2 * x / CAP) + 1))


def _gelu_by_erfc(x):
    return x * jax.scipy.special.erfc(-x / 2**0.5) / 2


def _head_order(z):
    """Key heads reversed, and query heads with them."""
    return np.arange(z.N).reshape(z.K, z.G)[::-1].ravel()


def _permuted(weights, z):
    """The same order of heads in all four projections."""
    found, order = {}, _head_order(z)
    for layer in range(z.L):
        at = f"layers.{layer}.attn."
        for name, heads in (("q", order), ("k", np.arange(z.K)[::-1]), ("v", np.arange(z.K)[::-1])):
            for role in ("kernel", "bias"):
                w = weights[f"{at}{name}_proj.{role}"]
                by_head = w.reshape(*w.shape[:-1], -1, z.h)
                found[f"{at}{name}_proj.{role}"] = by_head[..., heads, :].reshape(w.shape)
        o = weights[f"{at}o_proj.kernel"]
        found[f"{at}o_proj.kernel"] = o.reshape(z.N, z.h, z.D)[order].reshape(o.shape)
    return found


def _alibi_in_order(scores, z):
    slopes = right.slopes(z.N, scores.dtype)[_head_order(z)]
    return scores - slopes[:, None, None] * right.distance(z).astype(scores.dtype)


REWRITES = [
    Rewrite("as it stands", Setup()),
    Rewrite("as it stands, square", Setup("square")),
    Rewrite("as it stands, one step with a cache", Setup("step")),
    Rewrite("as it stands, with dropout", Setup(options={"train": True})),
    Rewrite("as it stands, batch statistics", Setup("statistics", options={"train": True})),
    Rewrite(
        "running variance by n, as nnx has it",
        put(
            ("statistics", _by_n),
            pair="statistics",
            options={"train": True},
        ),
    ),
    Rewrite("scale on queries", put(("scale", lambda s, z: s), ("product", _scaled_queries))),
    Rewrite(
        "scale on queries, before they are turned",
        put(
            ("scale", lambda s, z: s),
            ("rotate_q", lambda x, p: right.rotate(x / x.shape[-1] ** 0.5, p)),
        ),
    ),
    Rewrite(
        "groups by an axis, nothing repeated",
        put(
            ("repeat_k", lambda x, times: x),
            ("repeat_v", lambda x, times: x),
            ("product", _grouped_product),
            ("mix", _grouped_mix),
        ),
    ),
    Rewrite(
        "heads tiled and put in order",
        put(("repeat_k", _tile_and_reorder), ("repeat_v", _tile_and_reorder)),
    ),
    Rewrite("softmax in blocks", put(("softmax", _in_blocks))),
    Rewrite("softmax less a constant", put(("drop_in", lambda s: s - 3.0))),
    Rewrite("softmax to base two, scores in base two", put(("softmax", _base_two))),
    Rewrite("softmax by a logarithm", put(("softmax", _by_logarithm))),
    Rewrite("mask added as -inf", put(("hide", _added))),
    Rewrite("mask of -1e4", put(("hide", _low_number))),
    Rewrite("ALiBi counted from row zero", put(("alibi", _from_row_zero))),
    Rewrite("ALiBi of both directions", put(("alibi", _distance_both_ways))),
    Rewrite(
        "positions counted from three", put(("rows", lambda p: p + 3), ("columns", lambda p: p + 3))
    ),
    Rewrite(
        "rotation by complex numbers", put(("rotate_q", _complex_turn), ("rotate_k", _complex_turn))
    ),
    Rewrite("norm by another formula", put(("layer_norm", _norm_by_moments))),
    Rewrite("products by dot_general", put(("linear", _by_dot_general))),
    Rewrite("products summed by hand", put(("linear", _linear_by_sum))),
    Rewrite("softcap by exponentials", put(("softcap", _cap_by_exponential))),
    Rewrite("GELU by erfc", put(("act", _gelu_by_erfc))),
    Rewrite(
        "heads in another order in all four weights",
        put(("alibi", _alibi_in_order), edit=_permuted),
    ),
]
