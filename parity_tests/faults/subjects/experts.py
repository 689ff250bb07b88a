"""Routing to two experts of limited capacity, as in GShard."""

import jax
import jax.numpy as jnp
from flax import nnx

from ...port import Port
from .draws import normal, torch

F = torch.nn.functional
CAPACITY = 3


class TorchExperts(torch.nn.Module):
    """GShard's routing (Lepikhin et al. 2020): tokens beyond an expert's capacity are dropped."""

    def __init__(self):
        super().__init__()
        self.router = torch.nn.Linear(6, 5, bias=False)
        self.up = torch.nn.Parameter(torch.randn(5, 6, 7))
        self.down = torch.nn.Parameter(torch.randn(5, 7, 6))

    def forward(self, x):  # S D
        gates = torch.softmax(self.router(x), dim=-1)  # S E
        first = F.one_hot(gates.argmax(-1), 5)
        second = F.one_hot(gates.masked_fill(first.bool(), -1.0).argmax(-1), 5)
        loss = 5 * (gates.mean(0) * first.to(x.dtype).mean(0)).sum()
        places = first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0)
        masks = [m * (p < CAPACITY) for m, p in zip((first, second), places, strict=True)]
        shares = [(gates * m).sum(-1) for m in masks]
        total = (shares[0] + shares[1]).clamp(min=torch.finfo(x.dtype).eps)
        combine = 0
        for share, mask, place in zip(shares, masks, places, strict=True):
            slots = F.one_hot((place * mask).sum(-1), CAPACITY)
            kept = mask[:, :, None] * slots[:, None]
            combine = combine + (share / total)[:, None, None] * kept
        sent = torch.einsum("sec,sd->ecd", (combine > 0).to(x.dtype), x)
        y = torch.bmm(F.relu(torch.bmm(sent, self.up)), self.down)
        return torch.einsum("sec,ecd->sd", combine, y), loss


class Experts(nnx.Module):
    """The same, both choices stacked, the first ones of all tokens before the second ones."""

    def __init__(self, *, rngs):
        self.router = nnx.Linear(6, 5, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jnp.zeros((5, 6, 7)))
        self.down = nnx.Param(jnp.zeros((5, 7, 6)))

    def __call__(self, x):  # S D
        gates = jax.nn.softmax(self.router(x), axis=-1)  # S E
        shares, chosen = jax.lax.top_k(gates, 2)
        masks = jax.nn.one_hot(chosen.T, 5, dtype=x.dtype)  # 2 S E
        loss = 5.0 * jnp.sum(jnp.mean(gates, axis=0) * jnp.mean(masks[0], axis=0))
        places = jnp.cumsum(masks.reshape(-1, 5), axis=0).reshape(masks.shape) - 1.0
        masks = jnp.where(places < CAPACITY, masks, 0.0)
        place = jnp.sum(places * masks, axis=-1).astype(jnp.int32)
        slots = jax.nn.one_hot(place, CAPACITY, dtype=x.dtype)  # 2 S C
        shares = shares.T * jnp.sum(masks, axis=-1)
        total = jnp.sum(shares, axis=0)
        shares = shares / jnp.maximum(total, jnp.finfo(x.dtype).eps)
        kept = jnp.einsum("kse,ksc->ksec", masks, slots)
        combine = jnp.einsum("ks,ksec->sec", shares, kept)
        sent = jnp.einsum("ksec,sd->ecd", kept, x)
        y = jax.nn.relu(jnp.einsum("ecd,edf->ecf", sent, self.up[...]))
        y = jnp.einsum("ecf,efd->ecd", y, self.down[...])
        return jnp.einsum("sec,ecd->sd", combine, y), loss


PORTS = [
    Port("Experts", TorchExperts, Experts, lambda seed: (normal(seed, "experts", 11, 6),)),
]
