"""Image encoders with rotary positions by row and column: `layer(x, positions=...)`, `2 *B T`.

`mask=Segments(ids)` separates several images in one sequence.
"""

from collections.abc import Mapping

from ..positions import Axial, Layout, Rotary
from ..weights.rule import Rule
from ._config import Config, Family, above_zero
from ._fused import fused
from ._parts import ALL_BIASES, NO_DROPOUT, Chosen, LayerRules, at, encoder, input_biases
from ._rope import parameters


def rows_and_columns(
    *, layout: Layout = "half", shared: bool = False, is_typed: bool = True
) -> Chosen:
    """A rotary of rows and columns, of whose parameters the base alone is read.

    Args:
      layout: of the pairs.
      shared: whether both axes share one list of frequencies.
      is_typed: whether the class refuses a rope_type that is not "axial".
    """

    def part(config: Config, index: int) -> Mapping[str, Rotary]:
        new, old = config.entry("rope_parameters"), config.entry("rope_scaling")
        rope = parameters(config, new, old, known=("rope_type", "rope_theta"))
        kind = rope.get("rope_type", "axial")
        if is_typed and kind not in ("axial", "default"):
            raise ValueError(f"rope_type of rows and columns must be 'axial'; got {kind!r}.")
        base = above_zero("rope_theta", rope.get("rope_theta"))
        return {"rotary": Rotary(base, layout, axes=Axial(shared=shared))}

    return part


def in_thirds(bias: str = "") -> LayerRules:
    """Rules of `qkv`, with the rows of the queries, then of the keys, then of the values.

    Args:
      bias: the field that says whether it has a bias; "" if it always has.
    """

    def rules(config: Config, index: int) -> tuple[Rule, ...]:
        has_bias = not bias or config.flag(bias)
        return (*fused("qkv", "(n o) i -> n i o", bias=has_bias), Rule("proj -> o_proj"))

    return rules


IN_BLOCKS = at("blocks.{}.attn")
# Qwen2.5-VL's blocks except fullatt_block_indexes attend within windows: pass `mask=Segments(ids)`.
QWEN = encoder(ALL_BIASES, rows_and_columns(), NO_DROPOUT, rules=in_thirds(), path=IN_BLOCKS)
GLM = encoder(input_biases(), rows_and_columns(), rules=in_thirds("attention_bias"), path=IN_BLOCKS)
ROWS: Mapping[str, Family] = {
    "glm4v_moe_vision": GLM,
    "glm4v_vision": GLM,
    # Positions: column, row, from 1; 0 for the class token.
    "llama4_vision_model": encoder(
        ALL_BIASES,
        rows_and_columns(layout="interleaved", is_typed=False),
        path=at("model.layers.{}.self_attn"),
    ),
    "pixtral": encoder(rows_and_columns(shared=True), path=at("transformer.layers.{}.attention")),
    "qwen2_5_vl_vision": QWEN,
    # Its hidden_size is the width of another part of the model.
    "qwen2_vl_vision": QWEN._replace(names={"hidden_size": ("embed_dim",)}),
    "qwen3_5_moe_vision": QWEN,
    "qwen3_5_vision": QWEN,
    "qwen3_vl_moe_vision": QWEN,
    "qwen3_vl_vision": QWEN,
}
