"""Decoders whose rotary turns a part of a head."""

from .sizes import FOUR, HALF, LINEAR, OTHERS, PLAIN, YARN
from .small import Small

CONFIGS = [
    # GLM-4.5
    Small(
        "glm4_moe",
        {"head_dim": 12, "use_qk_norm": True, "rms_norm_eps": 1e-2, "n_routed_experts": 1},
        HALF,
    ),
    Small(
        "glm4_moe",
        {**OTHERS, "attention_bias": True, "attention_dropout": 0.25, "n_routed_experts": 1},
        {**YARN, **HALF},
        index=1,
    ),
    # MiniMax-M2
    Small("minimax_m2", {"head_dim": 12, "rotary_dim": 6, "num_local_experts": 1}, PLAIN),
    Small(
        "minimax_m2",
        {**OTHERS, "head_dim": 12, "rms_norm_eps": 1e-2, "attention_dropout": 0.25}
        | {"num_local_experts": 1},
        {**LINEAR, **HALF},
        index=1,
    ),
    # Phi-2
    Small("phi", {}, {**PLAIN, "partial_rotary_factor": 1.0}),
    Small(
        "phi",
        {**OTHERS, "qk_layernorm": True, "layer_norm_eps": 1e-2, "attention_dropout": 0.25},
        {**LINEAR, **HALF},
        index=1,
    ),
    Small("persimmon", {"layer_norm_eps": 1e-2}, {**PLAIN, "partial_rotary_factor": 1.0}),
    Small(
        "persimmon",
        {**FOUR, "qk_layernorm": False, "attention_dropout": 0.25},
        {**LINEAR, **HALF},
        index=1,
    ),
    # StableLM 2 12B
    Small("stablelm", {"qk_layernorm": True, "layer_norm_eps": 1e-2}, HALF),
    Small(
        "stablelm",
        {**OTHERS, "use_qkv_bias": True, "attention_dropout": 0.25},
        {**LINEAR, **HALF},
        index=1,
    ),
]
