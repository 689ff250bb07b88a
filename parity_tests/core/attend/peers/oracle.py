"""Attention with everything that other projects' tests ask for, and all its gradients, by numpy.

`numpy_attention` extended: scores are a chain of a cap, ALiBi slopes and a bias, each with its own
gradient; sinks, an array scale and a recorded dropout are differentiated too. It works in the
dtype that it is given, so that `np.longdouble` is a truth for float64.
"""

import numpy as np

from parity_tests.core.attend.numpy_attention import gathered, narrowed


def attention(
    arrays, cotangents, *, seen=True, scale=None, chain=(), distance=None, keep=None, rate=0.0
):
    """Output, lse and the gradient of every array, by name.

    Args:
      arrays: "q", "k", "v" (B T N H, B S K H, B S K h), and by name what is learnt besides: "cap",
        "slopes" (N), "bias" (broadcasts to B N T S), "sinks" (N), "scale".
      cotangents: of the output, B T N h, and of the lse, B T N.
      scale: a number that is not learnt; None is `H ** -0.5`.
      seen: boolean, broadcasts to B N T S; a row that sees nothing gives zeros and an lse of -inf.
      chain: the names of the scores, in the order in which they change the logits.
      distance: `|q - k|` of every pair, T S, for the slopes.
      keep, rate: which weights survive dropout, and the rate.
    """
    q, k, v = (arrays[name] for name in "qkv")
    groups = q.shape[2] // k.shape[2]
    keys, values = (np.repeat(x, groups, axis=2) for x in (k, v))  # B S N H
    raw = product("btnh,bsnh->bnts", q, keys)
    scale = np.asarray(q.shape[3], q.dtype) ** -0.5 if scale is None else scale
    scale = arrays.get("scale", scale)
    steps = [scale * raw]
    for name in chain:
        steps.append(SCORES[name][0](steps[-1], arrays[name], distance))
    weights, share, lse = softmax(np.where(seen, steps[-1], -np.inf), arrays.get("sinks"))
    kept = 1 if keep is None else keep / (1 - np.asarray(rate, q.dtype))
    dropped = weights * kept

    do, dlse = cotangents
    pull = product("btnh,bsnh->bnts", do, values) * kept
    flow = (weights * pull).sum(-1, keepdims=True) - np.swapaxes(dlse, 1, 2)[..., None]
    pull = np.where(weights > 0, weights * (pull - flow), 0)  # the gradient of the scores
    found = {
        "out": product("bnts,bsnh->btnh", dropped, values),
        "lse": np.swapaxes(lse[..., 0], 1, 2),
        "v": gathered(product("bnts,btnh->bsnh", dropped, do), groups),
    }
    if "sinks" in arrays:
        found["sinks"] = -(share * flow).sum((0, 2, 3))
    for name, x in zip(reversed(chain), reversed(steps[:-1]), strict=True):
        pull, found[name] = SCORES[name][1](pull, x, arrays[name], distance)
    if "scale" in arrays:
        found["scale"] = (pull * raw).sum()
    found["q"] = scale * product("bnts,bsnh->btnh", pull, keys)
    found["k"] = gathered(scale * product("bnts,btnh->bsnh", pull, q), groups)
    return found


def softmax(scores, sinks):
    """Weights, the share of the sink and the lse, B N T S and B N T 1."""
    top = scores.max(-1, keepdims=True)
    sink = np.full_like(top, -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(sinks[:, None, None], top.shape)
    top = np.maximum(top, sink)
    shift = np.where(np.isneginf(top), 0, top)
    powers, rest = np.exp(scores - shift), np.exp(sink - shift)
    total = powers.sum(-1, keepdims=True) + rest
    some = np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        return powers / some, rest / some, shift + np.log(total)


def capped(x, cap, _):
    return cap * np.tanh(x / cap)


def capped_back(pull, x, cap, _):
    level = np.tanh(x / cap)
    slope = 1 - level**2
    return pull * slope, (pull * (level - slope * x / cap)).sum()


def slanted(x, slopes, distance):
    return x - slopes[:, None, None] * distance


def slanted_back(pull, x, slopes, distance):
    return pull, -(pull * distance).sum((0, 2, 3))


def biased(x, bias, _):
    return x + bias


def biased_back(pull, x, bias, _):
    return pull, narrowed(pull, np.shape(bias))


SCORES = {
    "cap": (capped, capped_back),
    "slopes": (slanted, slanted_back),
    "bias": (biased, biased_back),
}


def product(spec, a, b):
    """`einsum`; by BLAS where it knows the dtype."""
    return np.einsum(spec, a, b, optimize=a.dtype == np.float64)
