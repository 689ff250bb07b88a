"""Attention over the keys and values of an earlier layer, against Gemma 3n."""

import numpy as np

from flax_attn import RMSNorm, Rotary, Rules
from flax_attn.layers.cross_layer import CrossLayerAttention
from flax_attn.parity import Case

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
FLOAT64 = {"dtypes": ("float64",)}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Gemma's layers: 6 heads on 2, of width 4, of tokens of width 18.
GEMMA = {
    **{"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
    **{"rms_norm_eps": 1e-2, "rope_parameters": None, "vocab_size": 5, "attention_bias": True},
    "attn_implementation": "eager",
}
KV = {"k": (2, 7, 3, 4), "v": (2, 7, 3, 4)}


def across(layer, x, k, v, **more):
    return layer(x, keys_and_values=(k, v), **more)


CALLS = {"torch_call": across, "flax_call": across}


def placed():
    """Configurations of both sides: a rotary and a norm of the queries."""

    def flax():
        return {**SIZES, "rotary": Rotary(), "q_norm": RMSNorm(4, eps=1e-6), "sinks": True}

    def torch():
        from torch.nn import RMSNorm

        from torch_ref.grouped_query import Rotary

        return {**SIZES, "rotary": Rotary(), "q_norm": RMSNorm(4, eps=1e-6), "sinks": True}

    return {"config": flax, "reference_config": torch, "name": "rotary,q_norm,sinks=True"}


def handed(x):
    """What a decoder hands to its attention: a rotary of width 4 and a causal mask."""
    import torch
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    turned = LlamaConfig(head_dim=4, rope_parameters=ROPE)
    turns = LlamaRotaryEmbedding(turned)(x, torch.arange(7)[None])
    hidden, lowest = torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
    mask = torch.zeros(1, 1, 7, 7, dtype=x.dtype).masked_fill(hidden, lowest)
    return {"position_embeddings": turns, "attention_mask": mask}


def gemma():
    """The layer as Gemma has it: logits unscaled."""
    sizes = {"in_features": 18, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
    parts = {"rotary": Rotary(), "rules": Rules(scale=1.0), "qkv_bias": True, "out_bias": True}
    return {**sizes, **parts, "q_norm": RMSNorm(4, eps=1e-2)}


def gemma3n():
    from transformers import Gemma3nTextConfig

    own = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "intermediate_size": 9}
    own |= {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0, 0.0]}
    config = Gemma3nTextConfig(**GEMMA, **own)
    return {"config": config, "layer_idx": 1}


def reuse(module, x, k, v):
    shared = {"full_attention": (k.transpose(1, 2), v.transpose(1, 2))}
    return module(x, **handed(x), shared_kv_states=shared)[0]


CASES = [
    Case(CrossLayerAttention, SIZES, **CALLS, x=(2, 7, 11), **KV),
    Case(CrossLayerAttention, **placed(), **CALLS, **FLOAT64, x=(2, 7, 11), **KV, mask=RAGGED),
    Case(
        CrossLayerAttention,
        {**SIZES, "out_bias": True},
        **CALLS,
        **FLOAT64,
        x=(2, 7, 11),
        **KV,
        valid=VALID,
    ),
    Case(
        CrossLayerAttention,
        {"in_features": 4, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4},
        **CALLS,
        **FLOAT64,
        x=(4, 4, 4),
        k=(4, 4, 4, 4),
        v=(4, 4, 4, 4),
    ),
    Case(
        CrossLayerAttention,
        gemma,
        reference="transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextAttention",
        reference_config=gemma3n,
        torch_call=reuse,
        flax_call=across,
        name="scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
        k=(2, 7, 2, 4),
        v=(2, 7, 2, 4),
    ),
]


def test_parity(case):
    case.check()
