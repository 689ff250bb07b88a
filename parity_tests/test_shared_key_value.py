"""Keys that are values too, or are an earlier layer's, against Gemma 4 and Gemma 3n."""

import numpy as np

from flax_attn import RMSNorm, Rotary, Rules
from flax_attn.layers.shared_key_value import SharedKeyValueAttention
from flax_attn.parity import Case, Decode

SIZES = {"in_features": 11, "num_heads": 6, "num_kv_heads": 3, "head_dim": 4}
RAGGED = np.random.RandomState(0).rand(2, 6, 7, 7) < 0.6
RAGGED[1, 2, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
FLOAT64 = {"dtypes": ("float64",)}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
GEMMA = {"hidden_size": 18, "num_attention_heads": 6, "rms_norm_eps": 1e-2, "rope_parameters": None}
FOUR = {"head_dim": 4, "num_key_value_heads": 2, "vocab_size": 5, "attention_bias": True}


def placed():
    """Configurations of both sides: a rotary and three norms."""

    def flax():
        norms = {x: RMSNorm(4, eps=1e-6) for x in ("q_norm", "k_norm")}
        return {**SIZES, "rotary": Rotary(), "v_norm": RMSNorm(None, eps=1e-6), **norms}

    def torch():
        from torch.nn import RMSNorm

        from torch_ref.grouped_query import Rotary

        norms = {x: RMSNorm(4, eps=1e-6) for x in ("q_norm", "k_norm")}
        plain = RMSNorm(4, eps=1e-6, elementwise_affine=False)
        return {**SIZES, "rotary": Rotary(), "v_norm": plain, **norms}

    return {"config": flax, "witness_config": torch, "name": "rotary,norms"}


def across(layer, x, k, v, **more):
    return layer(x, keys_and_values=(k, v), **more)


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


def gemma(across_layers=False, own_values=False):
    """The layer as Gemma has it: logits unscaled, values normed without a gain."""

    def made():
        sizes = {"in_features": 18, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
        parts = {"rotary": Rotary(), "rules": Rules(scale=1.0), "qkv_bias": True, "out_bias": True}
        parts |= {"q_norm": RMSNorm(4, eps=1e-2), "across_layers": across_layers}
        parts["own_values"] = own_values
        if not across_layers:
            parts |= {"k_norm": RMSNorm(4, eps=1e-2), "v_norm": RMSNorm(None, eps=1e-2)}
        return {**sizes, **parts}

    return made


def gemma4(shared):
    def made():
        from transformers import Gemma4TextConfig

        own = {"global_head_dim": 4, "attention_k_eq_v": shared, "num_global_key_value_heads": 2}
        own |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        config = Gemma4TextConfig(**{**GEMMA, **FOUR, **own}, attn_implementation="eager")
        return {"config": config, "layer_idx": 0}

    return made


def gemma3n():
    from transformers import Gemma3nTextConfig

    own = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "intermediate_size": 9}
    own |= {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.0, 0.0]}
    config = Gemma3nTextConfig(**{**GEMMA, **FOUR, **own}, attn_implementation="eager")
    return {"config": config, "layer_idx": 1}


def reuse(module, x, k, v):
    shared = {"full_attention": (k.transpose(1, 2), v.transpose(1, 2))}
    return module(x, **handed(x), shared_kv_states=shared)[0]


def alone(module, x):
    return module(x, **handed(x), shared_kv_states={})[0]


GEMMA4 = "transformers.models.gemma4.modeling_gemma4.Gemma4TextAttention"
KV = {"k": (2, 7, 3, 4), "v": (2, 7, 3, 4)}
CASES = [
    Case(SharedKeyValueAttention, SIZES, x=(2, 7, 11), decode=Decode()),
    Case(SharedKeyValueAttention, **placed(), **FLOAT64, x=(2, 7, 11), mask=RAGGED),
    Case(
        SharedKeyValueAttention,
        {**SIZES, "qkv_bias": True, "sinks": True},
        **FLOAT64,
        x=(2, 7, 11),
        valid=VALID,
    ),
    Case(
        SharedKeyValueAttention,
        {**SIZES, "own_values": True},
        **FLOAT64,
        x=(2, 7, 11),
        valid=VALID,
    ),
    Case(
        SharedKeyValueAttention,
        {**SIZES, "across_layers": True, "out_bias": True},
        torch_call=across,
        flax_call=across,
        **FLOAT64,
        x=(2, 7, 11),
        **KV,
        valid=VALID,
    ),
    Case(
        SharedKeyValueAttention,
        gemma(),
        witness=GEMMA4,
        witness_config=gemma4(True),
        torch_call=alone,
        name="scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
    ),
    Case(
        SharedKeyValueAttention,
        gemma(own_values=True),
        witness=GEMMA4,
        witness_config=gemma4(False),
        torch_call=alone,
        name="own_values=True,scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
    ),
    Case(
        SharedKeyValueAttention,
        gemma(across_layers=True),
        witness="transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextAttention",
        witness_config=gemma3n,
        torch_call=reuse,
        flax_call=across,
        name="across_layers=True,scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
        k=(2, 7, 2, 4),
        v=(2, 7, 2, 4),
    ),
]


def test_parity(case):
    case.check()
