"""Decoders whose layers are in part recurrences or convolutions."""

from .sizes import (
    DELTA,
    EVERY_SECOND,
    FIRST_FULL,
    FULL_AND_LINEAR,
    HALF,
    KIMI,
    LINEAR,
    ONE_KEY,
    OTHERS,
    PLAIN,
    PUBLISHED_KIMI,
    QUARTER,
    SELECTED,
    YARN,
)
from .small import Small

CONFIGS = [
    # Qwen3-Next 80B-A3B: a layer with full attention, two with a delta rule
    Small("qwen3_next", {"head_dim": 16, "rms_norm_eps": 1e-2, **EVERY_SECOND}, QUARTER, index=1),
    Small("qwen3_next", {"rms_norm_eps": 1e-2, **DELTA, **EVERY_SECOND}, QUARTER),
    Small("qwen3_next", {**OTHERS, **ONE_KEY, "hidden_act": "swish"}, QUARTER, index=2),
    Small(
        "qwen3_next",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25}
        | {"layer_types": ["full_attention", "linear_attention"]},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5},
    ),
    # LFM2: a layer with full attention, two with a convolution, another with full attention
    Small("lfm2", {"full_attn_idxs": [1], "norm_eps": 1e-2}, PLAIN, index=1),
    Small("lfm2", {"full_attn_idxs": [1], "conv_L_cache": 4}, PLAIN),
    Small("lfm2", {**OTHERS, **FIRST_FULL, "conv_bias": True}, PLAIN, index=1),
    Small("lfm2", {**OTHERS, **FIRST_FULL, "head_dim": 10}, {**YARN, **PLAIN}),
    # LFM2-MoE
    Small("lfm2_moe", {"layer_types": ["conv", "full_attention"], "norm_eps": 1e-2}, PLAIN, 1),
    Small("lfm2_moe", {**OTHERS, **FIRST_FULL, "conv_bias": True, "conv_L_cache": 4}, PLAIN, 1),
    Small("lfm2_moe", {**OTHERS, **FIRST_FULL, "head_dim": 10}, {**YARN, **PLAIN}),
    # Qwen3.5, as Qwen3-Next
    Small(
        "qwen3_5_text",
        {"head_dim": 16, "rms_norm_eps": 1e-2, **EVERY_SECOND},
        {
            **PLAIN,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        index=1,
    ),
    Small("qwen3_5_text", {"rms_norm_eps": 1e-2, **DELTA, **EVERY_SECOND}, QUARTER),
    Small("qwen3_5_text", {**OTHERS, **ONE_KEY, "hidden_act": "swish"}, QUARTER, index=2),
    Small(
        "qwen3_5_text",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25}
        | {"layer_types": ["full_attention", "linear_attention"]},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    ),
    # Kimi Linear 48B-A3B: two layers with a delta rule, two with latent attention
    Small("kimi_linear", {**KIMI, "rms_norm_eps": 1e-2}),
    Small("kimi_linear", {**PUBLISHED_KIMI, "hidden_act": "swish"}, index=1),
    Small("kimi_linear", {**FULL_AND_LINEAR, "q_lora_rank": 10, "attention_bias": True}),
    Small("kimi_linear", {**PUBLISHED_KIMI, "v_head_dim": 8, "attention_dropout": 0.25}),
    # Mamba 2 and Codestral Mamba, whose steps may have limits
    Small("mamba2", {"layer_norm_epsilon": 1e-2}),
    Small(
        "mamba2",
        {"expand": 3, "head_dim": 18, "n_groups": 2, "use_bias": True, "use_conv_bias": False}
        | {"time_step_limit": [0.5, 0.8], "hidden_act": "swish"},
        index=1,
    ),
    # MiniMax 01: three layers with full attention, two with lightning attention
    Small("minimax", {}, PLAIN),
    Small("minimax", {"head_dim": 10}, PLAIN, index=1),
    Small("minimax", {**OTHERS, **FULL_AND_LINEAR, "hidden_act": "swish"}, PLAIN, index=1),
    Small("minimax", {**OTHERS, "head_dim": 10, "sliding_window": 3}, {**YARN, **PLAIN}),
    Small("minimax", {"attention_dropout": 0.25}, LINEAR),
    # RecurrentGemma 2B: two layers with a recurrence, two with a window
    Small("recurrent_gemma", {"conv1d_width": 3}, PLAIN),
    Small("recurrent_gemma", {**OTHERS, "lru_width": 36}, PLAIN, index=1),
    Small("recurrent_gemma", {"attention_window_size": 3}, QUARTER, index=2),
    Small(
        "recurrent_gemma",
        {**OTHERS, "attention_window_size": 4, "attention_bias": True}
        | {"block_types": ["attention", "recurrent"], "attention_dropout": 0.25},
        {**PLAIN, "partial_rotary_factor": 0.5},
    ),
    # OLMo hybrid: two layers with a delta rule, one without a rotary, one with it
    Small("olmo_hybrid", DELTA),
    Small("olmo_hybrid", {**OTHERS, "linear_allow_neg_eigval": False, "hidden_act": "swish"}),
    Small(
        "olmo_hybrid",
        {"rms_norm_eps": 1e-2, "attention_bias": True}
        | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        index=1,
    ),
    Small("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]}, index=1),
    Small(
        "olmo_hybrid",
        {**OTHERS, **FULL_AND_LINEAR, "attention_dropout": 0.25},
        {**YARN, **PLAIN},
    ),
    # Bamba 9B: two layers with a state space, two with full attention
    Small("bamba", {"attn_layer_indices": [1]}, PLAIN),
    Small(
        "bamba",
        {"mamba_expand": 3, "mamba_d_head": 18, "mamba_conv_bias": False, "mamba_proj_bias": True}
        | {"time_step_limit": [0.5, 0.8], "hidden_act": "swish"},
        PLAIN,
        index=1,
    ),
    Small("bamba", {"attn_layer_indices": [1], "attention_bias": True}, HALF, index=1),
    Small(
        "bamba",
        {**OTHERS, "attn_layer_indices": [0], "attention_dropout": 0.25},
        {**YARN, **HALF},
    ),
    # Granite 4: two layers with a state space, one without a rotary, one with it
    Small("granitemoehybrid", {"layer_types": ["mamba", "attention"]}),
    Small(
        "granitemoehybrid",
        {"mamba_expand": 3, "mamba_d_head": 18, "mamba_conv_bias": False, "mamba_proj_bias": True}
        | {"time_step_limit": [0.5, 0.8], "hidden_act": "swish"},
        index=1,
    ),
    Small(
        "granitemoehybrid", {"layer_types": ["mamba", "attention"], "attention_bias": True}, {}, 1
    ),
    Small(
        "granitemoehybrid",
        {**OTHERS, **FULL_AND_LINEAR, "position_embedding_type": "rope", "attention_dropout": 0.25}
        | {"attention_multiplier": 0.25},
        {**YARN, **PLAIN},
    ),
    # Nemotron-H 8B, by a word of letters and by a list: two state spaces, two layers with attention
    Small("nemotron_h", {"hybrid_override_pattern": "M-*", "layer_norm_epsilon": 1e-2}),
    Small(
        "nemotron_h",
        {"layers_block_type": ["attention", "mamba"], "n_groups": 2, "mamba_hidden_act": "swish"}
        | {"use_bias": True, "use_conv_bias": False, "time_step_min": 0.5},
        index=1,
    ),
    Small("nemotron_h", {"hybrid_override_pattern": "M-*"}, index=2),
    Small(
        "nemotron_h",
        {"layers_block_type": ["full_attention", "linear_attention"], "attention_dropout": 0.25}
        | {**OTHERS, "head_dim": 12},
    ),
    # Mamba 130M and Falcon Mamba 7B
    Small("mamba", {"conv_kernel": 3}),
    Small("mamba", {**SELECTED, "intermediate_size": 40}, index=1),
    Small("falcon_mamba", {"mixer_rms_eps": 1e-2}),
    Small("falcon_mamba", SELECTED, index=1),
    # Jamba 1.5: two layers with a state space, two with full attention
    Small("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "rms_norm_eps": 1e-2}),
    Small(
        "jamba",
        {"mamba_expand": 3, "mamba_dt_rank": 7, "mamba_d_conv": 3, "mamba_conv_bias": False}
        | {"mamba_proj_bias": True, "hidden_act": "swish"},
        index=1,
    ),
    Small("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}, index=1),
    Small(
        "jamba",
        {**OTHERS, "attn_layer_offset": 0, "head_dim": 12, "attention_dropout": 0.25},
    ),
]
