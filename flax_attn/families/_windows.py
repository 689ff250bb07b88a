"""Image encoders with attention in windows: Swin, Swin v2 and SAM."""

from collections.abc import Mapping
from typing import Any

from .._internal.checks import check_divides, check_positive
from ..layers import DecomposedRelativeAttention, WindowAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._parts import at
from ._stages import at_block, counted, entry, stage_of

SWIN = {
    **{"image_size": 224, "patch_size": 4, "embed_dim": 96, "depths": (2, 2, 6, 2)},
    **{"num_heads": (3, 6, 12, 24), "window_size": 7, "qkv_bias": True},
    "attention_probs_dropout_prob": 0.0,
    "hidden_size": None,  # after the last stage; in files, but derived by the class
}
SWIN2 = {**SWIN, "pretrained_window_sizes": (0, 0, 0, 0)}
SWIN_NAMES = {
    "num_attention_heads": ("num_heads", "num_attention_heads"),
    "attention_dropout": ("attention_probs_dropout_prob",),
}
SAM = {
    **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "qkv_bias": True},
    **{"image_size": 1024, "patch_size": 16, "window_size": 14, "use_rel_pos": True},
    **{"global_attn_indexes": (2, 5, 8, 11), "attention_dropout": 0.0},
}
SWIN2_RULES = {
    **{f"self.{name}": f"{name[0]}_proj" for name in ("query", "key", "value")},
    **{"output.dense": "o_proj", "self.logit_scale": "logit_scale"},
    "self.continuous_position_bias_mlp.0": "mlp_in",
    "self.continuous_position_bias_mlp.2": "mlp_out",
}


def sides(config: Config, name: str) -> tuple[int, int]:
    """Rows and columns from a field with two counts, or one count for both."""
    value = config[name]
    each = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(each) != 2:
        raise ValueError(f"{name} must be one count or two; got {value!r}.")
    check_positive(**{f"{name}[{axis}]": side for axis, side in enumerate(each)})
    return each


def windows(
    config: Config,
    index: int,
    init: Mapping[str, Any],
    window: int,
    shifted: bool,
    **layer_kwargs: Any,
) -> WindowAttention:
    """Builds the layer of a block.

    Args:
      config: of the model.
      index: of the block.
      init: rngs and dtypes.
      window: side of the window.
      shifted: whether the windows are shifted in every second block.
      layer_kwargs: further arguments of the layer.
    """
    stage, block = stage_of(config, index)
    width, heads = config.count("embed_dim") * 2**stage, entry(config, "num_attention_heads", stage)
    check_divides("num_heads of a stage", heads, "embed_dim times a power of two", width)
    step = config.count("window_size") // 2 if block % 2 and shifted else 0
    return WindowAttention(
        width,
        (window, window),
        heads,
        shift=(step, step),
        qkv_bias=config.flag("qkv_bias"),
        dropout=config.rate("attention_dropout"),
        **layer_kwargs,
        **init,
    )


def swin(config: Config, index: int, init: Mapping[str, Any]) -> WindowAttention:
    """`attention` of SwinModel with the steps around it, on images of the config's image_size.

    A stage as large as one window has no shift, so the shift depends on the image size.

    Raises:
      ValueError: for a window that is larger than the image in its stage.
    """
    whole, patch, window = (
        *(sides(config, x) for x in ("image_size", "patch_size")),
        config.count("window_size"),
    )
    shorter = min(-(-side // step) for side, step in zip(whole, patch, strict=True))
    shorter = -(-shorter // 2 ** stage_of(config, index)[0])
    if shorter < window:
        raise ValueError(
            f"window_size={window} is not served for an image that at layer {index} has {shorter} "
            "patches along its shorter side; image_size, patch_size, depths and window_size must "
            "leave as many."
        )
    return windows(config, index, init, window, shorter > window)


def swin_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Renames the bias table, which has its own module in torch."""
    table = "relative_position_bias_table"
    return (Rule(f"relative_position_bias.{table} -> {table}"),)


def swin2(config: Config, index: int, init: Mapping[str, Any]) -> WindowAttention:
    """`attention` of Swinv2Model with the steps around it, on images of the config's image_size.

    A window is at most as high as the image in its stage, and then has no shift.

    Raises:
      ValueError: for a stage without a row, or a pretrained window of one token.
    """
    stage, window = stage_of(config, index)[0], config.count("window_size")
    rows = sides(config, "image_size")[0] // sides(config, "patch_size")[0] // 2**stage
    check_positive(**{"rows of patches by image_size, patch_size and depths": rows})
    trained = _pretrained(config, stage)
    return windows(
        config, index, init, min(window, rows), rows > window, version=2, pretrained=trained
    )


def _pretrained(config: Config, stage: int) -> tuple[int, int] | None:
    """Sides of the window that a stage was pretrained with; None for the config's window."""
    name = "pretrained_window_sizes"
    each = config.defaults[name] if config[name] is None else config[name]
    if not isinstance(each, list | tuple) or len(each) <= stage or each[stage] in (1, True):
        raise ValueError(f"{name} must have 0 or a count above 1 for each stage; got {each!r}.")
    if each[stage] == 0:
        return None
    side = entry(config, name, stage)
    return side, side


def swin2_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Renames all weights."""
    return tuple(
        Rule(f"{torch_name} -> {flax_name}") for torch_name, flax_name in SWIN2_RULES.items()
    )


def sam(config: Config, index: int, init: Mapping[str, Any]) -> DecomposedRelativeAttention:
    """`attn` of SamVisionModel: on an image in layers of global_attn_indexes, else on a window.

    Layers with windows take each window as a separate image: the model splits the image.

    Raises:
      ValueError: without use_rel_pos.
    """
    if not config.flag("use_rel_pos"):
        raise ValueError(
            "use_rel_pos=False is not served: without the tables it is the attention of a ViT."
        )
    is_global = index in config["global_attn_indexes"] or config["window_size"] == 0
    side = config.count("window_size") if not is_global else _patches(config)
    return DecomposedRelativeAttention(
        config.count("hidden_size"),
        config.query_heads()[0],
        (side, side),
        qkv_bias=config.flag("qkv_bias"),
        dropout=config.rate("attention_dropout"),
        **init,
    )


def _patches(config: Config) -> int:
    """Number of patches in a row of the image."""
    side = config.count("image_size") // config.count("patch_size")
    check_positive(**{"patches by image_size and patch_size": side})
    return side


BLOCK = at_block("encoder.layers.{}.blocks.{}.attention")
SAM_VISION = Family(SAM, sam, path=at("vision_encoder.layers.{}.attn"))
WINDOWS: Mapping[str, Family] = {
    "sam_hq_vision_model": SAM_VISION,
    "sam_vision_model": SAM_VISION,
    "swin": Family(SWIN, swin, swin_rules, SWIN_NAMES, path=BLOCK, derived=counted),
    "swinv2": Family(SWIN2, swin2, swin2_rules, SWIN_NAMES, path=BLOCK, derived=counted),
}
