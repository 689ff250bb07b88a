"""Encoders of images whose patches turn by row and column."""

from .sizes import FOUR, PLAIN
from .small import Small

LESS = {"num_heads": 4, "hidden_size": 32}
AXIAL = {"rope_type": "axial", **PLAIN}
QWEN = (
    *("qwen2_5_vl_vision", "qwen3_5_moe_vision", "qwen3_5_vision"),
    *("qwen3_vl_moe_vision", "qwen3_vl_vision"),
)
GLM = ("glm4v_moe_vision", "glm4v_vision")
BIASED = {"attention_bias": True, "attention_dropout": 0.25}
CONFIGS = [
    *(Small(name, {}, AXIAL) for name in (*QWEN, *GLM, "qwen2_vl_vision")),
    *(Small(name, LESS, index=1) for name in QWEN),
    *(Small(name, {**LESS, **BIASED}, index=1) for name in GLM),
    Small("qwen2_vl_vision", {"num_heads": 4, "embed_dim": 32}, index=1),
    Small("llama4_vision_model", {}, PLAIN),
    Small("llama4_vision_model", {**FOUR, "attention_dropout": 0.25}, index=1),
    Small("pixtral", {}, AXIAL),
    Small("pixtral", {**FOUR, "attention_dropout": 0.25}, index=1),
]
