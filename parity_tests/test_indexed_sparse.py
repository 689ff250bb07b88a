"""Sparse attention by an indexer, against its twin, DeepSeek-V3.2 and GLM-MoE-DSA.

The index heads are 16 or more, since few heads make equal scores, of which torch takes any. Choices
jump, so that bfloat16, which rounds scores together, is left out.
"""

import numpy as np

from flax_attn import Rotary
from flax_attn.layers.indexed_sparse import IndexedSparseAttention
from flax_attn.parity import Case, Decode

SIZES = {
    **{"in_features": 11, "num_heads": 3, "kv_rank": 8, "q_rank": 10},
    **{"nope_dim": 6, "rotary_dim": 4, "value_dim": 5},
    **{"index_heads": 16, "index_dim": 9, "top_k": 2},
}
ONE_MASK = np.random.RandomState(0).rand(2, 1, 7, 7) < 0.6
ONE_MASK[1, :, 3] = False
VALID = np.asarray([[True] * 7, [False, False, True, True, True, False, False]])
FLOAT64 = {"dtypes": ("float64",)}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def turned():
    """Of both sides: interleaved pairs in the attention, halves in the indexer."""

    def flax():
        return {**SIZES, "rotary": Rotary(layout="interleaved"), "index_rotary": Rotary()}

    def torch():
        from torch_ref.grouped_query import Rotary

        return {**SIZES, "rotary": Rotary(layout="interleaved"), "index_rotary": Rotary()}

    return {"config": flax, "reference_config": torch, "name": "rotary,index_rotary"}


def published(name, model, index_layout, absorbed):
    """A case against a class of transformers, which has the sizes of SIZES but for its tokens."""

    def flax():
        turns = {"rotary": Rotary(layout="interleaved"), "index_rotary": Rotary(1e4, index_layout)}
        return {**SIZES, "in_features": 18, "absorbed": absorbed, **turns}

    def torch():
        import transformers

        own = {"hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3}
        own |= {"q_lora_rank": 10, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "v_head_dim": 5}
        own |= {"qk_rope_head_dim": 4, "index_n_heads": 16, "index_head_dim": 9, "index_topk": 2}
        own |= {"rope_parameters": ROPE, "num_hidden_layers": 1}
        config = getattr(transformers, f"{model}Config")(**own, attn_implementation="eager")
        return {"config": config, "layer_idx": 0}

    def call(module, x):
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        places = torch.arange(7)[None]
        config = LlamaConfig(head_dim=4, rope_parameters=ROPE)
        turns = LlamaRotaryEmbedding(config)(x, places)
        hidden, lowest = torch.ones(7, 7, dtype=torch.bool).triu(1), torch.finfo(x.dtype).min
        mask = torch.zeros(2, 1, 7, 7, dtype=x.dtype).masked_fill(hidden, lowest)
        given = {"position_embeddings": turns, "attention_mask": mask, "position_ids": places}
        return module(x, **given)[0]

    return Case(
        IndexedSparseAttention,
        flax,
        reference=f"transformers.models.{name}.modeling_{name}.{model}Attention",
        reference_config=torch,
        torch_call=call,
        name=f"absorbed={absorbed}",
        **FLOAT64,
        x=(2, 7, 18),
    )


CASES = [
    Case(
        IndexedSparseAttention,
        SIZES,
        dtypes=("float64", "float32"),
        x=(2, 7, 11),
        decode=Decode(),
    ),
    Case(IndexedSparseAttention, **turned(), **FLOAT64, x=(2, 7, 11), mask=ONE_MASK),
    Case(IndexedSparseAttention, **turned(), **FLOAT64, x=(2, 7, 11), decode=Decode()),
    Case(
        IndexedSparseAttention,
        {**SIZES, "absorbed": True, "qkv_bias": True, "out_bias": True},
        **FLOAT64,
        x=(2, 7, 11),
        valid=VALID,
    ),
    published("deepseek_v32", "DeepseekV32", "half", False),
    published("glm_moe_dsa", "GlmMoeDsa", "interleaved", True),
]


def test_parity(case):
    case.check()
