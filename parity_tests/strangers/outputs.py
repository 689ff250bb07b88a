"""Inputs and outputs that are more than arrays: dataclasses, caches, indices, complex numbers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from flax_attn import Causal, attend, merge_heads, split_heads
from flax_attn.parity import Rule

from .stranger import linear, normal, padded, stranger, zeros

B, T = 5, 7


class Relations(nnx.Module):
    """Products of queries and keys, and of queries and a learned nobody."""

    def __init__(self, rngs: nnx.Rngs):
        self.query, self.key = linear(18, 18, rngs), linear(18, 18, rngs)
        self.dummy_node = zeros(1, 18)

    def __call__(self, x: jax.Array) -> jax.Array:
        nobody = jnp.broadcast_to(self.dummy_node[...][None], (len(x), 1, 18))
        keys = self.key(jnp.concatenate([x, nobody], axis=1))  # B S+1 D
        return jnp.einsum("btd,bsd->bts", self.query(x), keys)


class Bros(nnx.Module):
    """BROS's heads over a document: first tokens, and which token follows which, or none.

    Logits of padding and of a token after itself are the dtype's lowest number, and go out so.
    """

    def __init__(self, *, rngs: nnx.Rngs):
        self.initial = linear(18, 3, rngs)
        self.subsequent = Relations(rngs)

    def __call__(self, x: jax.Array, real: jax.Array) -> dict[str, Any]:
        logits = self.subsequent(x)  # B T S+1
        allowed = jnp.pad(real, ((0, 0), (0, 1)), constant_values=True)[:, None]
        allowed = allowed & ~np.eye(T, T + 1, dtype=bool)[None]
        logits = jnp.where(allowed, logits, jnp.finfo(x.dtype).min)
        return {
            "initial_token_logits": self.initial(x),
            "subsequent_token_logits": logits,
            "hidden_states": (x, {"best": logits.argmax(-1)}),
        }


class BrosHeads(torch.nn.Module):
    """The end of `BrosSpadeEEForTokenClassification`, without the encoder below it."""

    def __init__(self) -> None:
        from transformers.models.bros.modeling_bros import BrosConfig, BrosRelationExtractor

        super().__init__()
        self.initial = torch.nn.Linear(18, 3)
        config = BrosConfig(hidden_size=18, n_relations=1, classifier_dropout_prob=0.0)
        self.subsequent = BrosRelationExtractor(config)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> Any:
        from transformers.models.bros.modeling_bros import BrosSpadeOutput

        rows = x.transpose(0, 1).contiguous()
        logits = self.subsequent(rows, rows).squeeze(0)
        lowest = torch.finfo(x.dtype).min
        hidden = torch.cat([~real, torch.zeros(len(x), 1, dtype=torch.bool)], dim=1)
        logits = logits.masked_fill(hidden[:, None], lowest)
        logits = logits.masked_fill(torch.eye(x.shape[1], x.shape[1] + 1, dtype=bool), lowest)
        return BrosSpadeOutput(
            initial_token_logits=self.initial(x),
            subsequent_token_logits=logits,
            hidden_states=(x, {"best": logits.argmax(-1)}),
        )


@jax.tree_util.register_dataclass
@dataclass
class Cached:
    """What an attention leaves for the next token: keys and values, `B N T H`, and its weights."""

    qk_similarities: Any = None
    pre_softmax_attn: Any = None
    post_softmax_attn: Any = None
    values: Any = None
    cached_kv: Any = None
    layer_type: Any = None
    hybrid_hidden: Any = None
    log_probs: Any = None


class Decoder(nnx.Module):
    """x-transformers' attention with what it keeps: a dataclass in and a dataclass out."""

    heads, head_dim = 3, 5

    def __init__(self, *, rngs: nnx.Rngs):
        self.to_q, self.to_k, self.to_v = (linear(18, 15, rngs, False) for _ in range(3))
        self.to_out = linear(15, 18, rngs, False)

    def __call__(
        self, x: jax.Array, cache: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Cached]:
        q, k, v = (
            split_heads(part(x), self.head_dim) for part in (self.to_q, self.to_k, self.to_v)
        )
        before, new = (y.swapaxes(1, 2) for y in cache), v.swapaxes(1, 2)
        k, v = (jnp.concatenate(both, axis=1) for both in zip(before, (k, v), strict=True))
        out = self.to_out(merge_heads(attend(q, k, v, mask=Causal("end"))))
        alike = jnp.einsum("btnh,bsnh->bnts", q, k) * self.head_dim**-0.5
        past = np.tril(np.ones(alike.shape[-2:], bool), alike.shape[-1] - alike.shape[-2])
        masked = jnp.where(past[None, None], alike, -jnp.finfo(x.dtype).max)
        kept = (k.swapaxes(1, 2), v.swapaxes(1, 2))
        return out, Cached(alike, masked, jax.nn.softmax(masked), new, kept)


def decoder() -> torch.nn.Module:
    from .x_options import attention

    return attention(18, heads=3, dim_head=5, causal=True)


def call_decoder(module: torch.nn.Module, x: torch.Tensor, cache: Any) -> Any:
    from x_transformers.attend import Intermediates

    return module(x, cache=Intermediates(cached_kv=cache), return_intermediates=True)


class Quantizer(nnx.Module):
    """wav2vec 2.0: each of two groups takes its best codevector; its number is an output."""

    groups, codes = 2, 4

    def __init__(self, *, rngs: nnx.Rngs):
        self.codevectors = zeros(1, self.groups * self.codes, 3)
        self.weight_proj = linear(10, self.groups * self.codes, rngs)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        logits = self.weight_proj(x).reshape(-1, self.groups, self.codes)
        best = logits.argmax(-1)  # BT G
        table = self.codevectors[...].reshape(self.groups, self.codes, 3)
        share = jax.nn.one_hot(best, self.codes, dtype=x.dtype).mean(axis=0)  # G V
        entropy = -jnp.where(share > 0, share * jnp.log(jnp.where(share > 0, share, 1)), 0).sum(-1)
        taken = table[np.arange(self.groups)[None], best].reshape(*x.shape[:2], -1)
        return {"vectors": taken, "perplexity": jnp.exp(entropy).sum(), "codes": best}


def quantizer() -> torch.nn.Module:
    from transformers.models.wav2vec2.modeling_wav2vec2 import (
        Wav2Vec2Config,
        Wav2Vec2GumbelVectorQuantizer,
    )

    config = Wav2Vec2Config(
        conv_dim=(10,),
        conv_stride=(1,),
        conv_kernel=(1,),
        num_codevector_groups=2,
        num_codevectors_per_group=4,
        codevector_dim=6,
    )
    return Wav2Vec2GumbelVectorQuantizer(config)


def call_quantizer(module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    vectors, perplexity = module(x)
    codes = module.weight_proj(x).reshape(-1, module.num_groups, module.num_vars).argmax(-1)
    return {"vectors": vectors, "perplexity": perplexity, "codes": codes}


class FNet(nnx.Module):
    """FNet: tokens mixed by the real part of a Fourier transform, which goes out whole."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.LayerNorm = nnx.LayerNorm(18, epsilon=1e-12, rngs=rngs)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        spectrum = jnp.fft.fftn(x, axes=(1, 2))
        return {"spectrum": spectrum, "mixed": self.LayerNorm(x + spectrum.real)}


def fnet() -> torch.nn.Module:
    from transformers.models.fnet.modeling_fnet import FNetConfig, FNetFourierTransform

    return FNetFourierTransform(FNetConfig(hidden_size=18))


def call_fnet(module: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"spectrum": module.self.fourier_transform(x), "mixed": module(x)[0]}


STRANGERS = {
    "bros": stranger(
        BrosHeads,
        Bros,
        lambda: {"x": normal(B, T, 18), "real": padded([7, 6, 4, 7, 5], T)},
    ),
    "x_cache": stranger(
        decoder,
        Decoder,
        lambda: {
            "x": normal(B, 2, 18),
            "cache": (normal(B, 3, 4, 5, seed=1), normal(B, 3, 4, 5, seed=2)),
        },
        torch_call=call_decoder,
    ),
    "quantizer": stranger(
        quantizer, Quantizer, lambda: {"x": normal(B, T, 10)}, torch_call=call_quantizer
    ),
    "fnet": stranger(
        fnet,
        FNet,
        lambda: {"x": normal(B, T, 18)},
        lambda: (Rule("output.LayerNorm -> LayerNorm"),),
        call_fnet,
    ),
}
