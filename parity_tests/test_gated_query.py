"""Gated heads, fused into the queries' projection or not, against three published classes."""

import numpy as np

from flax_attn import RMSNorm, Rotary
from flax_attn.layers.gated_query import GatedQueryAttention
from flax_attn.parity import Case, Decode, Rule

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
FLOAT64 = {"dtypes": ("float64",)}


ROPE = {"rope_type": "default", "rope_theta": 1e4}
WIDTHS = {"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}


def handed(x, width):
    """What a decoder hands to its attention: a rotary of this width and a causal mask."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    turned = LlamaConfig(head_dim=width, rope_parameters=ROPE)
    turns = LlamaRotaryEmbedding(turned)(x, torch.arange(7)[None])
    hidden, lowest = torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
    mask = torch.zeros(1, 1, 7, 7, dtype=x.dtype).masked_fill(hidden, lowest)
    return {"position_embeddings": turns, "attention_mask": mask}


def published(name, model, *, norm, width=4, bias=False, rules=(), own=None, **gate):
    """A case against a class of transformers: 6 heads on 2, of width 4, of tokens of width 18."""
    given = {**WIDTHS, "num_hidden_layers": 1, "attention_bias": bias, "rope_parameters": ROPE}
    layer = {"layer_idx": 0} | ({"num_heads": 6} if name == "laguna" else {})

    def flax():
        norms = {x: RMSNorm(4, **norm) for x in ("q_norm", "k_norm")}
        sizes = {"in_features": 18, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
        parts = {"rotary": Rotary(1e4, width=width), "qkv_bias": bias, "out_bias": bias}
        return {**sizes, **gate, **parts, **norms}

    def config():
        import transformers

        cls = getattr(transformers, f"{model}Config")
        return cls(**{**given, **(own or {})}, attn_implementation="eager")

    return Case(
        GatedQueryAttention,
        flax,
        reference=f"transformers.models.{name}.modeling_{name}.{model}Attention",
        reference_config=lambda: {"config": config(), **layer},
        torch_call=lambda module, x: module(x, **handed(x, width))[0],
        rules=rules,
        name=",".join(f"{key}={value}" for key, value in {**gate, "bias": bias}.items()),
        **FLOAT64,
        x=(2, 7, 18),
    )


GEMMA = {"eps": 1e-6, "plus_one": True}
LLAMA = {"eps": 1e-6, "cast": "before"}
FULL = {"layer_types": ["full_attention"]}
CASES = [
    Case(GatedQueryAttention, SIZES, x=(2, 7, 11), decode=Decode()),
    Case(GatedQueryAttention, {**SIZES, "fused": True}, x=(2, 7, 11), mask=RAGGED),
    Case(
        GatedQueryAttention,
        {**SIZES, "gate": "head", "activation": "softplus", "sinks": True},
        x=(2, 5, 1, 11),
    ),
    Case(
        GatedQueryAttention,
        {**SIZES, "fused": True, "qkv_bias": True, "out_bias": True},
        **FLOAT64,
        x=(2, 7, 11),
        valid=VALID,
    ),
    Case(GatedQueryAttention, {**SIZES, "gate_bias": True}, **FLOAT64, x=(2, 7, 11)),
    published("qwen3_next", "Qwen3Next", norm=GEMMA, width=2, own=FULL, fused=True, bias=True),
    published(
        "laguna",
        "Laguna",
        norm=LLAMA,
        own={**FULL, "gating": "per-head"},
        gate="head",
        activation="softplus",
    ),
    published(
        "afmoe",
        "Afmoe",
        norm={"eps": 1e-5, "cast": "before"},
        own={"layer_types": ["sliding_attention"], "sliding_window": 32},
        rules=(Rule("gate_proj.weight -> g_proj.kernel", "o i -> i o"),),
    ),
]


def test_parity(case):
    case.check()
