"""Decoders of words whose layers are all softmax attention."""

from .sizes import (
    FOUR,
    LINEAR,
    LLAMA3,
    ODD,
    OTHERS,
    PLAIN,
    QUARTERS,
    QWEN,
    QWEN_MOE,
    SHARED,
    SHARING,
    THREE,
    TWELVE,
    WINDOWS,
    YARN,
)
from .small import Small

CONFIGS = [
    Small("llama", {"head_dim": 10, "attention_bias": True}, PLAIN),
    # Llama 3.2 in small
    Small(
        "llama",
        {**OTHERS, "attention_dropout": 0.25},
        {**LLAMA3, "rope_theta": 5e5, "original_max_position_embeddings": 16},
    ),
    Small("llama", {"head_dim": 10}, {**YARN, **PLAIN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    Small("llama", {"head_dim": 10}, LINEAR),
    Small(
        "llama",
        {"head_dim": 10, "max_position_embeddings": 4},
        {"rope_type": "dynamic", "factor": 3.0, **PLAIN},
    ),
    Small("mistral", {"head_dim": 10, "sliding_window": 3}, PLAIN),
    # Mistral 0.3
    Small("mistral", {**OTHERS, "sliding_window": None, "attention_dropout": 0.25}, PLAIN),
    Small("qwen2", {**QWEN, "attention_dropout": 0.25}, PLAIN, index=1),
    # Qwen2.5 with its window left out
    Small("qwen2", {**OTHERS, **QWEN, "use_sliding_window": False}, {**YARN, **PLAIN}, index=1),
    Small("qwen3", {"head_dim": 10, "attention_bias": True, "rms_norm_eps": 1e-2}, PLAIN),
    Small("qwen3", {**OTHERS, **QWEN, "head_dim": 12}, {**YARN, **PLAIN}, index=1),
    Small(
        "gemma2",
        {**WINDOWS, "head_dim": 10, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
        PLAIN,
    ),
    Small(
        "gemma2",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "attn_logit_softcapping": None}
        | {"attention_bias": True, "query_pre_attn_scalar": 144},
        PLAIN,
        index=1,
    ),
    Small("smollm3", {"no_rope_layers": [1, 0], **QWEN, "attention_bias": True}, PLAIN, index=1),
    Small("smollm3", {**OTHERS, "no_rope_layer_interval": 2}, {**YARN, **PLAIN}),
    Small("olmo2", {"head_dim": 10, "rms_norm_eps": 1e-2, "attention_bias": True}, PLAIN),
    Small("olmo2", {**OTHERS, "attention_dropout": 0.25}, PLAIN),
    Small("cohere", {"head_dim": 10, "use_qk_norm": True, "layer_norm_eps": 1e-2}, PLAIN),
    Small("cohere", {**OTHERS, "attention_bias": True}, PLAIN),
    Small("phi3", {"sliding_window": 3}, {**PLAIN, "partial_rotary_factor": 0.5}),
    # Phi-4-mini, whose sequences are longer than those of its training
    Small(
        "phi3",
        {**OTHERS, "original_max_position_embeddings": 4},
        {
            **PLAIN,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0],
            "long_factor": [2.0, 3.0, 5.0],
            "partial_rotary_factor": 0.75,
        },
    ),
    Small("phi3", OTHERS, {**PLAIN, "partial_rotary_factor": 0.7}),  # 5 of 8 components
    Small("gpt_oss", {"head_dim": 10, **WINDOWS}, {**PLAIN, "rope_type": "default"}),
    Small(
        "gpt_oss",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "attention_bias": False},
        {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 15e4},
        index=1,
    ),
    Small("gemma3_text", {"head_dim": 10, **WINDOWS, "rms_norm_eps": 1e-2}, PLAIN, local=100.0),
    Small(
        "gemma3_text",
        {**OTHERS, "head_dim": 12, "sliding_window": 3, "sliding_window_pattern": 2},
        {**PLAIN, "rope_type": "linear", "factor": 8.0},
        index=1,
        local=100.0,
    ),
    Small(
        "gemma3_text",
        {"head_dim": 10, **WINDOWS, "sliding_window": 4, "use_bidirectional_attention": True},
        PLAIN,
        local=100.0,
    ),
    Small(
        "llama4_text",
        {"head_dim": 10, "no_rope_layers": [1, 0], "attention_chunk_size": 3, "use_qk_norm": True}
        | {"rms_norm_eps": 1e-2, "num_local_experts": 1},
        PLAIN,
    ),
    Small(
        "llama4_text",
        {**OTHERS, "head_dim": 12, "no_rope_layer_interval": 2, "floor_scale": 3}
        | {"attn_scale": 0.7, "attention_bias": True, "attention_chunk_size": 3},
        {**LLAMA3, **PLAIN, "original_max_position_embeddings": 16},
        index=1,
    ),
    # DeepSeek-V2-Lite
    Small(
        "deepseek_v2",
        {"q_lora_rank": None, "attention_dropout": 0.25},
        {**YARN, **PLAIN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    Small("deepseek_v2", {**FOUR, "attention_bias": True}, LINEAR, index=1),
    Small("deepseek_v3", {}, {**YARN, **PLAIN, "mscale": 0.7, "mscale_all_dim": 1.3}),
    Small(
        "deepseek_v3",
        {**FOUR, "num_key_value_heads": 4, "attention_bias": True, "rope_interleave": False},
        PLAIN,
        index=1,
    ),
    # GPT-2 as Mistral trained it, whose scale is another in every layer
    Small(
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": False}, index=2
    ),
    Small("gpt2", {"n_embd": 32, "n_head": 4, "scale_attn_weights": False, "attn_pdrop": 0.0}),
    # StarCoder
    Small("gpt_bigcode", {"resid_pdrop": 0.0}),
    Small("gpt_bigcode", {"n_embd": 32, "n_head": 4, "multi_query": False}, index=1),
    # Pythia
    Small("gpt_neox", {}, {**PLAIN, "partial_rotary_factor": 0.25}),
    Small("gpt_neox", {**FOUR, "attention_bias": False}, {**PLAIN, "partial_rotary_factor": 0.7}),
    Small(
        "gpt_neox",
        {},
        {**PLAIN, "partial_rotary_factor": 1.0, "rope_type": "linear", "factor": 3.0},
    ),
    # Bloom with 12 heads, whose slopes are no powers of two
    Small("bloom", {"n_head": 12, "attention_dropout": 0.25}),
    Small("bloom", {"hidden_size": 32, "n_head": 4}, index=1),
    # Falcon 7B, Falcon 40B, Falcon-RW
    Small("falcon", {}, PLAIN),
    Small(
        "falcon", {**FOUR, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True}, PLAIN
    ),
    Small("falcon", {"multi_query": False, "alibi": True, "num_attention_heads": 12, "bias": True}),
    # Gemma 2B
    Small("gemma", {"head_dim": 10, "num_key_value_heads": 1}, PLAIN),
    Small("gemma", {**OTHERS, "head_dim": 12, "attention_bias": True}, LINEAR),
    # Qwen1.5-MoE
    Small("qwen2_moe", {**QWEN, "attention_dropout": 0.25}, PLAIN),
    Small("qwen2_moe", {**OTHERS, **QWEN, "qkv_bias": False}, {**YARN, **PLAIN}, index=1),
    # Qwen3 30B-A3B
    Small("qwen3_moe", {"head_dim": 10, "rms_norm_eps": 1e-2, **QWEN_MOE}, PLAIN),
    Small("qwen3_moe", {**OTHERS, **QWEN, "attention_bias": True}, {**YARN, **PLAIN}, index=1),
    # Gemma 4 26B, where keys are values too; a layer with a window; E2B, whose last ones share keys
    Small(
        "gemma4_text", {**TWELVE, **SHARED, "rms_norm_eps": 1e-2}, {**QUARTERS, **PLAIN}, 1, 100.0
    ),
    Small(
        "gemma4_text",
        {**OTHERS, **WINDOWS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25},
        {**QUARTERS, **PLAIN},
        local=100.0,
    ),
    Small(
        "gemma4_text",
        {**TWELVE, **SHARING, "sliding_window": 3, "use_bidirectional_attention": "vision"},
        {**LINEAR, **PLAIN},
        index=1,
        local=100.0,
    ),
    # OLMo 3, whose rotary is stretched where there is no window
    Small("olmo3", {"rms_norm_eps": 1e-2, **WINDOWS}, {**YARN, **PLAIN}, index=1, local=5e5),
    Small("olmo3", {**OTHERS, "attention_bias": True, "sliding_window": 3}, PLAIN, local=5e5),
    # Granite 3
    Small("granite", {"attention_multiplier": 0.25}, PLAIN),
    Small("granite", {**OTHERS, "head_dim": 10, "attention_bias": True}, LINEAR),
    # GLM-4 9B
    Small("glm4", {"head_dim": 12}, {**PLAIN, "partial_rotary_factor": 0.5}),
    Small("glm4", {**OTHERS, "head_dim": 10, "attention_bias": False}, {**PLAIN, **ODD}),
    # Qwen2.5-VL
    Small("qwen2_5_vl_text", {}, {**PLAIN, "rope_type": "mrope", "mrope_section": [2, 1, 1]}),
    Small("qwen2_5_vl_text", {**OTHERS, **QWEN}, {**YARN, **PLAIN, **THREE}, index=1),
]
