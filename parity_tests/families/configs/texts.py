"""Decoders of the words of models that also see or hear, whose tokens have several positions."""

from .sizes import (
    DELTA,
    EVERY_SECOND,
    FOUR,
    LINEAR,
    LLAMA3,
    ODD,
    ONE_KEY,
    OTHERS,
    PLAIN,
    QUARTER,
    QWEN_MOE,
    SHARING,
    THREE,
    TURNS,
    WINDOWS,
    YARN,
)
from .small import Small

TWO_THREE = {"mrope_section": [2, 2, 1]}
CONFIGS = [
    # Qwen3-VL; in its first layer, whose number differs from that of others
    Small("qwen3_vl_text", {"head_dim": 10, "rms_norm_eps": 1e-2}, {**PLAIN, **TURNS, **TWO_THREE}),
    Small(
        "qwen3_vl_text",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25},
        {**YARN, **PLAIN, "mrope_section": [3, 2, 1]},
        index=1,
    ),
    Small(
        "qwen3_vl_moe_text",
        {"head_dim": 10, "rms_norm_eps": 1e-2, **QWEN_MOE},
        {**PLAIN, **TURNS, **TWO_THREE},
    ),
    Small(
        "qwen3_vl_moe_text",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25, **QWEN_MOE},
        {**YARN, **PLAIN, "mrope_section": [3, 2, 1]},
        index=1,
    ),
    # Qwen3-Omni's thinker
    Small(
        "qwen3_omni_moe_text",
        {"head_dim": 10, "rms_norm_eps": 1e-2, **QWEN_MOE},
        {**PLAIN, **TURNS, **TWO_THREE, "interleaved": True},
    ),
    Small(
        "qwen3_omni_moe_text",
        {**OTHERS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25, **QWEN_MOE},
        {**YARN, **PLAIN, "mrope_section": [3, 2, 1]},
        index=1,
    ),
    # Gemma 3n, with layers that make keys alone and with later ones that read them
    Small("gemma3n_text", {"head_dim": 10, **WINDOWS, "rms_norm_eps": 1e-2}, PLAIN, local=100.0),
    Small(
        "gemma3n_text",
        {**OTHERS, **WINDOWS, "head_dim": 12, "attention_bias": True, "attention_dropout": 0.25},
        {**LINEAR},
        index=1,
        local=100.0,
    ),
    Small("gemma3n_text", {**SHARING, "head_dim": 10, "sliding_window": 3}, PLAIN, local=100.0),
    # Llama 3.2 Vision's layers that do not look at images
    Small("mllama_text_model", {}, {**LLAMA3, **PLAIN, "original_max_position_embeddings": 16}),
    Small(
        "mllama_text_model",
        {**OTHERS, "cross_attention_layers": [0], "dropout": 0.25},
        LINEAR,
        index=1,
    ),
    # GLM-4.1V
    Small("glm4v_text", {}, {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}),
    Small("glm4v_text", {**OTHERS, "attention_dropout": 0.25}, {**YARN, **PLAIN, **THREE}, index=1),
    # GLM-4.5V
    Small(
        "glm4v_moe_text",
        {"head_dim": 12, **QWEN_MOE, "n_routed_experts": 1},
        {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    ),
    Small(
        "glm4v_moe_text",
        {**OTHERS, "attention_bias": False, "attention_dropout": 0.25, "n_routed_experts": 1},
        {**PLAIN, **ODD, "mrope_section": [1, 0, 2]},
        index=1,
    ),
    # Qwen3.5-MoE, as Qwen3.5
    Small(
        "qwen3_5_moe_text",
        {"head_dim": 16, "rms_norm_eps": 1e-2, **EVERY_SECOND, **QWEN_MOE},
        {**PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], **TURNS},
        index=1,
    ),
    Small("qwen3_5_moe_text", {"rms_norm_eps": 1e-2, **DELTA, **EVERY_SECOND, **QWEN_MOE}, QUARTER),
    Small(
        "qwen3_5_moe_text",
        {**OTHERS, **ONE_KEY, "hidden_act": "swish", **QWEN_MOE},
        QUARTER,
        index=2,
    ),
    Small(
        "qwen3_5_moe_text",
        {**FOUR, "num_key_value_heads": 2, "head_dim": 12, "attention_bias": True, **QWEN_MOE}
        | {"attention_dropout": 0.25, "layer_types": ["full_attention", "linear_attention"]},
        {**YARN, **PLAIN, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
    ),
]
