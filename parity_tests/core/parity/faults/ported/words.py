"""Blocks of language models beside attention: T5, RoBERTa, Phi-3, Mixtral."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import Rule

from .mistake import Block, Mistake, normal


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

    def gated(self, x):
        return nnx.gelu(self.wi_0(x), approximate=True) * self.wi_1(x)

    def __call__(self, x):
        return self.wo(self.dropout(self.gated(x)))


class LayerFF(nnx.Module):
    """Norm, MLP, residual."""

    Dense = Dense

    def __init__(self, *, rngs):
        self.DenseReluDense = self.Dense(rngs=rngs)
        self.layer_norm = self.norm(rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def norm(self, rngs):
        return nnx.RMSNorm(6, epsilon=1e-6, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.DenseReluDense(self.layer_norm(x)))


class OtherGate(Dense):
    def gated(self, x):
        return self.wi_0(x) * nnx.gelu(self.wi_1(x), approximate=True)


class DropsBehind(Dense):
    def __call__(self, x):
        return self.dropout(self.wo(self.gated(x)))


class CentredFF(LayerFF):
    def norm(self, rngs):
        return nnx.LayerNorm(6, epsilon=1e-6, use_bias=False, rngs=rngs)


class OtherGateFF(LayerFF):
    Dense = OtherGate


class DropsBehindFF(LayerFF):
    Dense = DropsBehind


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

    Words: type[nnx.Embed] = Embed

    def __init__(self, *, rngs):
        self.word_embeddings = self.Words(13, 6, rngs=rngs)
        self.position_embeddings = Embed(11, 6, rngs=rngs)
        self.token_type_embeddings = nnx.Embed(3, 6, rngs=rngs)
        self.LayerNorm = nnx.LayerNorm(6, epsilon=1e-5, rngs=rngs)

    def positions(self, ids):
        words = ids != PAD
        return jnp.cumsum(words, 1) * words + PAD

    def __call__(self, ids):  # B T
        x = self.word_embeddings(ids) + self.token_type_embeddings(jnp.zeros_like(ids))
        return self.LayerNorm(x + self.position_embeddings(self.positions(ids)))


class CountsFromZero(Embeddings):
    """Positions as BERT has them, with the padding still apart."""

    def positions(self, ids):
        words = ids != PAD
        return jnp.where(words, jnp.cumsum(words, 1) - 1, PAD)


class CountsPadding(Embeddings):
    def positions(self, ids):
        return jnp.broadcast_to(jnp.arange(ids.shape[1]) + PAD + 1, ids.shape)


class TrainsPadding(Embeddings):
    Words = nnx.Embed


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


class UpFirst(GatedMLP):
    def halves(self, y):
        up, gate = jnp.split(y, 2, axis=-1)
        return gate, up


class Interleaved(GatedMLP):
    def halves(self, y):
        return y[..., ::2], y[..., 1::2]


def mixtral():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes = {"hidden_size": 6, "intermediate_size": 10, "num_local_experts": 5}
    return MixtralSparseMoeBlock(MixtralConfig(**sizes, num_experts_per_tok=2))


class Router(nnx.Module):
    """The logits, and of the two best experts their shares and numbers."""

    def __init__(self, *, rngs):
        self.weight = nnx.Param(jnp.zeros((5, 6)))

    def shares(self, logits):
        shares, ids = jax.lax.top_k(jax.nn.softmax(logits, -1), 2)
        return shares / shares.sum(-1, keepdims=True), ids

    def __call__(self, x):  # N D
        logits = x @ self.weight[...].T
        return logits, *self.shares(logits)


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
    Router = Router

    def __init__(self, *, rngs):
        self.gate, self.experts = self.Router(rngs=rngs), Experts(rngs=rngs)

    def __call__(self, x):  # B T D
        flat = x.reshape(-1, x.shape[-1])
        _, shares, ids = self.gate(flat)
        return self.experts(flat, ids, shares).reshape(x.shape)


class NotRenormalised(Router):
    def shares(self, logits):
        return jax.lax.top_k(jax.nn.softmax(logits, -1), 2)


class OverTokens(Router):
    def shares(self, logits):
        shares, ids = jax.lax.top_k(jax.nn.softmax(logits, 0), 2)
        return shares / shares.sum(-1, keepdims=True), ids


class NotRenormalisedMixture(Mixture):
    Router = NotRenormalised


class OverTokensMixture(Mixture):
    Router = OverTokens


IDS = np.array([[4, 12, 5, 9, 2, 7, 3], [8, 6, 10, 11, PAD, PAD, PAD]])
T5 = Block(
    "T5LayerFF",
    t5,
    LayerFF,
    (normal("t5", 3, 5, 6),),
    (Rule("layer_norm.weight -> layer_norm.scale"),),  # its norm is called a LayerNorm
    {"train": True},
)
ROBERTA = Block("RobertaEmbeddings", roberta, Embeddings, (IDS,))
PHI3 = Block("Phi3MLP", phi3, GatedMLP, (normal("phi3", 2, 5, 6),))
MIXTRAL = Block("MixtralSparseMoeBlock", mixtral, Mixture, (normal("mixtral", 3, 7, 6),))
FF = "DenseReluDense"
ROWS = "position|row|index|indices|ids|shift|off by|lookup"
HALVES = "activation_fn|between gate_up_proj and down_proj|gate_up_proj"
ROUTER = "gate[1]|gate"
MISTAKES = [
    Mistake(
        "the mean subtracted, where T5 does not subtract it",
        T5,
        "layer_norm",
        "mean|centre|center|RMS",
        port=CentredFF,
    ),
    Mistake(
        "the other projection through the GELU",
        T5,
        f"{FF}.act|{FF}.dropout|between {FF}.wi_1 and {FF}.dropout|between {FF}.wi_1 and {FF}.wo",
        "exchang|swap|gate|the other|activation",
        port=OtherGateFF,
    ),
    Mistake(
        "the MLP's dropout after its last projection",
        T5,
        f"{FF}.dropout|{FF}.wo|{FF}",
        "dropout|mask|drop",
        port=DropsBehindFF,
    ),
    Mistake(
        "positions counted from 0, where torch counts from padding_idx + 1",
        ROBERTA,
        "position_embeddings",
        ROWS,
        port=CountsFromZero,
    ),
    Mistake(
        "padding tokens counted as positions",
        ROBERTA,
        "position_embeddings",
        f"{ROWS}|pad",
        port=CountsPadding,
    ),
    Mistake(
        "the padding's row is trained",
        ROBERTA,
        "word_embeddings.embedding|word_embeddings",
        "pad|row|trained|frozen",
        port=TrainsPadding,
    ),
    Mistake(
        "up as the first half, where torch has the gate",
        PHI3,
        HALVES,
        "half|halves|exchang|swap|order",
        port=UpFirst,
    ),
    Mistake(
        "gate and up interleaved",
        PHI3,
        HALVES,
        "interleav|every other|order|permut|halves|half",
        port=Interleaved,
    ),
    Mistake(
        "the chosen experts' weights not normalised to sum to 1",
        MIXTRAL,
        ROUTER,
        "normal|sum|factor|scale|divided",
        port=NotRenormalisedMixture,
    ),
    Mistake(
        "the router's softmax over tokens",
        MIXTRAL,
        ROUTER,
        "axis|dimension|softmax|over ",
        port=OverTokensMixture,
        also="gate[2]",
    ),
]
