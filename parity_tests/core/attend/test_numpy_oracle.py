"""The third oracle: every layer against numpy written out row by row, in float64.

Nothing here is taken from the library or from torch: one sentence at a time, a loop for each head
and query, every softmax by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_attn as fa
from flax_attn.parity import judge
from parity_tests.core.cases import every_case
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

RANDOM = np.random.RandomState(7)
RAGGED = RANDOM.rand(5, 9) < 0.5
RAGGED[3] = False


def held(param):
    return np.asarray(param[...])


def linear(layer, x):
    y = x @ held(layer.kernel)
    return y if layer.bias is None else y + held(layer.bias)


def past(rows):
    return np.asarray([[s <= t for s in range(rows)] for t in range(rows)])


def mixed(scores, v, seen=None):
    """Each row of v mixed by the softmax of the scores it may see; zeros if it sees nothing."""
    out = np.zeros((len(scores), v.shape[1]))
    for t, row in enumerate(scores):
        where = [s for s in range(len(v)) if seen is None or seen[t, s]]
        total = sum(np.exp(row[s]) for s in where)
        for s in where:
            out[t] += np.exp(row[s]) / total * v[s]
    return out


def in_heads(q, k, v, heads, seen=None):
    """Heads side by side; several query heads may share one of keys and values."""
    width = q.shape[1] // heads
    shared = heads // (k.shape[1] // width)
    out = []
    for n in range(heads):
        qs, ks = (slice(i * width, (i + 1) * width) for i in (n, n // shared))
        out.append(mixed(q[:, qs] @ k[:, ks].T / np.sqrt(width), v[:, ks], seen))
    return np.concatenate(out, axis=1)


def simplified(layer, x):
    scores = x @ x.T
    if layer.normalise == "softmax":
        return mixed(scores, x)
    return np.stack([sum(row[s] * x[s] for s in range(len(x))) / sum(row) for row in scores])


def average(layer, x):
    return np.stack([sum(x[: t + 1]) / (t + 1) for t in range(len(x))])


def version_one(layer, x):
    q, k, v = (x @ held(w) for w in (layer.W_query, layer.W_key, layer.W_value))
    return mixed(q @ k.T / np.sqrt(q.shape[1]), v)


def projected(layer, x):
    return [linear(part, x) for part in (layer.W_query, layer.W_key, layer.W_value)]


def version_two(layer, x):
    return in_heads(*projected(layer, x), 1)


def causal(layer, x):
    return in_heads(*projected(layer, x), 1, past(len(x)))


def renormalised(layer, x):
    q, k, v = projected(layer, x)
    powers = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    weights = powers / powers.sum(axis=1)[:, None] * past(len(x))
    return weights / weights.sum(axis=1)[:, None] @ v


def one_head(layer, x):
    k, q = linear(layer.key, x), linear(layer.query, x)
    v = x if layer.value is None else linear(layer.value, x)
    return mixed(q @ k.T, v, past(len(x)))


def one_head_scaled(layer, x):
    k, q, v = (linear(part, x) for part in (layer.key, layer.query, layer.value))
    return mixed(q @ k.T / np.sqrt(4), v, past(len(x)))


def wrapper(layer, x):
    return np.concatenate([causal(head, x) for head in layer.heads], axis=1)


def multi_head(layer, x):
    context = in_heads(*projected(layer, x), 3, past(len(x)))
    return context if layer.out_proj is None else linear(layer.out_proj, context)


def combined(layer, x):
    qkv = linear(layer.qkv, x)
    return linear(layer.out_proj, in_heads(qkv[:, :6], qkv[:, 6:12], qkv[:, 12:], 3, past(len(x))))


def einsum(layer, x):
    weights = (layer.W_query, layer.W_key, layer.W_value)
    biases = (layer.b_query, layer.b_key, layer.b_value)
    q, k, v = (x @ held(w).T + held(b) for w, b in zip(weights, biases, strict=True))
    return linear(layer.out_proj, in_heads(q, k, v, 3, past(len(x))))


def bahdanau(layer, h, s, mask=None):
    W1, W2, v = (held(part.kernel) for part in (layer.W1, layer.W2, layer.v))
    scores = [[np.tanh(h_i @ W1 + s_t @ W2) @ v[:, 0] for h_i in h] for s_t in s]
    return mixed(np.asarray(scores), h, mask)


def luong(layer, h, s, mask=None):
    def score(s_t, h_i):
        if layer.score == "dot":
            return sum(s_t * h_i)
        if layer.score == "general":
            return s_t @ (h_i @ held(layer.W.kernel))
        both = np.concatenate([s_t, h_i]) @ held(layer.W.kernel)
        return np.tanh(both) @ held(layer.v.kernel)[:, 0]

    return mixed(np.asarray([[score(s_t, h_i) for h_i in h] for s_t in s]), h, mask)


def transformer(layer, query, key=None, value=None, mask=None):
    key = query if key is None else key
    value = key if value is None else value
    parts = (layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value)
    q, k, v = (linear(part, x) for part, x in parts)
    return linear(layer.out_proj, in_heads(q, k, v, 3, mask))


def grouped(layer, x):
    q, k, v = (linear(part, x) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    return linear(layer.o_proj, in_heads(q, k, v, 6, past(len(x))))


def linear_attention(layer, x):
    q, k, v = (linear(part, x) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (np.where(y > 0, y + 1, np.exp(np.minimum(y, 0))) for y in (q, k))
    out = np.zeros_like(v)
    for n in range(3):
        at = slice(4 * n, 4 * n + 4)
        for t in range(len(x)):
            weights = k[: t + 1 if layer.causal else None, at] @ q[t, at]
            out[t, at] = weights @ v[: len(weights), at] / weights.sum()
    return linear(layer.o_proj, out)


WORDS = {"x": (7, 11)}
STATES = {"h": (9, 7), "s": (5, 7)}
CROSS = {"query": (5, 12), "key": (9, 7), "value": (9, 10), "mask": RAGGED}
FIRST = {"d_in": 11, "d_out": 4}
SINGLE = {"d_in": 11, "head_size": 4}
LONG = {"d_in": 11, "d_out": 6, "context_length": 9, "dropout": 0.3}
BIASED = {**LONG, "qkv_bias": True}
BAHDANAU = {"d_encoder": 7, "d_decoder": 7, "units": 4}
LUONG = {"d_decoder": 7, "d_encoder": 7}
TRANSFORMER = {"embed_dim": 12, "num_heads": 3}
MODERN = {"in_features": 11, "head_dim": 4}

# Oracle, layer, its arguments, the shapes of one sentence's inputs.
ORACLES = [
    (simplified, fa.SimplifiedSelfAttention, {"normalise": "sum"}, {"x": (6, 3)}),
    (one_head, fa.SingleHeadAttention, {**SINGLE, "value": False}, WORDS),
    (one_head_scaled, fa.SingleHeadAttention, {**SINGLE, "scale": True}, WORDS),
    (multi_head, fa.MultiHeadAttention, {**LONG, "num_heads": 3, "out_proj": False}, WORDS),
    (bahdanau, fa.BahdanauAttention, BAHDANAU, STATES),
    (bahdanau, fa.BahdanauAttention, BAHDANAU, {**STATES, "mask": RAGGED}),
    (luong, fa.LuongAttention, {**LUONG, "score": "dot"}, STATES),
    (luong, fa.LuongAttention, {**LUONG, "score": "general"}, {**STATES, "mask": RAGGED}),
    (luong, fa.LuongAttention, {**LUONG, "score": "concat", "units": 6}, STATES),
    (transformer, fa.TransformerMultiHeadAttention, TRANSFORMER, {"query": (7, 12)}),
    (transformer, fa.TransformerMultiHeadAttention, TRANSFORMER | {"kdim": 7, "vdim": 10}, CROSS),
    (grouped, fa.GroupedQueryAttention, {**MODERN, "num_heads": 6, "num_kv_heads": 3}, WORDS),
    (linear_attention, fa.LinearAttention, {**MODERN, "num_heads": 3}, WORDS),
    (linear_attention, fa.LinearAttention, MODERN | {"num_heads": 3, "causal": True}, WORDS),
]
# What layers/test_climb.py asks of numpy too.
OF_THE_CLIMB = [
    (simplified, fa.SimplifiedSelfAttention, {}, {"x": (6, 3)}),
    (average, fa.UniformCausalAverage, {}, {"x": (7, 5)}),
    (version_one, fa.SelfAttentionV1, FIRST, WORDS),
    (version_two, fa.SelfAttentionV2, FIRST, WORDS),
    (version_two, fa.SelfAttentionV2, {"d_in": 5, "d_out": 5, "qkv_bias": True}, {"x": (5, 5)}),
    (causal, fa.CausalAttention, LONG, WORDS),
    (causal, fa.CausalAttention, BIASED, {"x": (9, 11)}),
    (renormalised, fa.CausalRenormalisedAttention, BIASED, WORDS),
    (one_head, fa.SingleHeadAttention, SINGLE, WORDS),
    (wrapper, fa.MultiHeadAttentionWrapper, {**BIASED, "num_heads": 2}, WORDS),
    (multi_head, fa.MultiHeadAttention, {**BIASED, "num_heads": 3}, WORDS),
    (multi_head, fa.MultiHeadAttention, {**BIASED, "d_in": 6, "num_heads": 3}, {"x": (6, 6)}),
    (combined, fa.MultiHeadAttentionCombined, {**BIASED, "num_heads": 3}, WORDS),
    (einsum, fa.MultiHeadAttentionEinsum, {**BIASED, "num_heads": 3}, WORDS),
]
ALL = [*ORACLES, *OF_THE_CLIMB]


def test_every_layer_has_an_oracle_or_a_witness_by_others():
    layers = {cls for cls in vars(fa.layers).values() if isinstance(cls, type)}
    layers = {cls for cls in layers if cls.__module__.startswith("flax_attn.layers.")}
    published = {
        case.flax_class
        for case in every_case()
        if not case.reference.startswith(("torch_ref.", "torch."))
    }
    assert {cls for _, cls, _, _ in ALL} | published == layers


@pytest.mark.parametrize(
    ("oracle", "cls", "config", "shapes"), with_nightly(ALL, commit=lambda row: row in ORACLES)
)
def test_a_layer_is_what_numpy_finds_row_by_row(oracle, cls, config, shapes):
    """Every parameter random; two sentences at once, against the oracle on each alone."""
    random = np.random.RandomState(3)
    with jax.enable_x64(True):
        layer = cls(**config, rngs=nnx.Rngs(0), param_dtype=jnp.float64)
        layer.eval()
        params = nnx.state(layer, nnx.Param)
        drawn = jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape) / 2), params)
        nnx.update(layer, drawn)
        given = {k: x for k, x in shapes.items() if not isinstance(x, tuple)}
        floats = {k: random.standard_normal((2, *x)) for k, x in shapes.items() if k not in given}
        got = np.asarray(nnx.jit(lambda layer, x: layer(**x))(layer, {**floats, **given}))
        alone = ({k: x[b] for k, x in floats.items()} for b in range(2))
        want = np.stack([oracle(layer, **sentence, **given) for sentence in alone])
    assert got.dtype == np.float64
    assert judge.same_function(got, want).ok
