"""Differential attention against its twin, which subtracts weights, and DiffLlama's class."""

import numpy as np

from flax_attn import CAUSAL, Rotary, Window
from flax_attn.layers.differential import DifferentialAttention
from flax_attn.parity import Case, Decode

SIZES = {"in_features": 11, "num_heads": 12, "num_kv_heads": 6, "head_dim": 4, "depth": 2}
ONE_MASK = np.random.RandomState(0).rand(2, 1, 7, 7) < 0.6
ONE_MASK[1, :, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
FLOAT64 = {"dtypes": ("float64",)}


def turned():
    """Of both sides: a rotary, and each token sees itself and the two before it."""

    def torch():
        from torch import from_numpy

        from torch_ref.grouped_query import Rotary

        near = np.tri(7, dtype=bool) & ~np.tri(7, k=-3, dtype=bool)
        return {**SIZES, "rotary": Rotary(), "mask": from_numpy(near)}

    flax = {**SIZES, "rotary": Rotary(), "mask": CAUSAL & Window(2, 0)}
    return {"config": flax, "reference_config": torch, "name": "rotary,mask=Window(2)"}


def diffllama():
    from transformers import DiffLlamaConfig

    own = {"hidden_size": 40, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
    own |= {"attention_bias": True, "rms_norm_eps": 1e-2}
    return {"config": DiffLlamaConfig(**own, attn_implementation="eager"), "layer_idx": 3}


def by_diffllama(module, x):
    import torch
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaRotaryEmbedding

    turns = DiffLlamaRotaryEmbedding(module.config)(x, torch.arange(7)[None])
    hidden, lowest = torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
    mask = torch.zeros(1, 1, 7, 7, dtype=x.dtype).masked_fill(hidden, lowest)
    return module(x, position_embeddings=turns, attention_mask=mask)[0]


CASES = [
    Case(DifferentialAttention, SIZES, x=(2, 7, 11), decode=Decode()),
    Case(DifferentialAttention, **turned(), **FLOAT64, x=(2, 7, 11), decode=Decode()),
    Case(DifferentialAttention, {**SIZES, "depth": 0}, **FLOAT64, x=(2, 7, 11), mask=ONE_MASK),
    Case(
        DifferentialAttention,
        {**SIZES, "num_kv_heads": 2, "qkv_bias": True, "out_bias": True, "eps": 1e-2},
        **FLOAT64,
        x=(2, 7, 11),
        valid=VALID,
    ),
    Case(
        DifferentialAttention,
        {
            **{"in_features": 40, "num_heads": 8, "num_kv_heads": 4, "head_dim": 6, "depth": 3},
            **{"rotary": Rotary(), "eps": 1e-2, "qkv_bias": True, "out_bias": True},
        },
        reference="transformers.models.diffllama.modeling_diffllama.DiffLlamaAttention",
        reference_config=diffllama,
        torch_call=by_diffllama,
        name="depth=3",
        **FLOAT64,
        x=(2, 7, 40),
    ),
]


def test_parity(case):
    case.check()
