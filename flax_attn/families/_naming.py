"""Maps a config to the rules of its weights, for one layer or all."""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from .._internal.checks import check_choice
from ..weights.rule import Rule
from ._choose import family_entry, family_of, paths_of, places_of, resolved
from ._config import USUAL, Config, Family
from ._quantized import check_unquantized
from ._saved import SAVED, place_in_file
from ._table import FAMILIES
from ._whole import Named, leaves_some, of_all


def rules(
    config: Mapping[str, Any] | str | os.PathLike[str],
    index: int | None = None,
    *,
    part: str | None = None,
    source: str = "transformers",
    prefix: str = "",
    to: str | None = None,
) -> tuple[Rule, ...]:
    """Returns the rules for weights of one layer, or of all, whose mapping is not automatic.

    With an index, names are those inside the attention module, without a prefix. The same tuple
    works for `parity.compare`, `parity.port`, `parity.plan` and `weights.load`.

    Without an index, names are those of a whole model, `layers.0.self_attn.qkv_proj.weight`, so
    that one call of `weights.load` fills your own model if its modules are named as in
    transformers.

    Args:
      config: as in `attention`.
      index: as in `attention`; None for all layers.
      part: as in `attention`; with index=None it may be None, for all parts.
      source: naming scheme: "transformers", or "gguf" for a file of llama.cpp, where a layer's
        names begin with `blk.3`, including its MLP's, so that the rules skip all but attention.
        Rules of a whole model skip nothing, since the other weights belong to the model.
      prefix: prefix of all names on both sides, with index=None: "model" if the file and your model
        have the layers in a module of that name, next to an `lm_head`. A GGUF file has none.
      to: path of a layer's attention in your model, with index=None: "blocks.{}.attn", {} for the
        number; None for the path in the file, or "layers.{}.self_attn" for GGUF.

    Returns:
      Rules from torch to Flax, `()` if none are needed.

    Raises:
      ValueError: as in `attention`; for an unknown source, a model_type whose names in GGUF files
        are not known here, prefix or to with an index, and a `to` without {} or for several parts
        at once.
      TypeError: as in `attention`.

    >>> sizes = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1}
    >>> print(*rules({"model_type": "phi3", **sizes}, 0))
    Rule("qkv_proj.weight -> {q_proj,k_proj,v_proj}.kernel", "(n o) i -> n i o", o=(12, 4, 4))
    >>> rules({"model_type": "llama", **sizes})
    ()
    >>> print(*rules({"model_type": "llama", **sizes}, prefix="model", to="blocks.{}.attn"))
    Rule("model.layers.*.self_attn -> model.blocks.*.attn")
    >>> print(rules({"model_type": "llama", **sizes}, 0, source="gguf")[0])
    Rule("attn_q.weight -> q_proj.kernel", "(n h r) i -> i (n r h)", n=3, r=2)
    """
    check_choice("source", source, "transformers", "gguf")
    config, part = resolved(config, part)
    if index is None:
        return of_all(named_layers(config, part, source, (f"{prefix}." if prefix else "", to)))
    if prefix or to is not None:
        raise ValueError(
            "prefix and to are of a whole model's rules, and those of one layer name what is in "
            f"its attention: leave out the index; got {index!r} and prefix={prefix!r}, to={to!r}."
        )
    family, read = family_of(config, part)
    _check_unquantized(config, family, read, read.index(index))
    return _of_layer(family, read, index, source)


def _check_unquantized(config: Mapping[str, Any], family: Family, read: Config, index: int) -> None:
    """Raises ValueError for a layer whose weights are quantised."""
    if config.get("quantization_config") is not None:
        layer, each = _shapes(family, read, index), family.rules(read, index)
        check_unquantized(config, layer, each, places_of(family, read, index))


def _of_layer(family: Family, config: Config, index: int, source: str) -> tuple[Rule, ...]:
    if source == "transformers":
        return _all_optional(*(each for _, each in _spellings(family, config, index)))
    if family.gguf is None:
        known = ", ".join(name for name, other in FAMILIES.items() if getattr(other, "gguf", None))
        name = config.entry("model_type")
        raise ValueError(f'source="gguf" is known for {known}; got a config of {name}.')
    return family.gguf(config, index)


def _spellings(
    family: Family, config: Config, index: int
) -> list[tuple[Callable[[str], str], tuple[Rule, ...]]]:
    """Naming schemes of a layer in torch: a function of its path in memory, and its rules."""
    in_memory = (str, family.rules(config, index))
    saved = SAVED.get(str(config.entry("model_type")))
    if saved is None:
        return [in_memory]
    return [(partial(place_in_file, saved), saved.rules(config, index)), in_memory]


def _all_optional(*spellings: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Returns the rules of one spelling; those of several are optional, as a model has one."""
    if len(spellings) == 1:
        return spellings[0]
    return tuple(rule.made_optional() for rules in spellings for rule in rules)


def named_layers(
    config: Mapping[str, Any], part: str | None, source: str, where: tuple[str, str | None]
) -> Iterator[tuple[int, Named]]:
    """Yields each layer with attention in each part: its number, its paths, and its rules.

    `source` is as in `rules`, or "modules" for the names of modules in memory alone.
    `where` is the prefix with its dot, and `to`.
    """
    entry, to = family_entry(config), where[1]
    every = (part,) if part is not None or isinstance(entry, Family) else tuple(entry)
    if to is not None and ("{}" not in to or len(every) > 1):
        raise ValueError(
            "to is where your model has the attention of one part, {} for the number of a layer, "
            f'as in "blocks.{{}}.attn"; got {to!r} for {" and ".join(map(str, every))}.'
        )
    for each in every:
        family, read = family_of(config, each)
        others: dict[Named, bool] = {}  # whether a layer has weights that its rules do not name
        for index in range(read.count("num_hidden_layers")):
            if family.missing_reason(read, index):
                continue
            _check_unquantized(config, family, read, index)
            for named in _named(family, read, index, source, where):
                if source == "transformers" and named.source != named.target:
                    if named not in others:
                        shapes = _shapes(family, read, index)
                        others[named] = named.optional or leaves_some(shapes, named.rules)
                    named = named._replace(rest=others[named])
                yield index, named


def _named(
    family: Family, config: Config, index: int, source: str, where: tuple[str, str | None]
) -> list[Named]:
    """Returns the attentions of a layer: one, or several equal ones."""
    prefix, to = where
    if source == "gguf":
        return [
            Named(
                "blk.{}", prefix + (to or USUAL), _moved(_of_layer(family, config, index, source))
            )
        ]
    places = paths_of(family, config, index)
    if to is not None and len(places) > 1:
        raise ValueError(
            f"to={to!r} is one place, and a layer of this model_type has attentions at "
            f"{' and '.join(places)}; leave it out."
        )
    spellings = _spellings(family, config, index)[-1 if source == "modules" else 0 :]
    every = list[Named]()
    for here in places:
        by_place: dict[str, tuple[Rule, ...]] = {}  # both spellings often share a path
        for place, each in spellings:
            by_place[place(here)] = (*by_place.get(place(here), ()), *_moved(each))
        target, several = prefix + (to or here), len(spellings) > 1
        every += [Named(prefix + x, target, each, False, several) for x, each in by_place.items()]
    return every


def _moved(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Keeps the rules that move weights."""
    return tuple(rule for rule in rules if rule.kind == "move")


def _shapes(family: Family, config: Config, index: int) -> nnx.Module:
    """Returns a layer with abstract weights, which have only shapes and dtypes."""

    def built() -> nnx.Module:
        init = {"rngs": nnx.Rngs(0), "dtype": None, "param_dtype": jnp.float32}
        return family.attention(config, index, init)

    return nnx.eval_shape(built)
