"""Steps of several twins, as on a whiteboard."""

import torch


def present(x, valid):
    """x, zero for the tokens that are not there."""
    return x if valid is None else x.masked_fill(~valid.unsqueeze(-1), 0.0)  # *B T D


def placed(layer, x, norm, positions):
    """Heads, normed and turned in the layer's order."""
    x = x.unflatten(-1, (-1, layer.head_dim))  # *B T N H
    if norm and not layer.norm_after_rotary:
        x = norm(x)  # *B T N H
    x = clamped(x, getattr(layer, "clip_qkv", None))  # *B T N H
    x = layer.rotary(x, positions) if layer.rotary else x  # *B T N H
    return norm(x) if norm and layer.norm_after_rotary else x  # *B T N H


def clamped(x, bound):
    """x, whose components are from -bound to bound."""
    return x if bound is None else x.clamp(-bound, bound)


def seen(mask, valid, scores):
    """Where a query may look: by the mask, causal if None, and at tokens that are there."""
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()  # T T
    mask = mask if valid is None else mask & valid[..., None, None, :]  # *B N T T
    return mask.expand(scores.shape)  # *B N T T


def scored(logits, softcap, slopes):
    """Logits, capped, and less what ALiBi takes by distance."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)  # *B N T T
    if slopes is not None:
        places = torch.arange(logits.shape[-1])  # T
        distance = (places[:, None] - places).abs()  # T T
        slopes = torch.as_tensor(slopes).to(logits.dtype)  # N
        logits = logits - slopes[:, None, None] * distance  # *B N T T
    return logits


def softmax(scores, sinks=None):
    """Over the keys, and a head's sink where there is one."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)  # *B N T T
    column = sinks[:, None, None].expand(*scores.shape[:-1], 1)  # *B N T 1
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]  # *B N T T


def masked(scores, mask, empty="zero"):
    """Scores, the hidden ones so low that a softmax makes them zero."""
    hidden = torch.finfo(scores.dtype).min if empty == "mean" else -torch.inf
    return scores.masked_fill(~mask, hidden)  # *B N T T


def emptied(weights, mask, empty="zero"):
    """Weights, zero in a row that may look at nothing, unless the mean was asked for there."""
    if empty == "mean":
        return weights
    return weights.masked_fill(~mask.any(dim=-1, keepdim=True), 0.0)  # *B N T T
