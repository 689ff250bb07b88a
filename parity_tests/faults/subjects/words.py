"""Blocks of language models beside attention: T5, RoBERTa, Phi-3, Mixtral."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from ...port import Port, always
from .draws import drawn


def t5():
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5LayerFF

    config = T5Config(d_model=6, d_ff=10, feed_forward_proj="gated-gelu", dropout_rate=0.2)
    return T5LayerFF(config)


class Dense(nnx.Module):
    """T5's gated MLP."""

    def __init__(self, *, rngs):
        self.wi_0 = nnx.Linear(6, 10, use_bias=False, rngs=rngs)
        self.wi_1 = nnx.Linear(6, 10, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(10, 6, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        gated = nnx.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)
        return self.wo(self.dropout(gated))


class LayerFF(nnx.Module):
    """Norm, MLP, residual."""

    def __init__(self, *, rngs):
        self.DenseReluDense = Dense(rngs=rngs)
        self.layer_norm = nnx.RMSNorm(6, epsilon=1e-6, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x)))


PAD = 1


def roberta():
    from transformers import RobertaConfig
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    sizes = {"vocab_size": 13, "hidden_size": 6, "max_position_embeddings": 11}
    return RobertaEmbeddings(
        RobertaConfig(**sizes, type_vocab_size=3, pad_token_id=PAD, layer_norm_eps=1e-5)
    )


class Embed(nnx.Embed):
    """As torch with `padding_idx`: that row is not trained."""

    def __call__(self, ids):
        rows = super().__call__(ids)
        return jnp.where((ids == PAD)[..., None], jax.lax.stop_gradient(rows), rows)


class Embeddings(nnx.Module):
    """Words, positions counted from the padding's on, and one type."""

    def __init__(self, *, rngs):
        self.word_embeddings = Embed(13, 6, rngs=rngs)
        self.position_embeddings = Embed(11, 6, rngs=rngs)
        self.token_type_embeddings = nnx.Embed(3, 6, rngs=rngs)
        self.LayerNorm = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids):  # B T
        words = ids != PAD
        places = jnp.cumsum(words, 1) * words + PAD
        x = self.word_embeddings(ids) + self.token_type_embeddings(jnp.zeros_like(ids))
        return self.LayerNorm(x + self.position_embeddings(places))


def phi3():
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    return Phi3MLP(Phi3Config(hidden_size=6, intermediate_size=10, pad_token_id=0))


class GatedMLP(nnx.Module):
    """Gate and up in one projection, the gate first."""

    def __init__(self, *, rngs):
        self.gate_up_proj = nnx.Linear(6, 20, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(10, 6, use_bias=False, rngs=rngs)

    def halves(self, y):
        gate, up = jnp.split(y, 2, axis=-1)
        return gate, up

    def __call__(self, x):
        gate, up = self.halves(self.gate_up_proj(x))
        return self.down_proj(up * nnx.silu(gate))


def mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_local_experts": 5}
    return MixtralSparseMoeBlock(MixtralConfig(**sizes, num_experts_per_tok=2))


class Router(nnx.Module):
    """The logits, and of the two best experts their shares and numbers."""

    def __init__(self, *, rngs):
        self.weight = nnx.Param(jnp.zeros((5, 6)))

    def __call__(self, x):  # N D
        logits = x @ self.weight[...].T
        shares, ids = jax.lax.top_k(jax.nn.softmax(logits, -1), 2)
        return logits, shares / shares.sum(-1, keepdims=True), ids


class Experts(nnx.Module):
    """All experts of all tokens, and of them what the router takes."""

    def __init__(self, *, rngs):
        self.gate_up_proj = nnx.Param(jnp.zeros((5, 20, 6)))
        self.down_proj = nnx.Param(jnp.zeros((5, 6, 10)))

    def __call__(self, x, ids, shares):  # N D, N K, N K
        y = jnp.einsum("nd,eid->nei", x, self.gate_up_proj[...])
        gate, up = jnp.split(y, 2, axis=-1)
        y = jnp.einsum("nei,edi->ned", nnx.silu(gate) * up, self.down_proj[...])
        weights = (jax.nn.one_hot(ids, 5, dtype=x.dtype) * shares[..., None]).sum(1)
        return jnp.einsum("ned,ne->nd", y, weights)


class Mixture(nnx.Module):
    def __init__(self, *, rngs):
        self.gate, self.experts = Router(rngs=rngs), Experts(rngs=rngs)

    def __call__(self, x):  # B T D
        flat = x.reshape(-1, x.shape[-1])
        _, shares, ids = self.gate(flat)
        return self.experts(flat, ids, shares).reshape(x.shape)


IDS = np.array([[4, 12, 5, 9, 2, 7, 3], [8, 6, 10, 11, PAD, PAD, PAD]])
PORTS = [
    Port(
        "T5LayerFF",
        t5,
        LayerFF,
        drawn("t5", (3, 5, 6)),
        (Rule("layer_norm.weight -> layer_norm.scale"),),  # its norm is called a LayerNorm
        {"train": True},
    ),
    Port("RobertaEmbeddings", roberta, Embeddings, always(IDS)),
    Port("Phi3MLP", phi3, GatedMLP, drawn("phi3", (2, 5, 6))),
    Port("MixtralSparseMoeBlock", mixtral, Mixture, drawn("mixtral", (3, 7, 6))),
]
