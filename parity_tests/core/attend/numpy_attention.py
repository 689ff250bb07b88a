"""Attention and its gradients in float64 by numpy alone: the truth that nobody's rounding is in."""

import numpy as np


def attention(q, k, v, cotangent, *, bias=None, seen=None, scale=None, lse_cotangent=None):
    """`out`, `lse` and the gradients of q, k, v and bias, by name; B T N H arrays, K divides N.

    `seen` is boolean and broadcasts to B N T S, as does `bias`. A row that sees nothing gives
    zeros and an lse of -inf.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    groups = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, groups, axis=2) for x in (k, v))  # B S N H
    logits = scale * np.einsum("btnh,bsnh->bnts", q, keys)
    scores = logits if bias is None else logits + bias
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = powers.sum(-1, keepdims=True)
    weights = powers / np.where(total == 0, 1, total)  # B N T S
    with np.errstate(divide="ignore"):
        lse = np.swapaxes((top + np.log(total))[..., 0], 1, 2)  # B T N
    out = np.einsum("bnts,bsnh->btnh", weights, values)

    pull = np.einsum("btnh,bsnh->bnts", cotangent, values)
    pull = pull - (weights * pull).sum(-1, keepdims=True)
    if lse_cotangent is not None:
        pull = pull + np.swapaxes(lse_cotangent, 1, 2)[..., None]
    pull = weights * pull  # B N T S, the gradient of the scores
    found = {
        "out": out,
        "lse": lse,
        "q": scale * np.einsum("bnts,bsnh->btnh", pull, keys),
        "k": gathered(scale * np.einsum("bnts,btnh->bsnh", pull, q), groups),
        "v": gathered(np.einsum("bnts,btnh->bsnh", weights, cotangent), groups),
    }
    if bias is not None:
        found["bias"] = narrowed(pull, np.shape(bias))
    return found


def gathered(x, groups):
    """The sum over the query heads that share a key head: B S N H to B S K H."""
    return x.reshape(*x.shape[:2], -1, groups, x.shape[3]).sum(3)


def narrowed(x, shape):
    """The sum over the axes along which an array of this shape was spread."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    along = tuple(i for i, n in enumerate(shape) if n == 1)
    return x.sum(axis=along, keepdims=True)
