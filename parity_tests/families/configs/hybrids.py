"""Decoders whose layers are in part recurrences or convolutions."""

from .sizes import DELTA, EVERY_SECOND, FIRST_FULL, ONE_KEY, OTHERS, PLAIN, QUARTER, YARN
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
]
