"""Image encoders in stages or windows; `index` counts the blocks of all stages.

They take whole images, `*B Y X channels`. SegFormer and PVT reduce keys and values; Swin and SAM
attend within windows.
"""

from collections.abc import Callable, Mapping
from typing import Any

from .._internal.checks import check_divides, check_positive
from ..layers import DecomposedRelativeAttention, SpatialReductionAttention, WindowAttention
from ..weights.rule import Rule
from ._config import Config, Family
from ._parts import at, renamed


def depths(config: Config) -> tuple[int, ...]:
    """Number of blocks of each stage; num_encoder_blocks or the list sets the number of stages.

    Raises:
      ValueError: for no list, fewer entries than stages, or an entry that is not a count.
    """
    each = config["depths"]
    if "num_encoder_blocks" in config.defaults:
        stages = config.count("num_encoder_blocks")
    else:
        stages = len(each) if isinstance(each, list | tuple) else 0
    if stages == 0:
        raise ValueError(f"depths must have a count for each stage; got {each!r}.")
    return tuple(entry(config, "depths", stage) for stage in range(stages))


def entry(config: Config, name: str, stage: int) -> int:
    """Returns the entry of one stage from a field with a count for each stage.

    Raises:
      ValueError: if the field is not a list of that length, or the entry is not a count.
    """
    each, called = config[name], config.name(name)
    if not isinstance(each, list | tuple) or len(each) <= stage:
        raise ValueError(f"{called} must have a count for each stage, from 0 on; got {each!r}.")
    check_positive(**{f"{called}[{stage}]": each[stage]})
    return each[stage]


def stage_and_block(each: tuple[int, ...], index: int) -> tuple[int, int]:
    """The stage of a block and its index in the stage, both from 0.

    >>> stage_and_block((2, 3), 4)
    (1, 2)
    """
    stage = 0
    while index >= each[stage]:
        index, stage = index - each[stage], stage + 1
    return stage, index


def counted(config: Config) -> Config:
    """Returns the config with the blocks of all stages as its layers."""
    return config.replaced(num_hidden_layers=sum(depths(config)))


def stage_of(config: Config, index: int) -> tuple[int, int]:
    """The stage of a block and its index in the stage."""
    return stage_and_block(depths(config), index)


def reduced(
    config: Config, stage: int, ratios: str, init: Mapping[str, Any], **layer_kwargs: Any
) -> SpatialReductionAttention:
    """Builds the layer of a stage.

    Args:
      config: of the model.
      stage: from 0.
      ratios: the field with the reduction ratio of each stage.
      layer_kwargs: further arguments of the layer.
    """
    width, heads = (entry(config, x, stage) for x in ("hidden_sizes", "num_attention_heads"))
    check_divides("num_attention_heads of a stage", heads, "its hidden_sizes", width)
    dropout = config.rate("attention_dropout")
    ratio = entry(config, ratios, stage)
    return SpatialReductionAttention(width, heads, ratio, dropout=dropout, **layer_kwargs, **init)


def segformer(config: Config, index: int, init: Mapping[str, Any]) -> SpatialReductionAttention:
    """`attention` of SegformerModel, over an image `*B Y X D`."""
    return reduced(config, stage_of(config, index)[0], "sr_ratios", init, eps=1e-5)


def segformer_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """Renames the projections of transformers 5, and the reduction, which has its own module."""
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "dense"}
    projections = tuple(Rule(f"{torch_name} -> {name}") for torch_name, name in names.items())
    if entry(config, "sr_ratios", stage_of(config, index)[0]) == 1:
        return projections
    parts = ("sequence_reduction", "layer_norm")
    return (*projections, *(Rule(f"sequence_reduction.{part} -> {part}") for part in parts))


def pvt(config: Config, index: int, init: Mapping[str, Any]) -> SpatialReductionAttention:
    """`attention` of PvtModel; the last stage, with a class token, takes an image of one row.

    Raises:
      ValueError: for a reduction in the last stage, which its class token makes impossible.
    """
    stage, ratios = stage_of(config, index)[0], "sequence_reduction_ratios"
    if stage == config["num_encoder_blocks"] - 1 and entry(config, ratios, stage) > 1:
        raise ValueError(
            "sequence_reduction_ratios must end with 1, since the last stage has a class token; "
            f"got {config[ratios]!r}."
        )
    layer_kwargs = {"qkv_bias": config.flag("qkv_bias"), "eps": config.number("layer_norm_eps")}
    return reduced(config, stage, ratios, init, **layer_kwargs)


def pvt_rules(config: Config, index: int) -> tuple[Rule, ...]:
    """All weights but the output projection are in a submodule `self`."""
    stage = stage_of(config, index)[0]
    names = ["query", "key", "value"]
    if entry(config, "sequence_reduction_ratios", stage) > 1:
        names += ["sequence_reduction", "layer_norm"]
    return (*(Rule(f"self.{x} -> {x}") for x in names), Rule("output.dense -> dense"))


def at_block(path: str) -> Callable[[Config, int], str]:
    """Returns the `path` of a family with stages: {} for the stage, then {} for the block."""
    return lambda config, index: path.format(*stage_of(config, index))


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
    is_global = index in config.listed("global_attn_indexes") or config["window_size"] == 0
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


SWIN_TABLE = "relative_position_bias_table"
DROPOUT = {"attention_dropout": ("attention_probs_dropout_prob",)}
IN_STAGES = {**DROPOUT, "num_encoder_blocks": ("num_encoder_blocks", "num_hidden_layers")}
SWIN = {
    "names": DROPOUT,
    "path": at_block("encoder.layers.{}.blocks.{}.attention"),
    "derived": counted,
    "defaults": {"hidden_size": None},  # after the last stage; in files, but derived by the class
}
SAM = Family(sam, path=at("vision_encoder.layers.{}.attn"))
ROWS: Mapping[str, Family] = {
    "pvt": Family(
        pvt, pvt_rules, DROPOUT, path=at_block("encoder.block.{}.{}.attention"), derived=counted
    ),
    "sam_hq_vision_model": SAM,
    "sam_vision_model": SAM,
    "segformer": Family(
        segformer,
        segformer_rules,
        IN_STAGES,
        path=at_block("stages.{}.blocks.{}.attention"),
        derived=counted,
    ),
    # The bias table has its own module in torch.
    "swin": Family(swin, renamed(f"relative_position_bias.{SWIN_TABLE} -> {SWIN_TABLE}"), **SWIN),
    "swinv2": Family(
        swin2,
        renamed(
            *(f"self.{x} -> {x[0]}_proj" for x in ("query", "key", "value")),
            "output.dense -> o_proj",
            "self.logit_scale -> logit_scale",
            "self.continuous_position_bias_mlp.0 -> mlp_in",
            "self.continuous_position_bias_mlp.2 -> mlp_out",
        ),
        **SWIN,
    ),
}
