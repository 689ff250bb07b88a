"""Attention with other weights than softmax, or mixed heads, by the plain formula."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._internal.checks import checked_arguments
from ._internal.types import Sizes, frozen
from .backends.local import flat
from .dropout import Drop, DropoutMask
from .masks import FULL, Dense, Mask
from .masks.ranges import block_starts
from .normalisers import Normaliser
from .reference import modify_logits, scaled_logits, softmax, weighted_sum, zero_masked
from .rules import Request, Rules, bind_rules, rules_of, sizes_of
from .scores import IDENTITY, Score
from .taps import listening, tap

Mix = Callable[[Array], Array]
ROWS = 128  # queries of a block


@checked_arguments
def attend_by_weights(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B S K H"],
    v: Float[Array, "*B S K h"],
    *,
    normalise: Normaliser = softmax,
    mix_scores: Mix | None = None,
    mix_weights: Mix | None = None,
    mask: Mask | Array | None = FULL,
    score: Score | None = IDENTITY,
    scale: float | Array | None = None,
    dropout: Drop | None = None,
) -> Float[Array, "*B T N h"]:
    """`mix_weights(normalise(mask(score(mix_scores(scale * q.k))))) . v`, dropout before v.

    Use it for weights that `attend` cannot compute. It runs the plain formula on every device. More
    than 128 queries are processed in blocks of 128, with the weights of one block in memory. If a
    function mixes heads, inside `taps.listen()`, or with arrays on several devices, all T x S
    weights of each head are materialized. With the defaults it equals `attend`.

    A fully masked row gives zeros. Fully masked keys never reach outputs or gradients, whatever
    they hold. Masked weights are set to zero after mixing too. A
    mask per head applies to the heads after the mixing.

    Args:
      q, k, v: as in `attend`; K must divide N.
      normalise: from scores, in float32 or wider, to weights over the last axis: `softmax`,
        `sigmoid`, `entmax`, or a function of yours. It gets -inf at masked positions; its
        results there are replaced by zero.
      mix_scores, mix_weights: functions of all heads' logits and weights, `B N T S` -> `B N T S`,
        with flattened batch axes.
      mask, score, scale, dropout: as in `attend`.

    Raises:
      ValueError, TypeError: as `attend` does; ValueError if a function of these three gives another
        shape.

    Source: Shazeer et al., "Talking-Heads Attention", 2020, for the mixing of heads.

    >>> from flax_attn import sigmoid
    >>> q = jnp.zeros((3, 1, 2))
    >>> attend_by_weights(q, q, jnp.ones((3, 1, 1)), normalise=sigmoid).ravel().tolist()
    [1.5, 1.5, 1.5]
    """
    rules = rules_of(mask=mask, score=score, scale=scale, dropout=dropout)
    request = Request.of(q, k, v, rules)
    sizes, rules = request.sizes, bind_rules(request.q, request.k, request.rules)
    q, k, v = flat(sizes, request.q, request.k, request.v)  # B T N H, B S K H, B S K h
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    whole = partial(
        _by_weights, normalise=normalise, mix_scores=mix_scores, mix_weights=mix_weights
    )
    by_rows = mix_scores is None and mix_weights is None and not listening()
    if by_rows and isinstance(sizes.T, int) and sizes.T > ROWS and request.where.mesh.size <= 1:
        o = in_blocks(lambda q, at: whole(q, k, v, _of_queries(rules, sizes, at)), q)
    else:
        o = tap("context", whole(q, k, v, rules))  # B T N h
    return o.reshape(*sizes.batch, *o.shape[1:])


def in_blocks(
    attend: Callable[[Array, Array], Array], q: Float[Array, "B T N H"]
) -> Float[Array, "B T N h"]:
    """Maps `attend(queries, indices)` over blocks of `ROWS` queries, forward and backward.

    Blocks are rematerialized in the backward pass.

    Args:
      attend: maps `B ROWS N H` and `ROWS` integers to `B ROWS N h`.
      q: more than `ROWS` queries.
    """
    starts = block_starts(q.shape[1], ROWS)  # the last block may overlap the one before

    @jax.checkpoint
    def block(start: Array) -> Array:
        places = start + jnp.arange(ROWS, dtype=jnp.int32)
        return attend(jax.lax.dynamic_slice_in_dim(q, start, ROWS, axis=1), places)

    made = jax.lax.map(block, jnp.asarray(starts, jnp.int32))  # blocks, B ROWS N h
    first = jnp.moveaxis(made[:-1], 0, 1).reshape(q.shape[0], -1, *made.shape[3:])
    return jnp.concatenate([first, made[-1][:, first.shape[1] - starts[-1] :]], axis=1)


def _of_queries(rules: Rules, sizes: Sizes, at: Array) -> Rules:
    """Bound rules for the queries `at`, evaluated at their global indices."""
    b, n, _, k = sizes.iotas()
    q, drop = at.reshape(1, 1, -1, 1), rules.dropout
    visible = jnp.broadcast_to(rules.mask(b, n, q, k), (sizes.B, sizes.N, len(at), sizes.S))
    drop = None if drop is None else DropoutMask(drop.keep(b, n, q, k), drop.rate)
    return replace(rules, mask=Dense(visible), score=_AtQueries(rules.score, q), dropout=drop)


@frozen
class _AtQueries(Score):
    """A bound score for some of the queries, evaluated at their global indices."""

    score: Score
    at: Any

    def grid(self, logits, sizes):
        b, n, _, k = sizes.iotas()
        return self.score(logits, b, n, self.at, k)


def _by_weights(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K h"],
    rules: Rules,
    normalise: Normaliser,
    mix_scores: Mix | None,
    mix_weights: Mix | None,
) -> Float[Array, "B T N h"]:
    """The plain formula with bound rules."""
    sizes = sizes_of(q, k)
    visible = jnp.asarray(rules.mask.grid(sizes))
    if mix_scores is None:
        q, k, v = zero_masked(q, k, v, rules)
    else:  # mixed logits depend on all heads, values on their own head
        anybody = replace(rules, mask=Dense(_visible_to_any_head(visible)).bind(sizes))
        (q, k, _), (_, _, v) = zero_masked(q, k, v, anybody), zero_masked(q, k, v, rules)
    logits = _same_shape("mix_scores", mix_scores, scaled_logits(q, k, rules.scale))
    scores = tap(
        "scores", jnp.where(visible, modify_logits(rules.score, logits, visible, sizes), -jnp.inf)
    )
    weights = jnp.where(visible, _same_shape("normalise", normalise, scores), 0)  # B N T S
    mixed = _same_shape("mix_weights", mix_weights, tap("weights", weights))
    weights = jnp.where(visible, mixed, 0)
    if rules.dropout is not None:
        keep = jnp.broadcast_to(rules.dropout.grid(sizes), weights.shape)
        weights = rules.dropout.apply(weights, tap("keep", keep))
    return weighted_sum(weights, v).astype(q.dtype)


def _visible_to_any_head(visible: Bool[Array, "..."]) -> Bool[Array, "#B 1 #T #S"]:
    """True where visible to any head, of a grid that broadcasts to B N T S."""
    return visible.reshape((1,) * (4 - visible.ndim) + visible.shape).any(axis=1, keepdims=True)


def _same_shape(name: str, function: Mix | None, x: Array) -> Array:
    """`function(x)` in the dtype of x; raises ValueError if it has another shape."""
    if function is None:
        return x
    y = function(x)
    if y.shape != x.shape:
        raise ValueError(f"{name} must keep the shape B N T S; got {y.shape} for {x.shape}.")
    return y.astype(x.dtype)
