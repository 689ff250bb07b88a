"""Modules that mix tokens, or do not, without attention's softmax over keys."""

import torch
from torch import nn
from torch.nn import functional as F

from .subject import Inputs, Rng, Subject, drawn, tokens

WIDTH, HEADS, HEAD_DIM = 24, 3, 8
LONGEST = 13  # tokens of modules whose weights have the length of the sequence


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH))

    def forward(self, x):
        return self.net(x)


class GatedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 50, bias=False), nn.Linear(WIDTH, 50, bias=False)
        self.w2 = nn.Linear(50, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class ConvBlock(nn.Module):
    """Pointwise, gated, depthwise, norm, pointwise."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        y = self.depthwise(F.glu(self.expand(x.mT), dim=1))
        return self.project(F.silu(self.norm(y.mT)).mT).mT


class RecurrentWrapper(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.out = kind(WIDTH, 20, batch_first=True), nn.Linear(20, WIDTH)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


class Projected(nn.Module):
    """q, k and v of heads, `B N T H`; subclasses compute the outputs of heads."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            proj(x).unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.mix(q, k, v).transpose(1, 2).flatten(2))


class EluLinear(Projected):
    def mix(self, q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bnsd,bnse->bnde", k, v)
        norm = torch.einsum("bntd,bnd->bnt", q, k.sum(2))
        return torch.einsum("bntd,bnde->bnte", q, state) / norm[..., None]


class CausalLinear(Projected):
    """Prefix sums of outer products."""

    def mix(self, q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = (k[..., None] * v[..., None, :]).cumsum(2)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return (q[..., None, :] @ state).squeeze(-2) / norm


class Retention(Projected):
    def mix(self, q, k, v):
        i = torch.arange(q.shape[2]).to(q)
        decay = 1 - 2.0 ** (-3 - torch.arange(HEADS).to(q))
        distance = i[:, None] - i
        weight = decay[:, None, None] ** distance.clamp(min=0) * (distance >= 0)
        return F.rms_norm((q @ k.mT * HEAD_DIM**-0.5 * weight) @ v, (HEAD_DIM,))


class DeltaRule(Projected):
    """Each token corrects the state by what it predicts wrongly."""

    def mix(self, q, k, v):
        k = F.normalize(k, dim=-1)
        state, outputs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
        for t in range(q.shape[2]):
            kt, vt = k[:, :, t], v[:, :, t]
            wrong = vt - (kt[..., None, :] @ state).squeeze(-2)
            state = state + 0.5 * kt[..., None] * wrong[..., None, :]
            outputs.append((q[:, :, t, None] @ state).squeeze(-2))
        return torch.stack(outputs, 2)


class TimeMix(nn.Module):
    """RWKV's weighted mean with decay by channel, after a shift of tokens."""

    def __init__(self):
        super().__init__()
        self.mu = nn.Parameter(torch.zeros(3, WIDTH))
        self.w, self.u = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.r, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        r, k, v = (
            f(x + (before - x) * m) for f, m in zip((self.r, self.k, self.v), self.mu, strict=True)
        )
        top, bottom, rows, decay = 0.0, 0.0, [], torch.exp(-torch.exp(self.w))
        for kt, vt in zip(k.unbind(1), v.unbind(1), strict=True):
            now = torch.exp(self.u + kt)
            rows.append((top + now * vt) / (bottom + now))
            top, bottom = decay * top + torch.exp(kt) * vt, decay * bottom + torch.exp(kt)
        return self.o(torch.sigmoid(r) * torch.stack(rows, 1))


class SelectiveScan(nn.Module):
    def __init__(self, states=5):
        super().__init__()
        self.states = states
        self.in_proj, self.dt = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bc, self.out_proj = nn.Linear(WIDTH, 2 * states), nn.Linear(WIDTH, WIDTH)
        self.A_log, self.D = (
            nn.Parameter(torch.zeros(WIDTH, states)),
            nn.Parameter(torch.ones(WIDTH)),
        )

    def forward(self, x):
        x, z = self.in_proj(x).chunk(2, -1)
        dt, (B, C) = F.softplus(self.dt(x)), self.bc(x).chunk(2, -1)
        state, rows = x.new_zeros(x.shape[0], WIDTH, self.states), []
        for t in range(x.shape[1]):
            decay = torch.exp(-dt[:, t, :, None] * self.A_log.exp())
            state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
            rows.append((state * C[:, t, None]).sum(-1) + self.D * x[:, t])
        return self.out_proj(torch.stack(rows, 1) * F.silu(z))


class LinearRecurrence(nn.Module):
    """Gated linear units of recurrence by channel, as in Griffin."""

    def __init__(self):
        super().__init__()
        self.gates, self.rate = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        keep, write = self.gates(x).sigmoid().chunk(2, -1)
        a = torch.sigmoid(self.rate) ** (8 * keep)
        h, rows = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = a[:, t] * h + torch.sqrt(1 - a[:, t] ** 2) * write[:, t] * x[:, t]
            rows.append(h)
        return torch.stack(rows, 1)


class TokenMixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(LONGEST, 30),
            nn.Linear(30, LONGEST),
        )

    def forward(self, x):
        y = F.pad(self.norm(x).mT, (0, LONGEST - x.shape[1]))
        return x + self.down(F.gelu(self.up(y))).mT[:, : x.shape[1]]


class FourierMixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + torch.fft.fft2(x, dim=(1, 2)).real)


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce, self.expand = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x):
        return x * self.expand(F.relu(self.reduce(x.mean(1, keepdim=True)))).sigmoid()


class SpatialGating(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 60), nn.Linear(30, WIDTH)
        self.norm, self.spatial = nn.LayerNorm(30), nn.Linear(LONGEST, LONGEST)

    def forward(self, x):
        u, v = F.gelu(self.up(x)).chunk(2, -1)
        v = self.spatial(F.pad(self.norm(v).mT, (0, LONGEST - x.shape[1]))).mT
        return self.down(u * v[:, : x.shape[1]])


class SoftRouter(nn.Module):
    """Every token is a mixture of experts by a softmax."""

    def __init__(self, experts=5):
        super().__init__()
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.w_in = nn.Parameter(torch.zeros(experts, WIDTH, 30))
        self.w_out = nn.Parameter(torch.zeros(experts, 30, WIDTH))

    def forward(self, x):
        share = self.router(x).softmax(-1)
        y = F.gelu(torch.einsum("btd,edf->btef", x, self.w_in))
        return torch.einsum("btef,efd,bte->btd", y, self.w_out, share)


class SlotExperts(nn.Module):
    """Soft mixture of experts: slots are mixtures of tokens, tokens mixtures of slots."""

    def __init__(self, slots=5):
        super().__init__()
        self.phi = nn.Parameter(torch.zeros(WIDTH, slots))
        self.experts = nn.Parameter(torch.zeros(slots, WIDTH, WIDTH))

    def forward(self, x):
        logits = x @ self.phi
        slots = logits.softmax(1).mT @ x
        y = torch.einsum("bsd,sde->bse", slots, self.experts)
        return logits.softmax(2) @ y


def inputs(module: nn.Module, rng: Rng, length: int) -> Inputs:
    return (tokens(rng, length, WIDTH),), {}


def other(name, kind, style, *options):
    return Subject(name, drawn(lambda rng: kind(*options)), inputs, lambda m: None, style)


MIXERS = [
    other("mlp", Mlp, "two Linear in a Sequential"),
    other("gated_mlp", GatedMlp, "SiLU of one projection times another"),
    other("conv_block", ConvBlock, "pointwise, GLU, depthwise, LayerNorm"),
    other("lstm", RecurrentWrapper, "nn.LSTM and a Linear", nn.LSTM),
    other("gru", RecurrentWrapper, "nn.GRU and a Linear", nn.GRU),
    other("linear_elu", EluLinear, "elu + 1, sums of outer products"),
    other("linear_elu_causal", CausalLinear, "elu + 1, cumulative sums"),
    other("retention", Retention, "no softmax, decay by distance, RMS of heads"),
    other("delta_rule", DeltaRule, "a loop that corrects the state"),
    other("rwkv", TimeMix, "token shift, decay by channel, sigmoid"),
    other("selective_scan", SelectiveScan, "a state-space loop"),
    other("linear_recurrence", LinearRecurrence, "gated recurrence by channel"),
    other("token_mixing", TokenMixing, "an MLP over tokens, residual"),
    other("fourier_mixing", FourierMixing, "the real part of a Fourier transform"),
    other("squeeze_excite", SqueezeExcite, "channels scaled by the mean token"),
    other("spatial_gating", SpatialGating, "gMLP"),
    other("soft_router", SoftRouter, "softmax over experts"),
    other("slot_experts", SlotExperts, "softmax over tokens, then over slots"),
]
