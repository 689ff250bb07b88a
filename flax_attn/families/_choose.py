"""From the `model_type` of a config to its family."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from ._aliases import ALIASES, DEFAULTS, FIXED
from ._config import USUAL, Config, Family, check_whole
from ._parts import Parts
from ._paths import PATHS
from ._published import KNOWN
from ._quantized import check_unquantized
from ._slips import meant
from ._table import FAMILIES
from ._unread import read_by_any, warn_of_unread

_READ_BY_ANY = read_by_any(FAMILIES)
_MOST = 10  # names in an error
# Of model types that people ask for, why there is none.
WHY_NOT = {
    "deepseek_v4": "its keys are compressed over the tokens, for which there is no layer here",
    "rwkv": "its tokens are mixed by a recurrence of its own, and no layer here has it",
}


def attention(
    config: Mapping[str, Any],
    index: int,
    *,
    part: str | None = None,
    rngs: nnx.Rngs,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
) -> nnx.Module:
    """The attention layer that a published config says layer `index` has.

    Both spellings are read: `rope_parameters`, as transformers 5 writes them, and `rope_theta` with
    `rope_scaling`, as older files have them. A missing field has the default of its class in
    transformers. `ALIASES` lists model types that have the attention of another one.

    `layer(x)` applies the mask that the config gives this layer: causal, with a window or chunks,
    or none in an encoder. A row that sees nothing, which only padding makes, gives zeros;
    `layer(x, empty="mean")` of decoders gives the mean of the values, as transformers does. The
    dropout of the weights, `attention_dropout` or `attn_pdrop`, is the layer's; that of the output
    and the sum with the residual stand outside.

    A field that this model_type does not read warns once, by name, if other model types read it
    of their attention, or if it is by a slip of typing one that this one reads.

    Shapes: the layer takes x `*B T hidden_size` and returns the same; part="cross" also takes a
    memory `*B S hidden_size`.

    Args:
      config: the contents of a config.json, or `to_dict()` of a config in transformers.
      index: which layer of the model, from 0.
      part: one of `parts(config)`: "encoder", "decoder" or "cross", or where both stand in every
        layer "attention" or "recurrent"; None for a model without parts.
      rngs: source of the random start and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for an unknown model_type, an index beyond the model or of a layer without
        attention, a part, heads that do not
        divide, rotary parameters of an unknown kind or in two spellings that differ, a field whose
        value is not served or that has two values under two names, a config with a text_config, or
        one whose quantization_config does not leave the attention alone.
      TypeError: if the config is no dict.

    Source: the modelling code of transformers 5.23.

    >>> config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 6,
    ...           "num_key_value_heads": 3, "head_dim": 4, "rope_theta": 5e5}
    >>> layer = attention(config, 0, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """
    family, read = family_of(config, part)
    house = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
    if what := family.lacks(read, read.index(index)):
        raise ValueError(
            f"Layer {index} of this {config['model_type']} has {what} in place of self attention."
        )
    layer = family.attention(read, index, house)
    check_unquantized(config, layer, family.rules(read, index), places_of(family, read, index))
    warn_of_unread(config, config["model_type"], family, _READ_BY_ANY, layer)
    return layer


def family_of(config: Mapping[str, Any], part: str | None) -> tuple[Family, Config]:
    """The family of a config's model_type, or of one of its parts, and the config as it reads it.

    Raises:
      ValueError: for a model_type that is not served, a part, a config of several models.
      TypeError: if the config is no dict.
    """
    entry, name = entry_of(config), config["model_type"]
    family = _of_part(name, entry, part)
    fields = {**config, **FIXED.get(name, {})}
    known = {**family.defaults, **DEFAULTS.get(name, {})}
    return family, family.derived(Config(fields, known, family.names))


def places_of(family: Family, config: Config, index: int) -> tuple[str, ...]:
    """Where the whole model has the attention of a layer: one place, or several alike."""
    places = family.path(config, index) or PATHS.get(str(config.entry("model_type")), USUAL)
    places = (places,) if isinstance(places, str) else places
    return tuple(place.replace("{}", str(index)) for place in places)


def parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What `part` may be for a config; `()` for a model that has one attention in each layer.

    Args:
      config: as of `attention`, of which only the model_type is read.

    Raises:
      ValueError: for an unknown model_type, or a config with a text_config.
      TypeError: if the config is no dict.

    >>> parts({"model_type": "bart"}), parts({"model_type": "llama"})
    (('encoder', 'decoder', 'cross'), ())
    """
    entry = entry_of(config)
    return () if isinstance(entry, Family) else tuple(entry)


def entry_of(config: Mapping[str, Any]) -> Family | Parts:
    """The family of a config's model_type, or those of its parts; errors as of `family_of`."""
    if not isinstance(config, Mapping):
        raise TypeError(
            "config must be a dict, the contents of a config.json or to_dict() of a config; got "
            f"{type(config).__name__}."
        )
    check_whole(config)
    name = config.get("model_type")
    families = {**{family: family for family in FAMILIES}, **ALIASES}
    if not isinstance(name, str) or name not in families:
        raise ValueError(_not_served(name, list(families)))
    return FAMILIES[families[name]]


def _not_served(name: Any, names: list[str]) -> str:
    """Why there is no attention of a model_type."""
    if name in KNOWN:
        why = f": {WHY_NOT[name]}." if name in WHY_NOT else "."
        return f"model_type {name!r} is known to transformers, and its attention is not served{why}"
    slip = meant(name, names) if isinstance(name, str) else None
    return (
        f"model_type must be one of {', '.join(names[:_MOST])} or {len(names) - _MOST} others, "
        f"which `flax-attn parity --families` lists; got {name!r}."
        + (f" Did you mean {slip!r}?" if slip else "")
    )


def _of_part(name: str, entry: Family | Parts, part: str | None) -> Family:
    if isinstance(entry, Family):
        if part is not None:
            raise ValueError(f"part must be None for {name}, which has one alone; got {part!r}.")
        return entry
    if part is None or part not in entry:
        raise ValueError(f"part must be one of {', '.join(entry)} for {name}; got {part!r}.")
    return entry[part]
