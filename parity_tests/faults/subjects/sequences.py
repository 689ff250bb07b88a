"""Losses: a linear-chain CRF, the head of a variational autoencoder."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port
from .draws import draw, integers, normal, torch

F = torch.nn.functional


class TorchCRF(torch.nn.Module):
    """The negative log likelihood of tags under a linear chain (Lafferty et al. 2001)."""

    def __init__(self):
        super().__init__()
        self.start, self.end = (torch.nn.Parameter(torch.randn(5)) for _ in range(2))
        self.transitions = torch.nn.Parameter(torch.randn(5, 5))

    def gold(self, emissions, tags, mask):
        rows, last = torch.arange(len(tags)), mask.long().sum(1) - 1
        score = self.start[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
        for t in range(1, tags.shape[1]):
            step = self.transitions[tags[:, t - 1], tags[:, t]] + emissions[rows, t, tags[:, t]]
            score = torch.where(mask[:, t], score + step, score)
        return score + self.end[tags[rows, last]]

    def forward(self, emissions, tags, mask):  # B T N, B T, B T
        alpha = self.start + emissions[:, 0]
        for t in range(1, tags.shape[1]):
            ways = alpha[:, :, None] + self.transitions + emissions[:, t, None]
            alpha = torch.where(mask[:, t, None], torch.logsumexp(ways, dim=1), alpha)
        loss = torch.logsumexp(alpha + self.end, dim=1) - self.gold(emissions, tags, mask)
        return loss, loss.sum() / mask.sum()


class CRF(nnx.Module):
    """The same: the tags' score in one gather, all ways by a scan."""

    def __init__(self, *, rngs):
        self.start, self.end = nnx.Param(jnp.zeros(5)), nnx.Param(jnp.zeros(5))
        self.transitions = nnx.Param(jnp.zeros((5, 5)))

    def gold(self, emissions, tags, mask):
        kept = mask.astype(emissions.dtype)
        emitted = jnp.take_along_axis(emissions, tags[..., None], axis=-1)[..., 0]
        moved = self.transitions[...][tags[:, :-1], tags[:, 1:]]
        last = jnp.sum(mask, axis=1, keepdims=True) - 1
        end = jnp.take_along_axis(tags, last, axis=1)[:, 0]
        score = jnp.sum(emitted * kept, axis=1) + jnp.sum(moved * kept[:, 1:], axis=1)
        return score + self.start[...][tags[:, 0]] + self.end[...][end]

    def __call__(self, emissions, tags, mask):  # B T N, B T, B T
        transitions = self.transitions[...]

        def step(alpha, at):
            emitted, seen = at
            ways = alpha[:, :, None] + transitions[None]
            most = jax.lax.stop_gradient(jnp.max(ways, axis=1, keepdims=True))
            total = jnp.log(jnp.sum(jnp.exp(ways - most), axis=1)) + most[:, 0]
            return jnp.where(seen[:, None], total + emitted, alpha), None

        steps = jnp.swapaxes(emissions, 0, 1)[1:], jnp.swapaxes(mask, 0, 1)[1:]
        alpha, _ = jax.lax.scan(step, self.start[...] + emissions[:, 0], steps)
        total = jax.nn.logsumexp(alpha + self.end[...], axis=-1)
        loss = total - self.gold(emissions, tags, mask)
        return loss, jnp.sum(loss) / jnp.sum(mask)


class TorchVAE(torch.nn.Module):
    """A normal and a categorical code, reparameterised, and the terms of the loss."""

    def __init__(self):
        super().__init__()
        self.code = torch.nn.Linear(11, 8)
        self.logits = torch.nn.Linear(11, 6)
        self.decode = torch.nn.Linear(10, 11)

    def forward(self, x, noise, gumbel):  # B D, B Z, B K
        mean, log_variance = self.code(x).chunk(2, dim=-1)
        z = mean + torch.exp(0.5 * log_variance) * noise
        logits = self.logits(x)
        soft = torch.softmax((logits + gumbel) / 0.7, dim=-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        choice = hard - soft.detach() + soft
        y = self.decode(torch.cat([z, choice], dim=-1))
        rebuilt = F.binary_cross_entropy_with_logits(y, torch.sigmoid(x), reduction="none").sum(-1)
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        shares = torch.softmax(logits, dim=-1)
        other = (shares * (torch.log(shares + 1e-6) - np.log(1 / 6))).sum(-1)
        return y, choice, (rebuilt + 0.3 * (kl + other)).mean()


class VAE(nnx.Module):
    """The same, its cross entropy and its softmax written out."""

    def __init__(self, *, rngs):
        self.mean = nnx.Linear(11, 4, rngs=rngs)
        self.log_variance = nnx.Linear(11, 4, rngs=rngs)
        self.logits = nnx.Linear(11, 6, rngs=rngs)
        self.decode = nnx.Linear(10, 11, rngs=rngs)

    def __call__(self, x, noise, gumbel):  # B D, B Z, B K
        mean, log_variance = self.mean(x), self.log_variance(x)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        logits = self.logits(x)
        soft = jax.nn.softmax((logits + gumbel) / 0.7, axis=-1)
        hard = jax.nn.one_hot(jnp.argmax(soft, axis=-1), 6, dtype=soft.dtype)
        choice = hard + soft - jax.lax.stop_gradient(soft)
        y = self.decode(jnp.concatenate([z, choice], axis=-1))
        target = jax.nn.sigmoid(x)
        rebuilt = jnp.maximum(y, 0.0) - y * target + jnp.log1p(jnp.exp(-jnp.abs(y)))
        kl = 0.5 * (mean**2 + jnp.exp(log_variance) - 1.0 - log_variance)
        shares = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
        shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        other = shares * (jnp.log(shares + 1e-6) + jnp.log(6.0))
        kl = jnp.sum(kl, axis=-1) + jnp.sum(other, axis=-1)
        return y, choice, jnp.mean(jnp.sum(rebuilt, axis=-1) + 0.3 * kl, axis=0)


def gumbel(seed, *shape):
    drawn = draw.stream(seed, "trial/gumbel").random_sample(shape)
    return -np.log(-np.log(drawn))


PORTS = [
    Port(
        "CRF",
        TorchCRF,
        CRF,
        lambda seed: (
            normal(seed, "crf", 4, 7, 5),
            integers(seed, "tags", 5, 4, 7),
            np.arange(7) < np.array([[7], [5], [2], [1]]),
        ),
    ),
    Port(
        "VAE",
        TorchVAE,
        VAE,
        lambda seed: (normal(seed, "vae", 3, 11), normal(seed, "noise", 3, 4), gumbel(seed, 3, 6)),
        (
            Rule("code.weight -> {mean,log_variance}.kernel", "(n o) i -> n i o"),
            Rule("code.bias -> {mean,log_variance}.bias", "(n o) -> n o"),
        ),
    ),
]
