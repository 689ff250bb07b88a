"""From the `model_type` of a config to its family."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from .._checks import check_choice
from ..weights.rule import Rule
from ._aliases import ALIASES, DEFAULTS, FIXED
from ._config import Config, Family, check_whole
from ._parts import Parts
from ._published import KNOWN
from ._slips import meant
from ._table import FAMILIES
from ._unread import read_by_any, warn_of_unread

_READ_BY_ANY = read_by_any(FAMILIES)
_MOST = 10  # names in an error


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
      ValueError: for an unknown model_type, an index beyond the model, a part, heads that do not
        divide, rotary parameters of an unknown kind or in two spellings that differ, a field whose
        value is not served or that has two values under two names, a config with a text_config or a
        quantization_config.
      TypeError: if the config is no dict.

    Source: the modelling code of transformers 5.23.

    >>> config = {"model_type": "llama", "hidden_size": 12, "num_attention_heads": 6,
    ...           "num_key_value_heads": 3, "head_dim": 4, "rope_theta": 5e5}
    >>> layer = attention(config, 0, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 5, 12))).shape
    (2, 5, 12)
    """
    family, read = _family(config, part)
    house = {"rngs": rngs, "dtype": dtype, "param_dtype": param_dtype}
    layer = family.attention(read, read.index(index), house)
    warn_of_unread(config, config["model_type"], family, _READ_BY_ANY)
    return layer


def rules(
    config: Mapping[str, Any],
    index: int,
    *,
    part: str | None = None,
    source: str = "transformers",
) -> tuple[Rule, ...]:
    """How the weights of that layer are named and laid out where names and types do not say it.

    Names are those inside the attention module, without a prefix. The same tuple serves
    `parity.compare`, `parity.port`, `parity.plan` and `weights.load`.

    Args:
      config: as of `attention`.
      index: as of `attention`.
      part: as of `attention`.
      source: whose names: "transformers", or "gguf" for a file of llama.cpp, where a layer's names
        begin with `blk.3`, its MLP's too, so that the rules skip what is not the attention's.

    Returns:
      Rules from torch to Flax, `()` where nothing has to be said.

    Raises:
      ValueError: as of `attention`, for another source, and for a model_type of which the names in
        GGUF files are not known here.
      TypeError: if the config is no dict.

    >>> sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1}
    >>> print(*rules({"model_type": "phi3", **sizes}, 0))
    Rule("qkv_proj.weight -> {q_proj,k_proj,v_proj}.kernel", "(n o) i -> n i o", o=(12, 4, 4))
    >>> rules({"model_type": "llama", **sizes}, 0)
    ()
    >>> print(rules({"model_type": "llama", **sizes}, 0, source="gguf")[0])
    Rule("attn_q.weight -> q_proj.kernel", "(n h r) i -> i (n r h)", n=3, r=2)
    """
    check_choice("source", source, "transformers", "gguf")
    family, read = _family(config, part)
    if source == "transformers":
        return family.rules(read, read.index(index))
    if family.gguf is None:
        known = ", ".join(name for name, other in FAMILIES.items() if getattr(other, "gguf", None))
        raise ValueError(
            f'source="gguf" is known for {known}; got a config of {config["model_type"]}.'
        )
    return family.gguf(read, read.index(index))


def parts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What `part` may be for a config; `()` for a model that has one attention in each layer.

    Args:
      config: as of `attention`, of which only the model_type is read.

    Raises:
      ValueError: for an unknown model_type, a config with a text_config or a quantization_config.
      TypeError: if the config is no dict.

    >>> parts({"model_type": "bart"}), parts({"model_type": "llama"})
    (('encoder', 'decoder', 'cross'), ())
    """
    entry = _entry(config)
    return () if isinstance(entry, Family) else tuple(entry)


def _entry(config: Mapping[str, Any]) -> Family | Parts:
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


def _family(config: Mapping[str, Any], part: str | None) -> tuple[Family, Config]:
    entry, name = _entry(config), config["model_type"]
    family = _of_part(name, entry, part)
    fields = {**config, **FIXED.get(name, {})}
    known = {**family.defaults, **DEFAULTS.get(name, {})}
    return family, family.derived(Config(fields, known, family.names))


def _not_served(name: Any, names: list[str]) -> str:
    """Why there is no attention of a model_type."""
    if name in KNOWN:
        return f"model_type {name!r} is known to transformers, and its attention is not served."
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
