"""Blocks for graphs and sets: graph attention, the Set Transformer's induced points."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import draw, normal, torch

F = torch.nn.functional


class TorchGAT(torch.nn.Module):
    """A graph attention layer (Velickovic et al. 2018) of two heads, which it concatenates."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Linear(5, 6, bias=False)
        self.source = torch.nn.Parameter(torch.randn(2, 3))
        self.target = torch.nn.Parameter(torch.randn(2, 3))
        self.bias = torch.nn.Parameter(torch.zeros(6))

    def forward(self, x, edges):  # T D, T T
        h = self.weight(x).unflatten(-1, (2, 3))  # T N H
        source, target = (h * self.source).sum(-1), (h * self.target).sum(-1)
        scores = F.leaky_relu(source[:, None] + target[None, :], 0.2)  # T S N
        scores = scores.masked_fill(~edges[..., None], -9e15)
        weights = torch.softmax(scores, dim=1)
        out = torch.einsum("tsn,snh->tnh", weights, h).flatten(1)
        return F.elu(out + self.bias)


class GAT(nnx.Module):
    """The same, heads first, its softmax written out."""

    def __init__(self, *, rngs):
        self.weight = nnx.Param(jnp.zeros((2, 5, 3)))
        self.source = nnx.Param(jnp.zeros((2, 3)))
        self.target = nnx.Param(jnp.zeros((2, 3)))
        self.bias = nnx.Param(jnp.zeros(6))

    def __call__(self, x, edges):  # T D, T T
        h = jnp.einsum("td,ndh->nth", x, self.weight[...])
        source = jnp.sum(h * self.source[...][:, None], axis=-1)
        target = jnp.einsum("nth,nh->nt", h, self.target[...])
        scores = source[:, :, None] + target[:, None, :]  # N T S
        scores = jnp.where(scores > 0, scores, 0.2 * scores)
        scores = jnp.where(edges[None], scores, -jnp.inf)
        most = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - most)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        out = jnp.swapaxes(weights @ h, 0, 1)
        y = out.reshape(out.shape[0], -1) + self.bias[...]
        return jnp.where(y > 0, y, jnp.expm1(jnp.minimum(y, 0.0)))


def edges(seed, size):
    """A directed graph with an edge from each node to itself."""
    drawn = draw.stream(seed, "trial/edges").random_sample((size, size))
    return (drawn < 0.4) | np.eye(size, dtype=bool)


class TorchMAB(torch.nn.Module):
    """Attention of a set to another, with its feed forward."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, torch.nn.Linear(6, 6))
        self.ln0, self.ln1 = torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)

    def forward(self, x, y):  # B T D, B S D
        q, k, v = (torch.cat(z.split(2, 2)) for z in (self.q(x), self.k(y), self.v(y)))
        weights = torch.softmax(q @ k.mT / 6**0.5, dim=2)
        out = self.ln0(torch.cat((q + weights @ v).split(len(x)), dim=2))
        return self.ln1(out + F.relu(self.o(out)))


class TorchISAB(torch.nn.Module):
    """Set attention by induced points (Lee et al. 2019)."""

    def __init__(self):
        super().__init__()
        self.points = torch.nn.Parameter(torch.randn(1, 5, 6))
        self.mab0, self.mab1 = TorchMAB(), TorchMAB()

    def forward(self, x):  # B T D
        return self.mab1(x, self.mab0(self.points.repeat(len(x), 1, 1), x))


class MAB(nnx.Module):
    """The same, heads in an axis, the queries added to what they attend to."""

    def __init__(self, *, rngs):
        self.q = nnx.LinearGeneral(6, (3, 2), rngs=rngs)
        self.k = nnx.LinearGeneral(6, (3, 2), rngs=rngs)
        self.v = nnx.LinearGeneral(6, (3, 2), rngs=rngs)
        self.o = nnx.Linear(6, 6, rngs=rngs)
        self.ln0 = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)
        self.ln1 = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)

    def __call__(self, x, y):  # B T D, B S D
        q, k, v = self.q(x), self.k(y), self.v(y)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(6.0)
        weights = jax.nn.softmax(scores, axis=-1)
        out = q + jnp.einsum("bnts,bsnh->btnh", weights, v)
        out = self.ln0(out.reshape(*x.shape[:2], 6))
        return self.ln1(out + jax.nn.relu(self.o(out)))


class ISAB(nnx.Module):
    """The same."""

    def __init__(self, *, rngs):
        self.points = nnx.Param(jnp.zeros((5, 6)))
        self.mab0, self.mab1 = MAB(rngs=rngs), MAB(rngs=rngs)

    def __call__(self, x):  # B T D
        points = jnp.broadcast_to(self.points[...], (x.shape[0], 5, 6))
        induced = self.mab0(points, x)
        return self.mab1(x, induced)


PORTS = [
    Port(
        "GAT",
        TorchGAT,
        GAT,
        lambda seed: (normal(seed, "gat", 7, 5), edges(seed, 7)),
        (Rule("weight.weight -> weight", "(n h) i -> n i h", n=2),),
    ),
    Port(
        "ISAB",
        TorchISAB,
        ISAB,
        lambda seed: (normal(seed, "isab", 4, 11, 6),),
        (
            Rule("points -> points", "1 p d -> p d"),
            Rule("*.{q,k,v} -> *.{q,k,v}"),
        ),
    ),
]
