"""Which kind a layer is, as `layer_types` or other fields say it, and the mask of each kind."""

from collections.abc import Callable

from ..masks import CAUSAL, Mask, Window
from ._config import Config

Kind = Callable[[Config, int], str]
KINDS = ("full_attention", "sliding_attention")


def by_layer_types(default: Kind, other: str = "sliding_attention") -> Kind:
    """The kind that `layer_types` says; without it, `default`.

    Args:
      default: the kind that the config's class derives.
      other: the kind allowed besides "full_attention".
    """
    return lambda config, index: config.layer_type(index, lambda i: default(config, i), other)


def all_but_every(number: int | str, other: str = "sliding_attention") -> Kind:
    """Full attention in every n-th layer, the other kind in the rest.

    Args:
      number: n, or the field with it.
      other: the kind of the rest.
    """

    def kind(config: Config, index: int) -> str:
        every = number if isinstance(number, int) else config.count(number)
        return other if (index + 1) % every else "full_attention"

    return kind


def alternating(config: Config, index: int) -> str:
    """A window in every second layer, including the first (Gemma 2, gpt-oss)."""
    return "full_attention" if index % 2 else "sliding_attention"


def window_if_used(chosen: Callable[[Config, int], bool]) -> Kind:
    """A window in the chosen layers, if `use_sliding_window` (Qwen).

    Raises:
      ValueError: if layer_types contain a window that use_sliding_window does not enable.
    """

    def kind(config: Config, index: int) -> str:
        used = uses_window(config)

        def default(config: Config, index: int) -> str:
            return "sliding_attention" if used and chosen(config, index) else "full_attention"

        layer_type = by_layer_types(default)(config, index)
        if layer_type == "sliding_attention" and not used:
            raise ValueError(
                f"layer_types[{index}] is 'sliding_attention', which needs use_sliding_window=True "
                f"and a sliding_window; got sliding_window={config['sliding_window']!r}, "
                f"use_sliding_window={config['use_sliding_window']!r}."
            )
        return layer_type

    return kind


def uses_window(config: Config) -> bool:
    """Whether a config has a window and enables it."""
    return config.flag("use_sliding_window") and config["sliding_window"] is not None


upper_window = window_if_used(lambda config, index: index >= config.whole("max_window_layers"))


def is_kind(kind: Kind, name: str) -> Callable[[Config, int], bool]:
    """Returns whether a layer is of the kind with this name."""
    return lambda config, index: kind(config, index) == name


def has_rotary(config: Config, index: int) -> bool:
    """Whether a layer has a rotary: `no_rope_layers[index]`, else all but every n-th.

    n is `no_rope_layer_interval`. In the list, 1 marks a layer with a rotary.
    """
    listed = config.listed("no_rope_layers")
    if not listed:
        return (index + 1) % config.count("no_rope_layer_interval") != 0
    if len(listed) <= index:
        raise ValueError(
            f"no_rope_layers must have an entry for each layer; got {len(listed)} entries, and "
            f"index={index}."
        )
    return bool(listed[index])


def causal_window(config: Config) -> Mask:
    """Mask in which each token may attend to itself and the `sliding_window - 1` before it."""
    return CAUSAL & Window(config.count("sliding_window") - 1, 0)


def mask_of(config: Config, kind: str) -> Mask:
    """Returns the mask of a layer of this kind."""
    return causal_window(config) if kind == "sliding_attention" else CAUSAL


def check_causal(config: Config) -> None:
    """Raises ValueError if a decoder's config requests bidirectional attention."""
    if config["is_causal"] is not None and not config.flag("is_causal"):
        raise ValueError(
            "is_causal=False is not served: this model_type is a decoder. Leave it out, and call "
            "the layer with mask=FULL to attend in both directions."
        )
