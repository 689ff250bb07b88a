"""Attention on both sides, every step of it open to a change."""

import math

import jax
import jax.numpy as jnp

from flax_attn.taps import tap

from .pair import torch

F = torch.nn.functional


def same(x):
    return x


def split(y, heads):
    """Torch's heads, B N T H."""
    return y.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(y):
    return y.transpose(1, 2).flatten(-2)


def attend(q, k, v, modify_logits=same, weighed=same):
    """Torch's plain attention on B N T H, `modify_logits` between product and softmax."""
    scores = modify_logits(q @ k.mT / math.sqrt(q.shape[-1]))
    return weighed(torch.softmax(scores, dim=-1)) @ v


def f_split(y, heads):
    """Flax's heads, B T N H."""
    return y.reshape(*y.shape[:-1], heads, -1)


def f_merge(y):
    return y.reshape(*y.shape[:-2], -1)


def f_scores(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def f_scaled(q, k):
    return f_scores(q, k) / math.sqrt(q.shape[-1])


def f_attend(q, k, v, modify_logits=same, weighed=same, product=f_scaled, softmax=jax.nn.softmax):
    """The same in Flax on B T N H, every point of it a tap."""
    q, k, v = tap("query", q), tap("key", k), tap("value", v)
    weights = tap("weights", softmax(tap("scores", modify_logits(product(q, k)))))
    return tap("context", jnp.einsum("bnts,bsnh->btnh", weighed(weights), v))


def qkv(m, x, heads, memory=None, kv_heads=None):
    """Torch's queries, keys and values."""
    y = x if memory is None else memory
    return split(m.q(x), heads), split(m.k(y), kv_heads or heads), split(m.v(y), kv_heads or heads)


def f_qkv(m, x, heads, memory=None, kv_heads=None):
    """Flax's queries, keys and values."""
    y, few = x if memory is None else memory, kv_heads or heads
    return f_split(m.q(x), heads), f_split(m.k(y), few), f_split(m.v(y), few)
