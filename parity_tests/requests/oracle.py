"""Attention and all its gradients in numpy, operation by operation: the truth, and its noise.

`attention` runs in the dtype of its arrays. Every operation's result passes a hook: the identity
for the truth, `noise` for Monte Carlo arithmetic, which moves each result at random by at most one
unit in the last place, so that the spread of a few runs tells how well this input can be known. A
sum is one addition after the other, and each of them is moved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .masks import Indices
from .scores import Rounding, Step, added, identity, summed

HUGE = 1e30  # adding a logit to numbers beyond this rounds the logit away and nothing else


class Inputs(NamedTuple):
    """One attention, batch axes as one: q B T N H, k B S K H, v B S K h, all else broadcastable.

    `keep` is None or who survives the dropout, `rate` its rate; `empty` what a row gives that sees
    nothing, as of `attend`; `floats` and `ints` belong to `steps`; `do` and `dlse` are the
    cotangents, B T N h and B T N.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    seen: np.ndarray
    at: Indices
    steps: list[Step]
    floats: list[list[np.ndarray]]
    ints: list[list[np.ndarray]]
    scale: Any
    sinks: np.ndarray | None
    keep: np.ndarray | None
    rate: float
    empty: str
    do: np.ndarray
    dlse: np.ndarray


def noise(seed: int, eps: float) -> Rounding:
    """A hook that moves numbers by `eps * r` of their size, r within 1, and leaves fills alone."""
    drawn = np.random.RandomState(seed)

    def rnd(x, units=1):
        x = np.asarray(x)
        size = np.where(np.abs(x) < HUGE, x, 0)
        most = units * eps
        return (x + most * (2 * drawn.random_sample(x.shape) - 1) * size).astype(x.dtype)

    return rnd


def in_order(x: np.ndarray, units: float = 1) -> np.ndarray:
    """The hook that moves nothing and adds one after the other, where numpy adds in pairs."""
    return np.asarray(x)


def dot(a: np.ndarray, b: np.ndarray, rnd: Rounding) -> np.ndarray:
    """`a @ b`, one addition after the other if each has noise."""
    if rnd is identity:
        return a @ b
    total = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        total = rnd(total + a[..., i : i + 1] * b[..., i : i + 1, :])
    return total


def attention(given: Inputs, rnd: Rounding = identity) -> dict[str, Any]:
    """`o`, `lse` (B T N) and the gradients of q, k, v, scale, sinks and `floats`, by name.

    Rows that see nothing give zeros, or the mean of v if there is no sink, an lse of -inf (their
    sink, if there are sinks) and no gradients but those of that mean.
    """
    G = given.q.shape[2] // given.k.shape[2]
    q, k, v, do = (np.swapaxes(x, 1, 2) for x in (given.q, given.k, given.v, given.do))
    k, v = (np.repeat(x, G, axis=1) for x in (k, v))  # B N S H
    raw = dot(q, np.swapaxes(k, 2, 3), rnd)  # B N T S
    x, backs = rnd(raw * given.scale), []
    for step, floats, ints in zip(given.steps, given.floats, given.ints, strict=True):
        x, back = step.apply(x, floats, ints, given.at, rnd)
        backs.append(back)
    p, own, lse = _softmax(np.where(given.seen, x, -np.inf), given.sinks, rnd)
    mean = np.isneginf(lse)[..., None] & (given.empty == "mean")
    kept, to_kept = _dropout(np.where(mean, p.dtype.type(1 / k.shape[2]), p), given, rnd)
    found = {"o": np.swapaxes(dot(kept, v, rnd), 1, 2), "lse": np.swapaxes(lse, 1, 2)}

    dlse = np.swapaxes(given.dlse, 1, 2)  # B N T
    dp = to_kept(dot(do, np.swapaxes(v, 2, 3), rnd))
    change = rnd(added(rnd(p * dp), -1, rnd) - dlse)
    ds = rnd(p * rnd(dp - change[..., None]))
    if given.sinks is not None:
        found["sinks"] = -added(rnd(own * change), (0, 2), rnd)
    parts = []
    for back in backs[::-1]:
        ds, grads = back(ds)
        parts.append(grads)
    found["score"] = parts[::-1]
    found["scale"] = added(rnd(ds * raw), None, rnd)
    ds = rnd(ds * given.scale)
    found["q"] = np.swapaxes(dot(ds, k, rnd), 1, 2)
    for name, a, b in (("k", ds, q), ("v", kept, do)):
        heads = dot(np.swapaxes(a, 2, 3), b, rnd)  # B N S H
        heads = heads.reshape(heads.shape[0], -1, G, *heads.shape[2:])
        found[name] = np.swapaxes(added(heads, 2, rnd), 1, 2)
    return found


def plain(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    do: np.ndarray,
    *,
    bias: Any = None,
    seen: Any = True,
    scale: Any = None,
    dlse: Any = 0.0,
) -> dict[str, Any]:
    """`attention` of four-dimensional arrays under a mask and a bias, whose gradient is "bias"."""
    shape = (len(q), q.shape[2], q.shape[1], k.shape[1])
    steps = [] if bias is None else [Step("bias", lambda d: ([], []), lambda *_: None, _biased)]
    found = attention(
        Inputs(
            *(q, k, v),
            seen=np.broadcast_to(seen, shape),
            at=(),
            steps=steps,
            floats=[[np.asarray(bias, np.float64)] for _ in steps],
            ints=[[] for _ in steps],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            sinks=None,
            keep=None,
            rate=0.0,
            empty="zero",
            do=do,
            dlse=np.broadcast_to(dlse, q.shape[:-1]),
        )
    )
    return found if bias is None else {**found, "bias": found["score"][0][0]}


def _biased(x: np.ndarray, floats: list, ints: list, at: Any, rnd: Rounding) -> tuple[Any, Any]:
    return x + floats[0], lambda dy: (dy, [summed(dy, floats[0].shape, rnd)])


def _softmax(
    x: np.ndarray, sinks: np.ndarray | None, rnd: Rounding
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Weights, the sinks' weights and the log-sum-exp; zeros and -inf where all are -inf."""
    top = x.max(axis=-1)
    if sinks is not None:
        sinks = np.broadcast_to(sinks.reshape(1, -1, 1), top.shape)
        top = np.maximum(top, sinks)
    dead = np.isneginf(top)
    shift = np.where(dead, 0, top).astype(x.dtype)
    powers = rnd(np.exp(rnd(x - shift[..., None])))
    sum_ = added(powers, -1, rnd)
    own = None
    if sinks is not None:
        own = rnd(np.exp(rnd(sinks - shift)))
        sum_ = sum_ + own
    sum_ = rnd(np.where(dead, 1, sum_).astype(x.dtype))
    lse = np.where(dead, -np.inf, rnd(shift + rnd(np.log(sum_)))).astype(x.dtype)
    return rnd(powers / sum_[..., None]), None if own is None else rnd(own / sum_), lse


def _dropout(
    p: np.ndarray, given: Inputs, rnd: Rounding
) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The weights after dropout, and what leads their gradient back."""
    if given.keep is None:
        return p, lambda dp: dp
    if given.rate == 1:
        return np.zeros_like(p), np.zeros_like
    share = p.dtype.type(1 - given.rate)

    def drop(x):
        return np.where(given.keep, rnd(x / share), 0).astype(p.dtype)

    return drop(p), drop
