"""The recurrence and its gradients in numpy, one token after another: the oracle of this room."""

import numpy as np


def forward(q, k, v, g, b, first, state, delta):
    """Outputs, and for each token (the state before it, the decayed state, the state after)."""
    outputs, kept = [], []
    for t in range(q.shape[1]):
        before = np.where(first[:, t, None, None, None], 0.0, state)
        decayed = np.exp(g[:, t])[..., None] * before
        lack = v[:, t] - np.einsum("bnh,bnhd->bnd", k[:, t], decayed) if delta else v[:, t]
        state = decayed + k[:, t, ..., None] * (b[:, t, ..., None] * lack)[..., None, :]
        outputs.append(np.einsum("bnh,bnhd->bnd", q[:, t], state))
        kept.append((before, decayed, lack, state))
    return np.stack(outputs, 1), state, kept


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
