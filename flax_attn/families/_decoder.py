"""What the families of decoders share: the layer, and which of its kinds sees how far."""

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
    """The layer of a config's sizes and dropout.

    Args:
      config: of the model.
      house: rngs and dtypes.
      heads: N, K and H; None for `config.heads()`.
      bias: of all four projections; None where `parts` say it.
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
    """What a decoder's config says by default of its sizes, its rotary and its dropout.

    Most classes have no field `head_dim`, and use one all the same.

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
    """ValueError for a config whose decoder is asked to look ahead."""
    if config["is_causal"] is not None and not config.flag("is_causal"):
        raise ValueError("is_causal=False is not served: this model_type is a decoder.")


def check_one_direction(config: Config) -> None:
    """ValueError for a Gemma that is asked to look ahead."""
    if config.flag("use_bidirectional_attention"):
        raise ValueError(
            "use_bidirectional_attention=True is not served: in transformers what it does depends "
            "on the implementation that is chosen there."
        )


def causal_window(config: Config) -> Mask:
    """Each token sees itself and the `sliding_window - 1` before it."""
    return CAUSAL & Window(config.count("sliding_window") - 1, 0)


def mask_of(config: Config, kind: str) -> Mask:
    """The mask of a layer of this type."""
    return causal_window(config) if kind == "sliding_attention" else CAUSAL


def alternating(index: int) -> str:
    """A window in every second layer, the first included (Gemma 2, gpt-oss)."""
    return "full_attention" if index % 2 else "sliding_attention"


def window_from_layer(config: Config, index: int) -> str:
    """A window from layer `max_window_layers` on, where `use_sliding_window` asks for one (Qwen).

    Raises:
      ValueError: if layer_types ask for a window and use_sliding_window does not.
    """
    return window_if_used(config, index, lambda index: index >= config["max_window_layers"])


def window_if_used(config: Config, index: int, chosen: Callable[[int], bool]) -> str:
    """A window in the layers that are chosen, where `use_sliding_window` asks for one.

    Raises:
      ValueError: if layer_types ask for a window and use_sliding_window does not.
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
    """The `path` of a family of which some layers have a module `first`, the rest `second`."""
    return lambda config, index: f"layers.{{}}.{first if is_first(config, index) else second}"


def has_rotary(config: Config, index: int) -> bool:
    """Whether a layer has a rotary: `no_rope_layers[index]`, else all but every n-th.

    n is `no_rope_layer_interval`. A 1 stands for a layer that has one.
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
