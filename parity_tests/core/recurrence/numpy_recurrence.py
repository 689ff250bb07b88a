"""Recurrences and the short convolution in numpy, token by token, with gradients: the oracle."""

import numpy as np


def forward(q, k, v, g, b, first, state, delta):
    """Outputs, and for each token (the state before it, the decayed state, the state after)."""
    outputs, kept = np.zeros_like(v), []
    for t in range(q.shape[1]):
        before = np.where(first[:, t, None, None, None], 0.0, state)
        decayed = np.exp(g[:, t])[..., None] * before
        lack = v[:, t] - np.einsum("bnh,bnhd->bnd", k[:, t], decayed) if delta else v[:, t]
        state = decayed + k[:, t, ..., None] * (b[:, t, ..., None] * lack)[..., None, :]
        outputs[:, t] = np.einsum("bnh,bnhd->bnd", q[:, t], state)
        kept.append((before, decayed, lack, state))
    return outputs, state, kept


def recurrence(q, k, v, g, b, first, state, delta, do, ds):
    """Outputs, last state, and the gradients of q, k, v, g, b and the first state.

    q, k `B T N H`, v `B T N h`, g `B T N H` or `B T N 1`, b `B T N`, first `B T`; do and ds are the
    cotangents of outputs and last state.
    """
    o, last, kept = forward(q, k, v, g, b, first, state, delta)
    dq, dk, dv, dg, db = (np.zeros_like(x) for x in (q, k, v, g, b))
    for t in reversed(range(q.shape[1])):
        before, decayed, lack, after = kept[t]
        ds = ds + q[:, t, ..., None] * do[:, t, ..., None, :]
        dq[:, t] = np.einsum("bnhd,bnd->bnh", after, do[:, t])
        strength = b[:, t, ..., None]
        dk[:, t] = np.einsum("bnhd,bnd->bnh", ds, strength * lack)
        du = np.einsum("bnh,bnhd->bnd", k[:, t], ds)
        db[:, t] = (du * lack).sum(-1)
        dv[:, t] = strength * du
        if delta:
            dk[:, t] -= np.einsum("bnhd,bnd->bnh", decayed, strength * du)
            ds = ds - k[:, t, ..., None] * (strength * du)[..., None, :]
        decay = np.exp(g[:, t])
        slope = decay * (ds * before).sum(-1)  # B N H
        dg[:, t] = slope if g.shape[-1] == q.shape[-1] else slope.sum(-1, keepdims=True)
        ds = np.where(first[:, t, None, None, None], 0.0, decay[..., None] * ds)
    return o, last, dq, dk, dv, dg, db, ds


def elementwise(x, g, first, state, dh, dlast):
    """Outputs, last state, and the gradients of x, g and the first state; a head a component."""
    one = np.ones((*x.shape, 1))  # B T D 1
    arrays = (one, one, x[..., None], g[..., None], one[..., 0], first, state[..., None, None])
    y, last, _, _, dx, dg, _, ds = recurrence(*arrays, False, dh[..., None], dlast[..., None, None])
    return y[..., 0], last[..., 0, 0], dx[..., 0], dg[..., 0], ds[..., 0, 0]


def convolution(x, weight, bias, first, state, dy, dlast):
    """Outputs, last state, and the gradients of x, weight, bias and the first state.

    x `B T D`, weight `D W`, first `B T`, state `B W-1 D`.
    """
    V = weight.shape[1] - 1
    whole = np.concatenate([state, x], axis=1)
    document = np.concatenate([np.zeros((len(x), V), int), first.cumsum(1)], axis=1)
    y, dwhole, dweight = np.tile(bias, (*x.shape[:2], 1)), np.zeros_like(whole), 0 * weight
    last, dbias = np.zeros_like(state), dy.sum((0, 1))
    for b, end in np.ndindex(len(x), whole.shape[1]):
        for at in range(max(0, end - V), end + 1):
            if end < V or document[b, at] != document[b, end]:
                continue
            column = V - (end - at)
            y[b, end - V] += weight[:, column] * whole[b, at]
            dwhole[b, at] += weight[:, column] * dy[b, end - V]
            dweight[:, column] += whole[b, at] * dy[b, end - V]
    for b, i in np.ndindex(len(x), V):
        if document[b, i - V] == document[b, -1]:
            last[b, i] = whole[b, i - V]
            dwhole[b, i - V] += dlast[b, i]
    return y, last, dwhole[:, V:], dweight, dbias, dwhole[:, :V]
