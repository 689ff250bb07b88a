"""Keys that are values too, against Gemma 4."""

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
# Gemma's layers: 6 heads on 2, of width 4, of tokens of width 18.
GEMMA = {
    **{"hidden_size": 18, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4},
    **{"rms_norm_eps": 1e-2, "rope_parameters": None, "vocab_size": 5, "attention_bias": True},
    "attn_implementation": "eager",
}


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

    return {"config": flax, "reference_config": torch, "name": "rotary,norms"}


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


def gemma(own_values=False):
    """The layer as Gemma has it: logits unscaled, values normed without a gain."""

    def made():
        sizes = {"in_features": 18, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
        parts = {"rotary": Rotary(), "rules": Rules(scale=1.0), "qkv_bias": True, "out_bias": True}
        parts |= {"q_norm": RMSNorm(4, eps=1e-2), "k_norm": RMSNorm(4, eps=1e-2)}
        return {**sizes, **parts, "v_norm": RMSNorm(None, eps=1e-2), "own_values": own_values}

    return made


def gemma4(shared):
    def made():
        from transformers import Gemma4TextConfig

        own = {"global_head_dim": 4, "attention_k_eq_v": shared, "num_global_key_value_heads": 2}
        own |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        config = Gemma4TextConfig(**GEMMA, **own)
        return {"config": config, "layer_idx": 0}

    return made


def alone(module, x):
    return module(x, **handed(x), shared_kv_states={})[0]


GEMMA4 = "transformers.models.gemma4.modeling_gemma4.Gemma4TextAttention"
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
        gemma(),
        reference=GEMMA4,
        reference_config=gemma4(True),
        torch_call=alone,
        name="scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
    ),
    Case(
        SharedKeyValueAttention,
        gemma(own_values=True),
        reference=GEMMA4,
        reference_config=gemma4(False),
        torch_call=alone,
        name="own_values=True,scale=1.0",
        **FLOAT64,
        x=(2, 7, 18),
    ),
]


def test_parity(case):
    case.check()
