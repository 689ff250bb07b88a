"""Maps the `model_type` of a config to its row."""

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ._config import ByPart, Config, Family
from ._published import ALIASES, KNOWN, VERSION, facts_of
from ._quantized import check_unquantized
from ._reading import contents, has_text, typed, whole
from ._table import FAMILIES, TYPES
from ._typos import nearest_name
from ._unread import read_by_any, warn_of_unread

SERVED = {*TYPES}
_READ_BY_ANY = read_by_any(FAMILIES)
_MOST = 10  # names listed in an error
SAME = (
    " If its attention is that of a type that is served, name that one, "
    '{**config, "model_type": "llama"}, and keep its architectures: fields that the named type '
    "lacks then warn."
)
NEWER = f" It may be newer than transformers {VERSION}, or its author's own.{SAME}"
# Why some model types that users request are not supported.
WHY_NOT = {
    "beit": "its bias by the distance of patches has rows of its own for the class token",
    "detr": "positions are added to its queries and keys in every layer, and not to its values",
    "sam2_vision_model": "its queries are pooled within windows, for which there is no layer here",
    "wavlm": "its bias by distance is gated by the hidden states, and no layer here has that",
    "zamba2": "its attention is shared by layers that each adapt it, and reads embeddings too",
    "deepseek_v4": "its keys are compressed over the tokens, for which there is no layer here",
    "dory": "its queries and keys have unit length and learned factors behind the rotation",
    "hy_v4_vl_text": "its latent attention has sinks and a gate beside its indexer",
    "hy_v4_vl_vision": "it is that of siglip_vision_model, by other names of its fields",
    "inkling2_loop_text": "its keys and values pass convolutions, and a bias reads the tokens",
    "lara_mini": "its layers are of three kinds, and rows here have two",
    "apertus1p5_vision_tokenizer": "its projections are convolutions over an image",
    "wavtokenizer": "its projections are convolutions, in the decoder of a codec",
    "rwkv": "its tokens are mixed by a recurrence of its own, and no layer here has it",
}


def attention(
    config: Mapping[str, Any] | str | os.PathLike[str],
    index: int,
    *,
    part: str | None = None,
    rngs: nnx.Rngs,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> nnx.Module:
    """Returns the attention layer of layer `index` of a published config.

    Both spellings are read: `rope_parameters`, as written by transformers 5, and `rope_theta` with
    `rope_scaling`, as in older files. A missing field takes the default of its class in
    transformers. `ALIASES` lists model types that have the attention of another one.

    `layer(x)` applies the mask that the config specifies for this layer: causal, with a window or
    chunks, or none in an encoder. Fully masked rows, which only padding causes, give zeros;
    `layer(x, empty="mean")` of decoders gives the mean of the values, as transformers does. Dropout
    of the attention weights, `attention_dropout` or `attn_pdrop`, is part of the layer; dropout of
    the output and the residual sum are not.

    A field that this model_type does not read warns once, by name, if other model types read it
    for their attention, or if it looks like a typo of a field that this one reads and the config
    lacks.

    Shapes: the layer takes x `*B T hidden_size` and returns the same; part="cross" also takes a
    memory `*B S hidden_size`, and attends to x itself without one. Image encoders that reduce or
    use windows (Swin, SegFormer, PVT, SAM) take a whole image, `*B Y X channels`.

    Args:
      config: the contents of a config.json, `to_dict()` of a config in transformers, or the path of
        such a file or of its folder. If its model_type is missing or unknown, its `architectures`
        determine it.
      index: index of the layer in the model, from 0.
      part: one of `parts(config)`: "encoder", "decoder" or "cross"; "attention" or "recurrent" if
        every layer has both; "text", "vision" or "audio" of a multimodal model. None for a model
        without parts.
      rngs: source of the initial weights and of the dropout.
      dtype: of the computation; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for an unknown model_type or part, an index beyond the model or of a layer without
        attention, heads that do not divide, rotary parameters of an unknown type or in two
        spellings that differ, a field whose value is not supported or that has two values under two
        names, a multimodal model without a part, or a quantization_config that includes the
        attention, except of float8 e4m3 that `weights.load` reads; for a file that cannot be read.
      TypeError: if the config is neither a dict nor a path.

    Source: the modelling code of transformers 5.24.

    >>> config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 6,
    ...           "num_key_value_heads": 3, "head_dim": 4, "rope_theta": 5e5}
    >>> layer = attention(config, 0, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """
    init = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
    return layer_of(*resolved(config, part), index, init)


def layer_of(
    config: Mapping[str, Any], part: str | None, index: int, init: Mapping[str, Any]
) -> nnx.Module:
    """Returns the attention of a layer, from what `resolved` returned and its keywords."""
    family, read = family_of(config, part)
    if what := family.missing_reason(read, read.index(index)):
        raise ValueError(
            f"Layer {index} of this {config['model_type']} has {what} in place of self attention."
        )
    layer = family.attention(read, index, init)
    if config.get("quantization_config") is not None:
        check_unquantized(config, layer, family.rules(read, index), places_of(family, read, index))
    warn_of_unread(config, config["model_type"], family, _READ_BY_ANY, layer)
    return layer


def kv_shared_layer_index(
    config: Mapping[str, Any] | str | os.PathLike[str], index: int, *, part: str | None = None
) -> int | None:
    """The earlier layer whose keys and values layer `index` reads; None if it makes its own.

    Such a layer is a `CrossLayerAttention`, as in Gemma 3n and Gemma 4. It has no cache:
    `y, cache, shared = earlier.with_keys_and_values(x, cache=cache)`, and then
    `layer(x, keys_and_values=shared)`.

    Args:
      config, index, part: as in `attention`.

    Raises:
      ValueError, TypeError: as in `attention`.

    >>> config = {"model_type": "gemma3n_text"}  # 35 layers, of which 15 read those of others
    >>> [kv_shared_layer_index(config, index) for index in (0, 19, 20, 24)]
    [None, None, 18, 19]
    """
    config, part = resolved(config, part)
    family, read = family_of(config, part)
    return family.kv_source(read, read.index(index))


def family_of(config: Mapping[str, Any], part: str | None) -> tuple[Family, Config]:
    """Returns the row of a config or of its part, and the config as that row reads it.

    Raises:
      ValueError: for an unsupported model_type or part.
    """
    entry, name = family_entry(config), config["model_type"]
    family = _of_part(name, entry, part)
    facts = facts_of(name)
    defaults = {**facts.whole, **facts.defaults, **family.defaults}
    names = {**facts.names, **family.names}
    return family, family.derived(Config({**config, **facts.fixed}, defaults, names))


def places_of(family: Family, config: Config, index: int) -> tuple[str, ...]:
    """Module paths of a layer's attention in the whole model: one, or several equal ones."""
    return tuple(path.replace("{}", str(index)) for path in paths_of(family, config, index))


def paths_of(family: Family, config: Config, index: int) -> tuple[str, ...]:
    """The same with {} for the layer's number, if the path has it."""
    paths = family.path(config, index) or facts_of(config.entry("model_type")).path
    return (paths,) if isinstance(paths, str) else paths


def resolved(config: Any, part: str | None) -> tuple[Mapping[str, Any], str | None]:
    """Returns the config of a single model, chosen by `part`, and the part within that model.

    Raises:
      ValueError: for a multimodal model, if `part` is missing or unknown.
      TypeError: as in `attention`.
    """
    fields = contents(config)
    configs = whole(fields, SERVED)
    wanted, _, rest = (part or "").partition(".")
    is_plain = fields.get("model_type") in SERVED and not has_text(fields)
    if not configs or (is_plain and wanted not in configs):
        return typed(fields, SERVED), part
    if wanted not in configs:
        raise ValueError(_several(fields.get("model_type"), configs, part))
    return typed(configs[wanted], SERVED), rest or None


def _several(name: Any, configs: Mapping[str, Mapping[str, Any]], part: str | None) -> str:
    """Error message for a multimodal model if `part` is missing or unknown."""
    types = [f"{x} ({each['model_type'] or 'no model_type'})" for x, each in configs.items()]
    among = [repr(x) for x, each in configs.items() if each["model_type"] in SERVED]
    of = f"model_type {name!r} is of a model of several parts: {', '.join(types)}; "
    if not among:
        return f"{of}the attention of none of them is served."
    return f"{of}say part={' or '.join(among)}; got part={part!r}."


def parts(config: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, int]:
    """Returns the values of `part` with their number of layers; empty for a model without parts.

    For a multimodal model, the parts with supported attention: "text", "vision", "audio", or
    "text.decoder" if the text model has parts too.

    Args:
      config: as in `attention`.

    Raises:
      ValueError: for an unknown model_type.
      TypeError: as in `attention`.

    >>> parts({"model_type": "bart"}), parts({"model_type": "llama"})
    ({'encoder': 12, 'decoder': 12, 'cross': 12}, {})
    """
    fields = contents(config)
    configs = whole(fields, SERVED)
    if not configs:
        fields = typed(fields, SERVED)
        entry = family_entry(fields)
        names = () if isinstance(entry, Family) else tuple(entry)
        return {name: _depth(fields, name) for name in names}
    counts: dict[str, int] = {}
    for name, each in configs.items():
        if each["model_type"] in SERVED:
            inner = parts(each)
            counts |= {f"{name}.{x}": n for x, n in inner.items()}
            counts |= {} if inner else {name: _depth(each, None)}
    return counts


def _depth(config: Mapping[str, Any], part: str | None) -> int:
    return family_of(config, part)[1].count("num_hidden_layers")


def family_entry(config: Mapping[str, Any]) -> Family | ByPart:
    """Returns the row of a config's model_type, or of each part; raises as `family_of`."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in SERVED:
        raise ValueError(_not_served(name, TYPES))
    return FAMILIES[ALIASES.get(name, name)]


def _not_served(name: Any, names: tuple[str, ...]) -> str:
    """Error message for an unsupported model_type."""
    if name in KNOWN:
        why = f": {WHY_NOT[name]}." if name in WHY_NOT else f".{SAME}"
        return f"model_type {name!r} is known to transformers, and its attention is not served{why}"
    slip = nearest_name(name, names) if isinstance(name, str) else None
    if name is None:
        return (
            "The config has no model_type, and no `architectures` that say which it is, such as "
            '["LlamaForCausalLM"]: add one of `families.TYPES`, as "model_type": "llama". For a '
            'part of a model, such as its "vision_config", pass the whole file and part="vision".'
        )
    return (
        f"model_type must be one of {', '.join(names[:_MOST])} or {len(names) - _MOST} others, "
        f"which `families.TYPES` lists; got {name!r}."
        + (f" Did you mean {slip!r}?" if slip else NEWER)
    )


def _of_part(name: str, entry: Family | ByPart, part: str | None) -> Family:
    if isinstance(entry, Family):
        if part is not None:
            raise ValueError(f"part must be None for {name}, which has one alone; got {part!r}.")
        return entry
    if part is None or part not in entry:
        raise ValueError(f"part must be one of {', '.join(entry)} for {name}; got {part!r}.")
    return entry[part]
