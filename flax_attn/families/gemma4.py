"""Gemma 4: full attention layers with wide heads, a quarter of them rotated; shared keys.

Logits are unscaled and values are normalized. With `attention_k_eq_v` the keys of layers that have
full attention are their values too. The last `num_kv_shared_layers` make no keys and values. They
are `CrossLayerAttention`s, called as `layer(x, keys_and_values=shared)`, where
`earlier.with_keys_and_values(x)` of the last layer of the same type that makes them returns
`shared`. Own file: what a layer makes depends on the layers before it.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..layers import CrossLayerAttention, SharedKeyValueAttention
from ..masks import Mask
from ..norms import RMSNorm
from ..rules import Rules
from ._config import Config, Family
from ._kinds import KINDS, Kind, all_but_every, by_layer_types, check_causal, mask_of
from ._rope import rotary_by_kind, rotary_of_kind

WIDE = ("head_dim", "num_key_value_heads")


def gemma4(
    config: Config, index: int, init: Mapping[str, Any]
) -> CrossLayerAttention | SharedKeyValueAttention:
    """`self_attn` of Gemma4ForCausalLM."""
    kind = gemma4_kind(config, index)
    wide = config.replaced(**_wide(config, index, kind))
    shared = config.flag("attention_k_eq_v") and kind == "full_attention"
    parts = {"rotary": rotary_by_kind(wide, kind), "mask": _mask(config, kind)}
    reads = kv_source(config, index, gemma4_kind) is not None
    return sharing(wide, init, reads, own_values=not shared, **parts)


def sharing(
    config: Config, init: Mapping[str, Any], is_later: bool, *, own_values: bool, **parts: Any
) -> CrossLayerAttention | SharedKeyValueAttention:
    """A layer with unscaled logits that makes keys and values, or reads those of an earlier one.

    Args:
      config: with the sizes of the layer.
      is_later: whether it reads them.
      own_values: whether its values have a projection of their own.
      parts: further arguments of the layer.
    """
    check_causal(config)
    h, eps, dtype = config.heads()[2], config.number("rms_norm_eps"), init["param_dtype"]
    bias = config.flag("attention_bias")
    layer: Any = CrossLayerAttention if is_later else SharedKeyValueAttention
    making: dict[str, Any] = {}
    if not is_later:
        making = {"own_values": own_values, "v_norm": RMSNorm(None, eps=eps)}
        making["k_norm"] = RMSNorm(h, eps=eps, param_dtype=dtype)
    return layer(
        *(config.count("hidden_size"), *config.heads()),
        q_norm=RMSNorm(h, eps=eps, param_dtype=dtype),
        rules=Rules(scale=1.0),
        qkv_bias=bias,
        out_bias=bias,
        dropout=config.rate("attention_dropout"),
        **parts,
        **making,
        **init,
    )


def gemma4_kind(config: Config, index: int) -> str:
    """The type of a layer; the last one always has full attention."""
    kind = config.layer_type(index, lambda i: KINDS[(i + 1) % 6 != 0], "sliding_attention")
    return KINDS[0] if index == config["num_hidden_layers"] - 1 else kind


def kv_source(config: Config, index: int, kind_of: Kind) -> int | None:
    """The layer whose keys and values a later one reads: the last of its type that makes them.

    None for a layer that makes its own.

    Raises:
      ValueError: unless each type of layers has one that makes them.
    """
    layers, shared = config.count("num_hidden_layers"), config["num_kv_shared_layers"]
    if shared == layers:
        raise ValueError(
            f"num_kv_shared_layers={shared} of {layers} layers is not served: all of them read "
            "keys and values of another model, as those of an assistant do."
        )
    if isinstance(shared, bool) or not isinstance(shared, int) or not 0 <= shared < layers:
        raise ValueError(
            "num_kv_shared_layers must leave a layer that makes keys and values, from 0 to "
            f"{layers - 1}, since num_hidden_layers={layers}; got {shared!r}."
        )
    kinds = [kind_of(config, i) for i in range(layers)]
    if {*kinds[: layers - shared]} != {*kinds}:
        raise ValueError(
            f"num_kv_shared_layers={shared} leaves no layer of one of layer_types that makes keys "
            f"and values; the types are {', '.join(kinds)}."
        )
    made = [i for i in range(layers - shared) if kinds[i] == kinds[index]]
    return None if index < layers - shared else made[-1]


def _wide(config: Config, index: int, kind: str) -> Mapping[str, Any]:
    """The width and the number of key heads where a layer has its own.

    Published files have two fields for all full attention layers, `to_dict()` has a
    per_layer_config instead.
    """
    per_layer = config.entry("per_layer_config")
    if per_layer is not None:
        return _per_layer(
            config, kind, {int(key): value for key, value in per_layer.items()}, index
        )
    if kind != "full_attention":
        return {}
    k = config["num_global_key_value_heads"] if config.flag("attention_k_eq_v") else None
    wide = {"head_dim": config.count("global_head_dim")}
    return wide if k is None else {**wide, "num_key_value_heads": k}


def _per_layer(
    config: Config, kind: str, per_layer: Mapping[int, Mapping[str, Any]], index: int
) -> Mapping[str, Any]:
    """What per_layer_config says of a layer, and of all others of its type."""
    same_type = [i for i in range(config["num_hidden_layers"]) if gemma4_kind(config, i) == kind]
    fields = per_layer.get(index, {})
    for i in same_type:
        other = per_layer.get(i, {})
        if {*other} - {*WIDE}:
            raise ValueError(
                f"per_layer_config[{i}] has {', '.join(sorted({*other} - {*WIDE}))}; of the "
                f"attention it may have {', '.join(WIDE)}."
            )
        if any(other.get(name) != fields.get(name) for name in WIDE):
            raise ValueError(
                f"per_layer_config must have the same {' and '.join(WIDE)} for all layers of "
                f"type {kind!r}; got {dict(fields)} for layer {index}, {dict(other)} for layer {i}."
            )
    return fields


def _mask(config: Config, kind: str) -> Mask:
    """Causal; "vision" is of tokens of images, which the model around the text marks."""
    direction = config["use_bidirectional_attention"]
    if direction not in (None, "vision"):
        raise ValueError(
            f'use_bidirectional_attention must be "vision" or None; got {direction!r}. How far '
            '"all" looks depends in transformers on the implementation that is chosen there.'
        )
    return mask_of(config, kind)


def gemma3n(
    config: Config, index: int, init: Mapping[str, Any]
) -> CrossLayerAttention | SharedKeyValueAttention:
    """`self_attn` of Gemma3nForCausalLM."""
    kind = gemma3n_kind(config, index)
    rope = rotary_of_kind(config, kind, "rope_local_base_freq")
    parts = {"rotary": rope, "mask": mask_of(config, kind)}
    reads = kv_source(config, index, gemma3n_kind) is not None
    return sharing(config, init, reads, own_values=True, **parts)


gemma3n_kind = by_layer_types(all_but_every(5))
ROWS: Mapping[str, Family] = {
    "gemma3n_text": Family(gemma3n, kv_source=partial(kv_source, kind_of=gemma3n_kind)),
    "gemma4_text": Family(
        gemma4,
        kv_source=partial(kv_source, kind_of=gemma4_kind),
        defaults={
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "per_layer_config": None,
        },
    ),
}
