"""Decoders that differ from Llama or Mistral in a norm, a window, a bias or their rotary."""

from .sizes import HALF, LINEAR, LLAMA3, OTHERS, PLAIN, WINDOWS, YARN
from .small import Small

TOKENS = {"bos_token_id": 0, "eos_token_id": 0}  # which CWM's class asks for

NORMED = {"rms_norm_eps": 1e-2}
ONE = {"num_local_experts": 1}
ALPHA = {"rope_type": "dynamic", "alpha": 7.0, "factor": 1.0}
EACH_SECOND = {"global_attn_every_n_layers": 2, "sliding_window": 3}
TEMPERED = {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 3}
EVERY = {"sliding_window": 3, "sliding_window_pattern": 2}
LONG = {
    **{"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "short_mscale": 1.25},
    **{"long_factor": [2.0, 3.0, 5.0, 6.0], "long_mscale": 1.25},
    "original_max_position_embeddings": 4,
}
CONFIGS = [
    Small("apertus", {"head_dim": 10, **NORMED}, {**PLAIN, "rope_type": "default"}),
    Small(
        "apertus",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25},
        {**LLAMA3, **PLAIN, "original_max_position_embeddings": 16},
        index=1,
    ),
    Small("afmoe", {"head_dim": 10, **EACH_SECOND, **NORMED}, PLAIN),
    Small(
        "afmoe",
        {**OTHERS, "head_dim": 12, **WINDOWS, "attention_bias": True, "attention_dropout": 0.25}
        | {"num_local_experts": 1},
        {**YARN, **PLAIN},
    ),
    Small("afmoe", {**OTHERS, "head_dim": 12, **EACH_SECOND}, LINEAR, index=1),
    Small("bitnet", {**NORMED}, PLAIN),
    Small(
        "bitnet",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("cohere2", {**EVERY}, PLAIN),
    Small("cohere2", {**OTHERS, **EVERY, "attention_dropout": 0.25}, {**YARN, **PLAIN}, index=1),
    Small("cohere2", {**OTHERS, **WINDOWS, "attention_bias": True}, LINEAR),
    Small("ernie4_5", {"head_dim": 10}, PLAIN),
    Small("ernie4_5", {**OTHERS, "use_bias": True}, {**YARN, **PLAIN}, index=1),
    Small("ernie4_5_moe", {"head_dim": 10, "moe_num_experts": 1, "moe_k": 1}, PLAIN),
    Small(
        "ernie4_5_moe",
        {**OTHERS, "use_bias": True, "moe_num_experts": 1, "moe_k": 1},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("diffllama", {"num_key_value_heads": 2, "head_dim": 10, **NORMED}, PLAIN),
    Small("diffllama", {**OTHERS, "attention_bias": True}, {**YARN, **PLAIN}, index=1),
    # EXAONE 4.0 32B with its two kinds of layers, and 1.2B, whose layers all have a rotary
    Small("exaone4", {"head_dim": 10, **EVERY, **NORMED}, PLAIN),
    Small("exaone4", {**OTHERS, **EVERY, "attention_dropout": 0.25}, {**YARN, **PLAIN}, index=1),
    Small("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, LINEAR),
    Small("exaone_moe", {"head_dim": 10, **EVERY, **NORMED, "num_experts": 1}, PLAIN),
    Small(
        "exaone_moe",
        {**OTHERS, **WINDOWS, "attention_dropout": 0.25, "num_experts": 1},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("granitemoe", {"attention_multiplier": 0.25, **ONE}, PLAIN),
    Small("granitemoe", {**OTHERS, "attention_bias": True, **ONE}, LINEAR),
    Small("helium", {"head_dim": 8}, PLAIN),
    Small(
        "helium",
        {**OTHERS, "head_dim": 8, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("hunyuan_v1_dense", {"head_dim": 10, **NORMED}, {**PLAIN, **ALPHA}),
    Small(
        "hunyuan_v1_dense",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("hunyuan_v1_moe", {"head_dim": 10, **NORMED, "num_experts": 1}, {**PLAIN, **ALPHA}),
    Small(
        "hunyuan_v1_moe",
        {
            **OTHERS,
            "head_dim": 12,
            "attention_bias": True,
            "attention_dropout": 0.25,
            "num_experts": 1,
        },
        {**YARN, **PLAIN},
        index=1,
    ),
    Small(
        "cwm",
        {"head_dim": 10, "sliding_window": 3, **TOKENS},
        {**LLAMA3, **PLAIN, "original_max_position_embeddings": 16},
        index=1,
    ),
    Small("cwm", {**OTHERS, "head_dim": 12, **WINDOWS, **TOKENS}, LINEAR, index=1),
    Small("internlm3", {"head_dim": 10}, PLAIN),
    Small(
        "internlm3",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
        LINEAR,
        index=1,
    ),
    Small("ministral", {"head_dim": 10, "sliding_window": 3}, PLAIN),
    Small(
        "ministral",
        {**OTHERS, "head_dim": 12, **WINDOWS, "attention_dropout": 0.25},
        LINEAR,
        index=1,
    ),
    Small("ministral3", {"head_dim": 10, "sliding_window": 3}, {**YARN, **PLAIN, **TEMPERED}),
    Small(
        "ministral3",
        {**OTHERS, "head_dim": 12, "attention_dropout": 0.25},
        {**LINEAR, **TEMPERED},
        index=1,
    ),
    # Laguna, whose layers with a window have more heads; with a gate a component
    Small(
        "laguna",
        {"head_dim": 10, **WINDOWS, **NORMED, "num_attention_heads_per_layer": [9, 6]},
        {**PLAIN, "partial_rotary_factor": 0.6},
        local=100.0,
    ),
    Small(
        "laguna",
        {**OTHERS, **WINDOWS, "head_dim": 12, "gating": "full", "attention_bias": True}
        | {"attention_dropout": 0.25},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5},
        index=1,
        local=100.0,
    ),
    Small("nanochat", {**NORMED}, PLAIN),
    Small(
        "nanochat",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("nemotron", {"head_dim": 12}, HALF),
    Small(
        "nemotron",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25},
        {**LINEAR, **HALF},
        index=1,
    ),
    # OLMo 7B
    Small("olmo", {"head_dim": 10, "clip_qkv": 0.5}, PLAIN),
    Small(
        "olmo",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("olmoe", {"clip_qkv": 0.5, **NORMED, "num_experts": 1}, PLAIN),
    Small(
        "olmoe",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25, "num_experts": 1},
        {**YARN, **PLAIN},
        index=1,
    ),
    # Phi-3.5-MoE
    Small("phimoe", {"sliding_window": 3, **ONE}, {**PLAIN, **LONG}),
    Small("phimoe", {**OTHERS, "attention_bias": True, "attention_dropout": 0.25, **ONE}, PLAIN, 1),
    Small("seed_oss", {"head_dim": 10, "attention_out_bias": True}, PLAIN),
    Small(
        "seed_oss",
        {**OTHERS, "attention_bias": False, "attention_dropout": 0.25, "residual_dropout": 0.0},
        {**YARN, **PLAIN},
        index=1,
    ),
    Small("starcoder2", {"head_dim": 10, "sliding_window": 3}, PLAIN),
    Small("starcoder2", {**OTHERS, "use_bias": False, "attention_dropout": 0.25}, LINEAR, index=1),
]
