"""Shared by the families of decoders: the layer, and the masks of its layer types."""

from collections.abc import Callable, Mapping
from typing import Any

from ..layers import GroupedQueryAttention
from ..masks import CAUSAL, Mask, Window
from ._config import Config


def grouped_query(
    config: Config,
    init: Mapping[str, Any],
    *,
    heads: tuple[int, int, int] | None = None,
    bias: bool | None = None,
    **parts: Any,
) -> GroupedQueryAttention:
    """Builds the layer from a config's sizes and dropout.

    Args:
      config: of the model.
      init: rngs and dtypes.
      heads: N, K and H; None for `config.heads()`.
      bias: of all four projections; None if `parts` specify it.
      parts: further arguments of the layer.

    Raises:
      ValueError: for a config with is_causal=False.
    """
    check_causal(config)
    sizes = (config.count("hidden_size"), *(config.heads() if heads is None else heads))
    biases: dict[str, Any] = {} if bias is None else {"qkv_bias": bias, "out_bias": bias}
    biases["dropout"] = config.rate("attention_dropout")
    return GroupedQueryAttention(*sizes, **{**biases, **parts}, **init)


def decoder_fields(
    width: int,
    layers: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    positions: int,
    theta: float,
) -> dict[str, Any]:
    """Default config fields of a decoder's sizes, rotary and dropout.

    Most classes have no field `head_dim`, but use it if a config contains it.

    >>> decoder_fields(4096, 32, 32, positions=2048, theta=10_000.0)["num_key_value_heads"]
    """
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rope_theta": theta,
        "attention_dropout": 0.0,
    }


def check_causal(config: Config) -> None:
    """Raises ValueError if a decoder's config requests bidirectional attention."""
    if config["is_causal"] is not None and not config.flag("is_causal"):
        raise ValueError("is_causal=False is not served: this model_type is a decoder.")


def check_one_direction(config: Config) -> None:
    """Raises ValueError if a Gemma config requests bidirectional attention."""
    if config.flag("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention=True is not served: in transformers what it does depends "
            "on the implementation that is chosen there."
        )


def causal_window(config: Config) -> Mask:
    """Mask in which each token may attend to itself and the `sliding_window - 1` before it."""
    return CAUSAL & Window(config.count("sliding_window") - 1, 0)


def mask_of(config: Config, kind: str) -> Mask:
    """Returns the mask of a layer of this type."""
    return causal_window(config) if kind == "sliding_attention" else CAUSAL


def alternating(index: int) -> str:
    """Layer type with a window in every second layer, including the first (Gemma 2, gpt-oss)."""
    return "full_attention" if index % 2 else "sliding_attention"


def window_from_layer(config: Config, index: int) -> str:
    """Layer type with a window from `max_window_layers` on, if `use_sliding_window` (Qwen).

    Raises:
      ValueError: if layer_types contain a window that use_sliding_window does not enable.
    """
    return window_if_used(config, index, lambda index: index >= config["max_window_layers"])


def window_if_used(config: Config, index: int, chosen: Callable[[int], bool]) -> str:
    """Layer type with a window in the chosen layers, if `use_sliding_window`.

    Raises:
      ValueError: if layer_types contain a window that use_sliding_window does not enable.
    """
    used = config.flag("use_sliding_window") and config["sliding_window"] is not None

    def default(index: int) -> str:
        return "sliding_attention" if used and chosen(index) else "full_attention"

    kind = config.layer_type(index, default, "sliding_attention")
    if kind == "sliding_attention" and not used:
        raise ValueError(
            f"layer_types[{index}] is 'sliding_attention', which needs use_sliding_window=True and "
            f"a sliding_window; got sliding_window={config['sliding_window']!r}, "
            f"use_sliding_window={config['use_sliding_window']!r}."
        )
    return kind


def by_kind(
    is_first: Callable[[Config, int], bool], first: str, second: str = "self_attn"
) -> Callable[[Config, int], str]:
    """Returns a family's `path` where some layers have a module `first`, the rest `second`."""
    return lambda config, index: f"layers.{{}}.{first if is_first(config, index) else second}"


def has_rotary(config: Config, index: int) -> bool:
    """Whether a layer has a rotary: `no_rope_layers[index]`, else all but every n-th.

    n is `no_rope_layer_interval`. In the list, 1 marks a layer with a rotary.
    """
    listed = config["no_rope_layers"]
    if not listed:
        return (index + 1) % config.count("no_rope_layer_interval") != 0
    if len(listed) <= index:
        raise ValueError(
            f"no_rope_layers must have an entry for each layer; got {len(listed)} entries, and "
            f"index={index}."
        )
    return bool(listed[index])
