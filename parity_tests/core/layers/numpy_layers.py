"""Outputs of layers in numpy, as their docstrings write them, and the options that they read.

An option is drawn from a table, its default first. `given` holds what was drawn, as plain data, and
`p` the parameters by name. A bias is read only where an option asks for one, so that an option that
is ignored leaves a name missing or changes the result.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flax_attn as fa
from flax_attn import CAUSAL, FULL, IDENTITY, Rotary, Rules

T, D, N, K, H = 7, 11, 6, 3, 4
SIZES = {"in_features": D, "num_heads": N, "num_kv_heads": K, "head_dim": H}
EPS = 0.02
SLOPES = np.linspace(0.1, 0.9, N)
Given = Mapping[str, Any]
Params = Mapping[str, np.ndarray]


def rms(width: Any, **more: Any) -> fa.RMSNorm:
    return fa.RMSNorm(width, eps=EPS, param_dtype=np.float64, **more)


# What a word of an option stands for in a layer's constructor.
WORDS: dict[str, dict[Any, Any]] = {
    "rotary": {None: None, "half": Rotary(50.0), "interleaved": Rotary(50.0, "interleaved")},
    "mask": {
        "causal": CAUSAL,
        "full": FULL,
        "window": CAUSAL & fa.Window(2, 0),
        "prefix": CAUSAL | fa.Prefix(3),
    },
    "score": {None: IDENTITY, "cap": fa.Softcap(1.5), "alibi": fa.Alibi(SLOPES)},
}
FLAG = [False, True]
SINKS = {"sinks": FLAG}
HEADS: dict[str, list[Any]] = {
    "qkv_bias": [False, True, "q", "kv"],
    "out_bias": FLAG,
    "rotary": [*WORDS["rotary"]],
    "mask": [*WORDS["mask"]],
    "q_norm": FLAG,
    "k_norm": FLAG,
    "norm_after_rotary": FLAG,
    "score": [*WORDS["score"]],
    "scale": [None, 0.3],
}
LAYERS: dict[str, tuple[type, dict[str, list[Any]]]] = {
    "grouped": (
        fa.GroupedQueryAttention,
        {**HEADS, **SINKS, "clip_qkv": [None, 0.5], "o_norm": FLAG, "key_bias": [True, False]},
    ),
    "gated": (
        fa.GatedQueryAttention,
        {
            **{**HEADS, **SINKS, "gate": ["full", "head"], "fused": FLAG, "gate_bias": FLAG},
            "activation": ["sigmoid", "softplus"],
        },
    ),
    "exclusive": (
        fa.ExclusiveAttention,
        {**HEADS, **SINKS, "learned": [True, False], "gate": FLAG},
    ),
    "shared": (
        fa.SharedKeyValueAttention,
        {**HEADS, **SINKS, "v_norm": FLAG, "own_values": FLAG},
    ),
    "residual": (fa.ValueResidualAttention, {**HEADS, **SINKS, "learned_mix": FLAG}),
    "entmax": (fa.EntmaxAttention, {**HEADS, "alpha": [1.5, 2]}),
    "sigmoid": (fa.SigmoidAttention, {**HEADS, "logit_bias": [None, -1.0]}),
    "selective": (fa.SelectiveAttention, HEADS),
    "differential": (
        fa.DifferentialAttention,
        {
            **{name: HEADS[name] for name in ("out_bias", "rotary", "mask")},
            **{"qkv_bias": FLAG, "depth": [0, 3], "eps": [1e-5, EPS]},
        },
    ),
    "latent": (
        fa.LatentAttention,
        {
            **{name: HEADS[name] for name in ("out_bias", "rotary", "mask", "score", "scale")},
            **{"qkv_bias": FLAG, "q_rank": [None, 10], "absorbed": FLAG},
        },
    ),
}
_SMALL = {"d_in": D, "d_out": 5}
_CAUSAL = {**_SMALL, "context_length": 9, "dropout": 0.0}
_MANY = {**_CAUSAL, "d_out": 12, "num_heads": K}
_BIAS = {"qkv_bias": FLAG}
# Layers of one file each, whose arithmetic is their own: options beside what they have in common.
CLIMB: dict[str, tuple[type, dict[str, Any], dict[str, list[Any]]]] = {
    "simplified": (fa.SimplifiedSelfAttention, {}, {"normalise": ["softmax", "sum"]}),
    "uniform": (fa.UniformCausalAverage, {}, {}),
    "v1": (fa.SelfAttentionV1, _SMALL, {}),
    "v2": (fa.SelfAttentionV2, _SMALL, _BIAS),
    "causal": (fa.CausalAttention, _CAUSAL, _BIAS),
    "renormalised": (fa.CausalRenormalisedAttention, _CAUSAL, _BIAS),
    "single": (
        *(fa.SingleHeadAttention, {"d_in": D, "head_size": 6}),
        {"scale": [False, True], "value": [True, False]},
    ),
    "wrapper": (fa.MultiHeadAttentionWrapper, {**_MANY, "d_out": 4}, _BIAS),
    "multi-head": (fa.MultiHeadAttention, _MANY, {**_BIAS, "out_proj": [True, False]}),
    "combined": (fa.MultiHeadAttentionCombined, _MANY, _BIAS),
    "einsum": (fa.MultiHeadAttentionEinsum, _MANY, _BIAS),
}
CLASSES = {name: row[0] for name, row in (*LAYERS.items(), *CLIMB.items())}
OPTIONS = {name: row[-1] for name, row in (*LAYERS.items(), *CLIMB.items())}


def drawn(name: str, seed: int) -> dict[str, Any]:
    """The options of a layer by a seed; seed 0 takes the last value of each."""
    random = np.random.default_rng(seed)
    default = 0.4  # the share of options that are left as they are
    given = {
        option: values[0 if random.random() < default else random.integers(len(values))]
        for option, values in OPTIONS[name].items()
    }
    return fitting({x: values[-1] for x, values in OPTIONS[name].items()} if seed == 0 else given)


def fitting(given: dict[str, Any]) -> dict[str, Any]:
    """The options without those that a layer refuses beside the others."""
    normed = given.get("q_norm") or given.get("k_norm")
    if not (given.get("rotary") and normed):
        given = {k: v for k, v in given.items() if k != "norm_after_rotary"}
    if given.get("fused"):
        given |= {"gate": "full", "gate_bias": False}
    return given


def arguments(name: str, given: Given) -> dict[str, Any]:
    """The arguments of the constructor."""
    sizes: dict[str, Any] = dict(CLIMB[name][1] if name in CLIMB else SIZES)
    if name == "differential":
        sizes |= {"num_heads": 12, "num_kv_heads": N}
    if name == "latent":
        sizes = {"in_features": D, "num_heads": N, "kv_rank": 8, "nope_dim": 5}
        sizes |= {"rotary_dim": H, "value_dim": 3}
    norms = {"q_norm": H, "k_norm": H, "v_norm": H, "o_norm": N * H}
    for option, value in given.items():
        if option in norms:
            more = {"over_heads": True} if option == "o_norm" else {}
            sizes[option] = rms(norms[option], **more) if value else None
        elif name in CLIMB or option not in ("score", "scale"):
            sizes[option] = WORDS[option][value] if option in WORDS else value
    if "score" in given:
        sizes["rules"] = Rules(score=WORDS["score"][given["score"]], scale=given["scale"])
    return sizes


def linear(p: Params, name: str, x: np.ndarray, bias: bool) -> np.ndarray:
    return x @ p[f"{name}.kernel"] + (p[f"{name}.bias"] if bias else 0)


def normed(x: np.ndarray, gain: Any = 1.0, eps: float = EPS) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain


def rotated(x: np.ndarray, layout: str | None) -> np.ndarray:
    """Pairs of components as complex numbers, times exp(i t 50^(-j / pairs))."""
    if layout is None:
        return x
    pairs = x.shape[-1] // 2
    first, second = (
        (x[..., :pairs], x[..., pairs:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    )
    angles = np.arange(x.shape[-3])[:, None] * 50.0 ** (-np.arange(pairs) / pairs)
    z = (first + 1j * second) * np.exp(1j * angles)[:, None]
    parts = (z.real, z.imag)
    return np.concatenate(parts, -1) if layout == "half" else np.stack(parts, -1).reshape(x.shape)


def visible(mask: str) -> np.ndarray:
    q, k = np.indices((T, T))
    return {
        "causal": k <= q,
        "full": k >= 0,
        "window": (k <= q) & (k >= q - 2),
        "prefix": (k <= q) | (k < 3),
    }[mask]


def logits(q: np.ndarray, k: np.ndarray, given: Given, scale: float) -> np.ndarray:
    """Scaled products of each query head with its key head: B N T T."""
    k = np.repeat(k, q.shape[-2] // k.shape[-2], axis=-2)
    x = np.einsum("btnh,bsnh->bnts", q, k)
    return x * (scale if given.get("scale") is None else given["scale"])


def scored(x: np.ndarray, given: Given) -> np.ndarray:
    if given.get("score") == "cap":
        return 1.5 * np.tanh(x / 1.5)
    if given.get("score") == "alibi":
        at = np.arange(T)
        return x - SLOPES[:, None, None] * np.abs(at[:, None] - at)
    return x


def softmax(x: np.ndarray, seen: np.ndarray, sinks: Any = None) -> np.ndarray:
    """Weights; a sink is one more logit of a row, without a key."""
    weights = np.exp(x) * seen
    sink = 0 if sinks is None else np.exp(sinks)[:, None, None]
    return weights / (weights.sum(-1, keepdims=True) + sink)


def entmax(x: np.ndarray, seen: np.ndarray, alpha: float) -> np.ndarray:
    """`max(0, (alpha - 1) x - tau) ** (1 / (alpha - 1))`, tau by bisection."""
    x = np.where(seen, (alpha - 1) * x, -np.inf)
    low, high = x.max(-1, keepdims=True) - 1, x.max(-1, keepdims=True)
    for _ in range(200):
        tau = (low + high) / 2
        above = (np.maximum(x - tau, 0) ** (1 / (alpha - 1))).sum(-1, keepdims=True) > 1
        low, high = np.where(above, tau, low), np.where(above, high, tau)
    return np.maximum(x - low, 0) ** (1 / (alpha - 1))


def penalty(x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """What earlier queries gave to a key in the first head: not to themselves, nor to key 0."""
    taken = np.zeros((x.shape[0], 1, T, T))
    for i in range(T):
        for j in range(1, T):
            if seen[i, j] and i != j:
                taken[..., i + 1 :, j] += np.maximum(x[:, :1, i, j, None], 0)
    return taken


def has(bias: Any, letter: str) -> bool:
    return letter in bias if isinstance(bias, str) else bool(bias)


def split(x: np.ndarray, width: int) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, width)


def mixed(weights: np.ndarray, v: np.ndarray) -> np.ndarray:
    v = np.repeat(v, weights.shape[1] // v.shape[-2], axis=-2)
    return np.einsum("bnts,bsnh->btnh", weights, v)


def heads(name: str, p: Params, given: Given, x: np.ndarray, values: Any) -> np.ndarray:
    """The layers with grouped heads."""
    bias, clip = given["qkv_bias"], given.get("clip_qkv") or np.inf

    def formed(y: np.ndarray, norm: str) -> np.ndarray:
        gain = p[f"{norm}.scale"] if given[norm] else None
        after = given.get("norm_after_rotary", False)
        y = y if gain is None or after else normed(y, gain)
        y = rotated(np.clip(y, -clip, clip), given["rotary"])
        return normed(y, gain) if gain is not None and after else y

    fused = given.get("fused", False)
    q = split(linear(p, "q_proj", x, has(bias, "q")), 2 * H if fused else H)
    gate = q[..., H:]
    k = split(linear(p, "k_proj", x, has(bias, "k") and given.get("key_bias", True)), H)
    own = given.get("own_values", True)
    v = np.clip(split(linear(p, "v_proj", x, has(bias, "v")), H), -clip, clip) if own else k
    v = normed(v, p["v_norm.scale"]) if given.get("v_norm") else v
    if name == "residual":
        mix = sigmoid(linear(p, "mix_proj", x, True))[..., None] if given["learned_mix"] else 0.5
        v = mix * v + (1 - mix) * values
    raw = logits(formed(q[..., :H], "q_norm"), formed(k, "k_norm"), given, H**-0.5)
    seen = visible(given["mask"])
    scores = scored(raw - penalty(raw, seen) if name == "selective" else raw, given)
    if name == "entmax":
        weights = entmax(scores, seen, given["alpha"])
    elif name == "sigmoid":
        bias = -np.log(T) if given["logit_bias"] is None else given["logit_bias"]
        weights = sigmoid(scores + bias) * seen
    else:
        weights = softmax(scores, seen, p["sinks"] if given.get("sinks") else None)
    o = mixed(weights, v)
    if name == "gated":
        wide = H if given["gate"] == "full" else 1
        gate = gate if fused else split(linear(p, "g_proj", x, given["gate_bias"]), wide)
        o = o * (sigmoid(gate) if given["activation"] == "sigmoid" else np.log1p(np.exp(gate)))
    if name == "exclusive":
        u = np.repeat(v / np.linalg.norm(v, axis=-1, keepdims=True), N // K, axis=-2)
        share = np.tanh(p["alpha"])[:, None] if given["learned"] else 1.0
        o = o - share * (o * u).sum(-1, keepdims=True) * u
        o = o * sigmoid(split(x @ p["gate_proj.kernel"], H)) if given["gate"] else o
    o = o.reshape(*x.shape[:-1], N * H)
    o = normed(o, p["o_norm.scale"]) if given.get("o_norm") else o
    return linear(p, "o_proj", o, given["out_bias"])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def differential(p: Params, given: Given, x: np.ndarray) -> np.ndarray:
    """Head i minus lambda times head i + N / 2."""
    q, k, v = (split(linear(p, f"{n}_proj", x, given["qkv_bias"]), H) for n in "qkv")
    q, k = (rotated(y, given["rotary"]) for y in (q, k))
    v = np.concatenate(np.split(v, 2, -2), -1)
    start = 0.8 - 0.6 * np.exp(-0.3 * given["depth"])
    first, second = (np.exp(p[f"lambda_q{i}"] @ p[f"lambda_k{i}"]) for i in (1, 2))
    pairs = zip(np.split(q, 2, -2), np.split(k, 2, -2), strict=True)
    one, two = (
        mixed(softmax(logits(a, b, given, H**-0.5), visible(given["mask"])), v) for a, b in pairs
    )
    o = (1 - start) * normed(one - (first - second + start) * two, eps=given["eps"])
    return linear(p, "o_proj", o.reshape(*x.shape[:-1], -1), given["out_bias"])


def latent(p: Params, given: Given, x: np.ndarray) -> np.ndarray:
    """Keys and values of a latent of width 8, with one rotated key of width 4 for all heads."""
    bias, queries, name = given["qkv_bias"], x, "q_proj"
    if given["q_rank"]:
        queries = normed(linear(p, "q_a_proj", x, bias), p["q_a_layernorm.scale"], 1e-6)
        name = "q_b_proj"
    q = split(linear(p, name, queries, False), 5 + H)
    both = linear(p, "kv_a_proj_with_mqa", x, bias)
    shared = rotated(both[..., None, 8:], given["rotary"])
    kv = split(
        linear(p, "kv_b_proj", normed(both[..., :8], p["kv_a_layernorm.scale"], 1e-6), False), 8
    )
    q = np.concatenate([q[..., :5], rotated(q[..., 5:], given["rotary"])], -1)
    k = np.concatenate([kv[..., :5], np.repeat(shared, N, axis=-2)], -1)
    scores = scored(logits(q, k, given, (5 + H) ** -0.5), given)
    weights = softmax(scores, visible(given["mask"]))
    o = mixed(weights, kv[..., 5:]).reshape(*x.shape[:-1], -1)
    return linear(p, "o_proj", o, given["out_bias"])


def climb(name: str, p: Params, given: Given, x: np.ndarray) -> np.ndarray:
    """The layers of `CLIMB`, of which most have one head."""
    bias, words = bool(given.get("qkv_bias")), ("query", "key", "value")
    if name in ("simplified", "uniform"):
        wide = [0 * x if name == "uniform" else x, x, x]
    elif name == "v1":
        wide = [x @ p[f"W_{word}"] for word in words]
    elif name == "single":
        wide = [linear(p, word, x, False) for word in words[: 2 + given["value"]]]
        wide += [] if given["value"] else [x]
    elif name == "wrapper":
        heads = [[f"heads.{i}.W_{word}" for i in range(K)] for word in words]
        wide = [np.concatenate([linear(p, n, x, bias) for n in names], -1) for names in heads]
    elif name == "combined":
        wide = np.split(linear(p, "qkv", x, bias), 3, -1)
    elif name == "einsum":
        wide = [x @ p[f"W_{word}"].T + (p[f"b_{word}"] if bias else 0) for word in words]
    else:
        wide = [linear(p, f"W_{word}", x, bias) for word in words]
    many = K if "num_heads" in CLIMB[name][1] else 1
    q, k, v = (split(y, y.shape[-1] // many) for y in wide)
    is_scaled = given.get("scale", name not in ("simplified", "uniform"))
    raw = logits(q, k, {}, q.shape[-1] ** -0.5 if is_scaled else 1.0)
    ahead = name in ("simplified", "v1", "v2")
    if given.get("normalise") == "sum":
        weights = raw / raw.sum(-1, keepdims=True)
    else:
        weights = softmax(raw, visible("full" if ahead else "causal"))
    o = mixed(weights, v).reshape(*x.shape[:-1], -1)
    projected = given.get("out_proj", name in ("combined", "einsum"))
    return linear(p, "out_proj", o, True) if projected else o


def output(name: str, p: Params, given: Given, x: np.ndarray, values: Any = None) -> np.ndarray:
    """The output of a layer of `CLASSES` for x, B T D; `values` are those of a first layer."""
    apart: dict[str, Callable[..., np.ndarray]] = {"differential": differential, "latent": latent}
    if name in CLIMB:
        return climb(name, p, given, x)
    if name in apart:
        return apart[name](p, given, x)
    return heads(name, p, given, x, values)
