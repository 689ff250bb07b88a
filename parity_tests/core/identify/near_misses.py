"""Modules that look like attention and are none of ours."""

import torch
from torch import nn
from torch.nn import functional as F

from .others import HEAD_DIM, HEADS, WIDTH, Projected, other

SCALE = HEAD_DIM**-0.5


class CrossCovariance(Projected):
    """Channels attend to channels."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def mix(self, q, k, v):
        q, k = F.normalize(q, dim=2), F.normalize(k, dim=2)
        return v @ (q.mT @ k * self.temperature).softmax(-1).mT


class Latent(nn.Module):
    """Keys and values are expanded from a small normed latent, a rotary part apart from them."""

    def __init__(self, rank=14, rope=4):
        super().__init__()
        self.rank, self.rope = rank, rope
        self.q_proj = nn.Linear(WIDTH, HEADS * (HEAD_DIM + rope), bias=False)
        self.kv_a = nn.Linear(WIDTH, rank + rope, bias=False)
        self.kv_norm, self.kv_b = nn.RMSNorm(rank, eps=1e-6), nn.Linear(rank, 2 * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def turn(self, x):
        angles = torch.outer(torch.arange(x.shape[2]).to(x), 10.0 ** -torch.arange(self.rope // 2))
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a(x).split([self.rank, self.rope], -1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        k_rope = self.turn(k_rope[:, None]).expand(-1, HEADS, -1, -1)
        q = torch.cat((q[..., :HEAD_DIM], self.turn(q[..., HEAD_DIM:])), -1)
        y = F.scaled_dot_product_attention(q, torch.cat((k, k_rope), -1), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Differential(Projected):
    """Two softmaxes of half heads, one subtracted from the other."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def mix(self, q, k, v):
        halves = zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)
        first, second = ((a @ b.mT * (HEAD_DIM / 2) ** -0.5).softmax(-1) for a, b in halves)
        return F.rms_norm((first - (0.8 + self.factor) * second) @ v, (HEAD_DIM,)) * 0.2


class SlotAttention(Projected):
    """The softmax is over queries; then each query's weights are divided by their sum."""

    def mix(self, q, k, v):
        weights = (q @ k.mT * SCALE).softmax(dim=-2) + 1e-8
        return weights / weights.sum(-1, keepdim=True) @ v


class RandomFeatures(Projected):
    """Positive random features of a softmax, which they only come near."""

    def __init__(self, features=17):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("omega", torch.randn(HEAD_DIM, features, generator=generator))

    def features(self, x):
        x = x * SCALE**0.5
        return torch.exp(x @ self.omega - x.square().sum(-1, keepdim=True) / 2) + 1e-6

    def mix(self, q, k, v):
        q, k = self.features(q), self.features(k)
        return q @ (k.mT @ v) / (q @ k.sum(2)[..., None])


class WrongAxis(Projected):
    """The softmax is over queries."""

    def mix(self, q, k, v):
        return (q @ k.mT * SCALE).softmax(dim=-2) @ v


class HeadSoftmax(Projected):
    """The softmax is over heads."""

    def mix(self, q, k, v):
        return (q @ k.mT * SCALE).softmax(dim=1) @ v


class TopKeys(Projected):
    """The three largest weights of each query are kept and not renormalised."""

    def mix(self, q, k, v):
        weights = (q @ k.mT * SCALE).softmax(dim=-1)
        least = weights.topk(3, dim=-1).values[..., -1:]
        return weights.where(weights >= least, 0.0) @ v


class Hopfield(Projected):
    """The query is updated three times before it reads values."""

    def mix(self, q, k, v):
        for _ in range(3):
            q = (q @ k.mT * SCALE).softmax(-1) @ k
        return (q @ k.mT * SCALE).softmax(-1) @ v


class LearnedTemperature(Projected):
    """Cosines times a temperature that each head learns, clamped."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(HEADS, 1, 1))

    def mix(self, q, k, v):
        cosine = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        return (cosine * self.logit_scale.clamp(max=4.6).exp()).softmax(-1) @ v


class TalkingHeads(Projected):
    """Heads are mixed before the softmax and after it."""

    def __init__(self):
        super().__init__()
        self.before = nn.Parameter(torch.zeros(HEADS, HEADS))
        self.after = nn.Parameter(torch.zeros(HEADS, HEADS))

    def mix(self, q, k, v):
        logits = torch.einsum("bnts,nm->bmts", q @ k.mT * SCALE, self.before)
        return torch.einsum("bnts,nm->bmts", logits.softmax(-1), self.after) @ v


class SigmoidWeights(Projected):
    def mix(self, q, k, v):
        logits = q @ k.mT * SCALE - torch.log(torch.tensor(float(q.shape[2])))
        return logits.sigmoid() @ v


class AdditiveLogit(Projected):
    """Bahdanau's logit, of a small MLP."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(HEAD_DIM, 1, bias=False)

    def mix(self, q, k, v):
        logits = self.score(torch.tanh(q[:, :, :, None] + k[:, :, None])).squeeze(-1)
        return logits.softmax(-1) @ v


class GaussianKernel(Projected):
    """Logits are minus squared distances, which differ from products by the key's length."""

    def mix(self, q, k, v):
        return (-torch.cdist(q, k).square() * SCALE).softmax(-1) @ v


class SquaredRelu(Projected):
    def mix(self, q, k, v):
        return F.relu(q @ k.mT * SCALE).square() / q.shape[2] @ v


class SineQueries(Projected):
    """A matrix that heads share and a sine change the queries, so that logits are not bilinear."""

    def __init__(self):
        super().__init__()
        self.between = nn.Parameter(torch.zeros(HEAD_DIM, HEAD_DIM))

    def mix(self, q, k, v):
        return (torch.sin(q @ self.between) @ k.mT * SCALE).softmax(-1) @ v


class Synthesizer(nn.Module):
    """The weights come from each token alone, without a key."""

    def __init__(self, longest=13):
        super().__init__()
        self.logits = nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU(), nn.Linear(20, longest))
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights = self.logits(x)[..., : x.shape[1]].softmax(-1)
        return self.out(weights @ self.value(x))


class PooledQuery(nn.Module):
    """One learned query, whose output is added to every token."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights = (self.key(x) @ self.query * WIDTH**-0.5).softmax(1)
        return x + (weights[..., None] * self.value(x)).sum(1, keepdim=True)


class Sparsemax(Projected):
    """The weights are the nearest point of the simplex, instead of a softmax."""

    def mix(self, q, k, v):
        z = q @ k.mT * SCALE
        ordered = z.sort(-1, descending=True).values
        total, rank = ordered.cumsum(-1), torch.arange(1, z.shape[-1] + 1).to(z)
        size = (1 + rank * ordered > total).sum(-1, keepdim=True)
        threshold = (total.gather(-1, size - 1) - 1) / size
        return (z - threshold).clamp(min=0) @ v


class KeyConvolution(Projected):
    """Keys pass a causal convolution over tokens before the product."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def mix(self, q, k, v):
        rows = F.pad(k.mT.flatten(1, 2), (2, 0))
        k = self.conv(rows).unflatten(1, (HEADS, HEAD_DIM)).mT
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


NEAR_MISSES = [
    other("cross_covariance", CrossCovariance, "softmax over channels"),
    other("latent", Latent, "keys and values from a small latent, as DeepSeek's"),
    other("differential", Differential, "two softmaxes subtracted"),
    other("slot_attention", SlotAttention, "softmax over queries, then divided by sums over keys"),
    other("random_features", RandomFeatures, "Performer's positive features"),
    other("softmax_over_queries", WrongAxis, "softmax over the wrong axis"),
    other("softmax_over_heads", HeadSoftmax, "softmax over the axis of heads"),
    other("top_weights", TopKeys, "the largest weights alone, not renormalised"),
    other("hopfield", Hopfield, "three updates of the query"),
    other("learned_temperature", LearnedTemperature, "cosines times a learned factor per head"),
    other("talking_heads", TalkingHeads, "two matrices that mix heads"),
    other("sigmoid_weights", SigmoidWeights, "sigmoid instead of softmax"),
    other("additive_logit", AdditiveLogit, "an MLP of q + k"),
    other("gaussian_kernel", GaussianKernel, "softmax of minus squared distances"),
    other("squared_relu", SquaredRelu, "squared ReLU, divided by the length"),
    other("sine_queries", SineQueries, "a matrix and a sine between q and k"),
    other("synthesizer", Synthesizer, "weights of each token alone"),
    other("pooled_query", PooledQuery, "one learned query for the whole sequence"),
    other("sparsemax", Sparsemax, "sparsemax over keys"),
    other("convolved_keys", KeyConvolution, "a convolution over tokens after the key projection"),
]
