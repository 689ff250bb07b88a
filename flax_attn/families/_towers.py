"""Image encoders with rotary by row and column: `layer(x, positions=...)`, `2 *B T`.

`mask=Segments(ids)` separates several images in one sequence.
"""

from collections.abc import Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..positions import Axial, Layout, Rotary
from ..weights.rule import Rule
from ._config import Config, Family, above_zero
from ._encoder import multi_head
from ._fused import fused
from ._parts import at
from ._rope import parameters

SIZES = {"depth": 32, "hidden_size": 3584, "num_heads": 16, "rope_theta": 10_000.0}
QWEN3 = {**SIZES, "depth": 27, "hidden_size": 1152}
GLM = {
    **{"depth": 24, "hidden_size": 1536, "num_heads": 12, "rope_theta": 10_000.0},
    **{"attention_bias": False, "attention_dropout": 0.0},
}
PIXTRAL = {
    **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16},
    **{"attention_dropout": 0.0, "rope_theta": 10_000.0},
}
LLAMA4 = {
    **{"hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16},
    **{"attention_dropout": 0.0, "rope_theta": 10_000.0},
}
NAMES = {
    "num_hidden_layers": ("depth", "num_hidden_layers"),
    "num_attention_heads": ("num_heads", "num_attention_heads"),
}
EMBEDDED = {**NAMES, "hidden_size": ("embed_dim",)}  # Qwen2-VL, whose hidden_size is another width


def axial(config: Config, *, layout: Layout = "half", shared: bool = False) -> Rotary:
    """Builds the rotary of rows and columns.

    Raises:
      ValueError: for scaling parameters, which the classes do not read.
    """
    rope = parameters(config, config.entry("rope_parameters"), config.entry("rope_scaling"))
    kind = rope.get("rope_type", "axial")
    if kind not in ("axial", "default") or {*rope} - {"rope_type", "rope_theta"}:
        raise ValueError(
            "rope_parameters of rows and columns have a rope_theta, and rope_type='axial'; got "
            f"{rope}."
        )
    base = above_zero("rope_theta", rope["rope_theta"])
    return Rotary(base, layout, axes=Axial(shared=shared))


def qwen(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of the vision models of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

    Qwen2.5-VL's blocks except fullatt_block_indexes attend within windows: pass
    `mask=Segments(ids)`.
    """
    still = config.replaced(attention_dropout=0.0)
    return multi_head(still, init, qkv_bias=True, out_bias=True, rotary=axial(config))


def glm(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attn` of Glm4vVisionModel."""
    bias = config.flag("attention_bias")
    return multi_head(config, init, qkv_bias=bias, out_bias=False, rotary=axial(config))


def qkv(config: Config, index: int) -> tuple[Rule, ...]:
    """`qkv` contains the rows of the queries, then of the keys, then of the values."""
    bias = "attention_bias" not in config.defaults or config.flag("attention_bias")
    return (*fused("qkv", "(n o) i -> n i o", bias=bias), Rule("proj -> o_proj"))


def pixtral(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`attention` of PixtralVisionModel, whose axes share one list of frequencies."""
    rope = axial(config, shared=True)
    return multi_head(config, init, qkv_bias=False, out_bias=False, rotary=rope)


def llama4(config: Config, index: int, init: Mapping[str, Any]) -> GroupedQueryAttention:
    """`self_attn` of Llama4VisionModel; positions: column, row, from 1; 0 for the class token."""
    rope = axial(config, layout="interleaved")
    return multi_head(config, init, qkv_bias=True, out_bias=True, rotary=rope)


ENCODER = at("blocks.{}.attn")
QWEN3_VISION = Family(QWEN3, qwen, qkv, NAMES, path=ENCODER)
GLM_VISION = Family(GLM, glm, qkv, NAMES, path=ENCODER)
TOWERS: Mapping[str, Family] = {
    "glm4v_moe_vision": GLM_VISION,
    "glm4v_vision": GLM_VISION,
    "llama4_vision_model": Family(LLAMA4, llama4, path=at("model.layers.{}.self_attn")),
    "pixtral": Family(PIXTRAL, pixtral, path=at("transformer.layers.{}.attention")),
    "qwen2_5_vl_vision": Family(SIZES, qwen, qkv, NAMES, path=ENCODER),
    "qwen2_vl_vision": Family(
        {"depth": 32, "embed_dim": 1280, "num_heads": 16, "rope_theta": 10_000.0},
        qwen,
        qkv,
        EMBEDDED,
        path=ENCODER,
    ),
    "qwen3_5_moe_vision": QWEN3_VISION,
    "qwen3_5_vision": QWEN3_VISION,
    "qwen3_vl_moe_vision": QWEN3_VISION,
    "qwen3_vl_vision": QWEN3_VISION,
}
