"""Options of x-transformers' `Attention`, each a subclass of one port that takes `attend`."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn import IDENTITY, Softcap, attend, merge_heads, split_heads
from flax_attn import Additive as bias_of
from flax_attn.parity import Rule
from flax_attn.scores import Score
from flax_attn.taps import tap

from ..port import Port
from .stranger import causal, linear, normal, normalised, padded, stranger, zeros

B, T, D, N, H, V = 5, 7, 18, 6, 4, 3
SEEN = padded([7, 6, 4, 7, 5], T)  # B T
SCALE = H**-0.5


def attention(width: int, **options: Any) -> torch.nn.Module:
    """`x_transformers.x_transformers.Attention`; importing it warns of `torch.jit`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from x_transformers.x_transformers import Attention

    return Attention(width, flash=False, **options)


class Core(nnx.Module):
    """Where theirs has its module `attend`, so that taps have one path."""

    def __init__(self, *, rngs: nnx.Rngs):
        """Without weights of its own."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return attend(q, k, v, mask=mask, score=self.score(q, k), scale=SCALE)

    def score(self, q: jax.Array, k: jax.Array) -> Score:
        """What happens to the logits."""
        return IDENTITY


class Plain(nnx.Module):
    """Projections without bias, attention, a projection; padded queries give zeros."""

    kv_heads, width_of_value, is_causal = N, H, True
    Core: type[nnx.Module] = Core

    def __init__(self, *, rngs: nnx.Rngs):
        self.to_q = linear(D, N * H, rngs, False)
        self.to_k = linear(D, self.kv_heads * H, rngs, False)
        self.to_v = linear(D, self.kv_heads * self.width_of_value, rngs, False)
        self.to_out = linear(N * self.width_of_value, D, rngs, False)
        self.attend = self.Core(rngs=rngs)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, `B T N H`; query head n looks at key head n % K."""
        q, k = split_heads(self.to_q(x), H), split_heads(self.to_k(x), H)
        return q, k, split_heads(self.to_v(x), self.width_of_value)

    def after(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """What becomes of the context, `B T N h`, before the last projection, `B T (N h)`."""
        return merge_heads(out)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        seen = mask[:, None, None] & (causal(T) | (not self.is_causal))[None, None]  # B 1 T T
        q, k, v = self.heads(x)
        k, v = (jnp.tile(y, (1, 1, N // y.shape[2], 1)) for y in (k, v))
        out = self.to_out(self.after(x, self.attend(q, k, v, seen)))
        return jnp.where(mask[..., None], out, 0)


def turned(scale: jax.Array) -> jax.Array:
    """From heads before positions, `N 1 H`, to `1 1 N H`."""
    return scale.swapaxes(0, 1)[None]


class Normed(Plain):
    """qk_norm with a learned scale for each dimension, and two key heads."""

    kv_heads = 2

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.qk_norm_q_scale, self.qk_norm_k_scale = zeros(N, 1, H), zeros(2, 1, H)

    def heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = super().heads(x)
        q_scale, k_scale = self.qk_norm_q_scale[...], self.qk_norm_k_scale[...]
        return normalised(q) * turned(q_scale), normalised(k) * turned(k_scale), v


class Talking(Core):
    """Heads are mixed before the softmax, beside themselves, and after it.

    `sum_g W[n, g] q_g . k_g` is one product of wide heads, so `attend` does it all: the wide query
    of head n holds every q_g times its weight, the wide key all keys, the wide value all values.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.pre_softmax_talking_heads = nnx.Conv(N, N, (1, 1), use_bias=False, rngs=rngs)
        self.post_softmax_talking_heads = nnx.Conv(N, N, (1, 1), use_bias=False, rngs=rngs)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        before = jnp.eye(N, dtype=q.dtype) + self.pre_softmax_talking_heads.kernel[...][0, 0]  # g n
        after = self.post_softmax_talking_heads.kernel[...][0, 0]
        mixed = merge_heads(jnp.einsum("btgh,gn->btngh", q, before))  # B T N (N H)
        keys = jnp.broadcast_to(merge_heads(k)[:, :, None], mixed.shape)
        values = jnp.broadcast_to(merge_heads(v)[:, :, None], mixed.shape)
        out = attend(mixed, keys, values, mask=mask, scale=SCALE)
        return jnp.einsum("btgnh,gn->btnh", out.reshape(*out.shape[:3], N, H), after)


class TalkingHeads(Plain):
    """Talking heads on both sides of the softmax."""

    Core = Talking


class Gated(Plain):
    """Values of another width; heads scaled and gated, then values gated, then a gated output."""

    width_of_value = V

    def __init__(self, *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.to_out = nnx.Sequential(linear(N * V, 2 * D, rngs, False), nnx.glu)
        self.to_v_gate = linear(D, N * V, rngs, False)
        self.to_v_head_gate = linear(D, N, rngs)
        self.head_scale_params = zeros(1, N, 1, 1)

    def after(self, x: jax.Array, out: jax.Array) -> jax.Array:
        out = out * self.head_scale_params[...][:, None, :, :, 0]
        out = out * jax.nn.sigmoid(self.to_v_head_gate(x))[..., None]
        return merge_heads(out) * jax.nn.sigmoid(self.to_v_gate(x))


class Own(Core):
    """Weights by another function than the softmax, so without `attend`."""

    def weights(self, scores: jax.Array) -> jax.Array:
        """Of the masked scores, `B N T S`."""
        return jax.nn.sigmoid(scores)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * SCALE
        scores = tap("scores", jnp.where(mask, scores, -jnp.inf))
        return jnp.einsum("bnts,bsnh->btnh", tap("weights", self.weights(scores)), v)


class Sigmoid(Plain):
    """Each weight by itself."""

    Core = Own


class Sparse(Own):
    """Sparsemax: what the scores exceed a threshold by, so that the weights sum to one."""

    def weights(self, scores: jax.Array) -> jax.Array:
        z = jnp.sort(scores, axis=-1, descending=True)
        z = jnp.where(jnp.isneginf(z), jnp.finfo(z.dtype).min / 8, z)
        ranks = jnp.arange(1, z.shape[-1] + 1, dtype=z.dtype).reshape(1, 1, 1, -1)
        sums = jnp.cumsum(z, axis=-1)
        count = (1 + ranks * z > sums).sum(axis=-1, keepdims=True)
        threshold = (jnp.take_along_axis(sums, count - 1, axis=-1) - 1) / count.astype(z.dtype)
        return jnp.maximum(scores - threshold, 0)


class Sparsemax(Plain):
    """Theirs takes any function in place of the softmax."""

    Core = Sparse


def sparsemax(scores: torch.Tensor) -> torch.Tensor:
    """Martins and Astudillo, 2016, on scores whose hidden places hold the lowest number."""
    z, _ = scores.clamp(min=torch.finfo(scores.dtype).min / 8).sort(dim=-1, descending=True)
    ranks = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    sums = z.cumsum(dim=-1)
    count = (1 + ranks * z > sums).sum(dim=-1, keepdim=True)
    threshold = (sums.gather(-1, count - 1) - 1) / count
    return (scores - threshold).clamp(min=0)


class Best(Core):
    """The softmax over the three largest scores of each row."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * SCALE
        scores = jnp.where(mask, scores, -jnp.inf)
        third = jnp.sort(scores, axis=-1)[..., -3, None]
        return attend(q, k, v, mask=mask & (scores >= third), scale=SCALE)


class SparseTopK(Plain):
    """The three best keys of each query, without order in time."""

    Core, is_causal = Best, False


class Near(Core):
    """`-|q - k|^2`: the square of the query is one number a row, and leaves no trace."""

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        length = -SCALE * (k * k).sum(-1)  # B S N
        score = bias_of(length.swapaxes(1, 2)[:, :, None])
        return attend(q, k, v, mask=mask, score=score, scale=2 * SCALE)


class L2Distance(Plain):
    """Near keys weigh most."""

    Core = Near


class Sunk(Core):
    """Logits kept within 2.5, and a learned logit for looking nowhere."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.head_attn_sink = zeros(N)

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        sinks = self.head_attn_sink[...]
        return attend(q, k, v, mask=mask, score=Softcap(2.5), scale=SCALE, sinks=sinks)


class SoftclampAndSink(Plain):
    """A soft clamp of the logits, and a sink."""

    Core = Sunk


class Choosy(Core):
    """Selective attention: what head 0 of earlier queries wants away is lowered for later ones."""

    def score(self, q: jax.Array, k: jax.Array) -> Score:
        wants = jax.nn.relu(jnp.einsum("bth,bsh->bts", q[:, :, 0], k[:, :, 0]) * SCALE)
        wants = jnp.where(jnp.asarray(np.tril(np.ones((T, T), bool), -1))[None], wants, 0)
        wants = wants.at[..., 0].set(0)  # nobody wants the first token away
        wants = jnp.concatenate([jnp.zeros_like(wants[:, :1]), wants[:, :-1]], axis=1)
        return bias_of(-jnp.cumsum(wants, axis=1)[:, None])


class Selective(Plain):
    """Selective attention."""

    Core = Choosy


def inputs() -> dict[str, Any]:
    """Five sequences of seven, padded at their ends."""
    return {"x": normal(B, T, D), "mask": SEEN}


def option(port: type[nnx.Module], rules: tuple[Rule, ...] = (), **options: Any) -> Port:
    """An option of theirs and its port; causal unless it says otherwise."""
    options = {"causal": port.is_causal, **options}
    return stranger(
        lambda: attention(D, heads=N, dim_head=H, **options), port, inputs, lambda: rules
    )


STRANGERS = {
    "x_qk_norm": option(Normed, qk_norm=True, qk_norm_dim_scale=True, kv_heads=2),
    "x_talking_heads": option(TalkingHeads, pre_talking_heads=True, post_talking_heads=True),
    "x_gates": option(
        Gated,
        value_dim_head=V,
        gate_values=True,
        gate_value_heads=True,
        head_scale=True,
        on_attn=True,
    ),
    "x_sigmoid": option(Sigmoid, sigmoid=True),
    "x_sparsemax": option(Sparsemax, custom_attn_fn=sparsemax),
    "x_sparse_topk": option(SparseTopK, sparse_topk=3),
    "x_l2_distance": option(L2Distance, l2_distance=True),
    "x_softclamp_sink": option(
        SoftclampAndSink, softclamp_logits=True, logit_softclamp_value=2.5, head_learned_sink=True
    ),
    "x_selective": option(Selective, selective=True),
}
