"""A published config as the families read it: fields, defaults, and one sentence where it fails."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from flax import nnx

from .._internal.checks import check_choice, check_divides, check_positive, check_rate
from ..weights.rule import Rule

LIBRARY = __file__.rpartition("families")[0]
Names = Mapping[str, tuple[str, ...]]
# Kinds of layers as older files call them.
RENAMED = {"attention": "full_attention", "mamba": "linear_attention"}
USUAL = "layers.{}.self_attn"  # where most models have the attention of a layer
NONE: Names = MappingProxyType({})
NOTHING: Mapping[str, Any] = MappingProxyType({})


class SameAs(str):
    """A default that is the value of another field, whose name this is."""


class Config:
    """The fields of one config.

    A field that is missing takes the default of its class in transformers, which stands in the
    family's file. Families ask by one word for one thing, as Llama's files call it; `names` says
    what the files of a family call it: `hidden_size` is `n_embd` in GPT-2.

    Args:
      fields: the config, as `json.load` or `to_dict()` gives it.
      defaults: of the fields that the family reads, by the names of its class.
      names: all names of a field in files of this family where it has others, its class's first.
      fixed: fields that are as they are here, whatever the config says, by the families' words.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        defaults: Mapping[str, Any],
        names: Names = NONE,
        fixed: Mapping[str, Any] = NOTHING,
    ):
        self._entries, self.defaults, self._names, self._fixed = fields, defaults, names, fixed

    def __getitem__(self, name: str) -> Any:
        """A field, or its default."""
        if name in self._fixed:
            return self._fixed[name]
        name = self.name(name)
        value = self._entries.get(name, self.defaults.get(name))
        return self[value] if isinstance(value, SameAs) else value

    def replaced(self, **fields: Any) -> "Config":
        """The same with these fields."""
        return Config(self._entries, self.defaults, self._names, {**self._fixed, **fields})

    def entry(self, name: str) -> Any:
        """A field that the config itself has, else None."""
        return self._fixed[name] if name in self._fixed else self._entries.get(self.name(name))

    def is_explicit_null(self, name: str) -> bool:
        """Whether the config itself has a field, and None there."""
        return self.name(name) in self._entries and self.entry(name) is None

    def name(self, field: str) -> str:
        """What this config calls a field, or what its class does where the config lacks it.

        Raises:
          ValueError: if it has the field under two names that differ.
        """
        if field in self._fixed:
            return field
        known = self._names.get(field, (field,))
        names = [name for name in known if self._entries.get(name) is not None]
        for name in names[1:]:
            if self._entries[name] != self._entries[names[0]]:
                raise ValueError(
                    f"The config says {names[0]}={self._entries[names[0]]!r} and "
                    f"{name}={self._entries[name]!r}, which are one; leave one of them out."
                )
        present = [name for name in known if name in self._entries]
        return (*names, *present, known[0])[0]

    def count(self, name: str) -> int:
        """A whole number of at least 1."""
        check_positive(**{self.name(name): self[name]})
        return self[name]

    def number(self, name: str) -> float:
        """A number above zero."""
        return above_zero(self.name(name), self[name])

    def flag(self, name: str) -> bool:
        """Whether a field is True; None stands for False, as transformers has it."""
        check_choice(self.name(name), self[name], True, False, None)
        return bool(self[name])

    def rate(self, name: str) -> float:
        """A share from 0 to 1."""
        return check_rate(self.name(name), self[name])

    def heads(self) -> tuple[int, int, int]:
        """N, K and H; None for K stands for N."""
        n, h = self.query_heads()
        if self["num_key_value_heads"] is None:
            return n, n, h
        k = self.count("num_key_value_heads")
        check_divides(self.name("num_key_value_heads"), k, self.name("num_attention_heads"), n)
        return n, k, h

    def query_heads(self) -> tuple[int, int]:
        """N and H; H is the width over N where the config has no head_dim.

        Raises:
          ValueError: for a head_dim where the class does not read it.
        """
        n, h = self.count("num_attention_heads"), self["head_dim"]
        if h is not None and ("head_dim" in self._names or "head_dim" in self.defaults):
            return n, self.count("head_dim")
        width, names = self.count("hidden_size"), (self.name("num_attention_heads"), "hidden_size")
        each = check_divides(names[0], n, self.name(names[1]), width)
        if h not in (None, each):
            raise ValueError(
                f"head_dim={h!r} is not served: heads of this model_type have "
                f"{self.name('hidden_size')} / {names[0]} = {each} components."
            )
        return n, each

    def index(self, index: int) -> int:
        """`index`, if the model has such a layer."""
        layers = self.count("num_hidden_layers")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers:
            raise ValueError(
                f"index must be the place of a layer, from 0 to {layers - 1}, since "
                f"{self.name('num_hidden_layers')}={layers}; got {index!r}."
            )
        return index

    def layer_type(self, index: int, default: Callable[[int], str], other: str) -> str:
        """What kind of attention a layer is: `layer_types[index]`, else `default(index)`.

        Args:
          index: of the layer.
          default: what the class of the config derives where it has no layer_types.
          other: what a layer of this family may be beside "full_attention".
        """
        kinds = self["layer_types"]
        if kinds is None:
            return default(index)
        layers = self.count("num_hidden_layers")
        if len(kinds) != layers:
            raise ValueError(
                "layer_types must have one entry for each of num_hidden_layers; got "
                f"{len(kinds)} entries and num_hidden_layers={layers}."
            )
        kind: Any = kinds[index]
        kind = RENAMED.get(kind, kind)
        check_choice(f"layer_types[{index}]", kind, "full_attention", other)
        return kind


class Family(NamedTuple):
    """One model_type: defaults of the fields it reads, its layer, and the rules of its weights.

    Attributes:
      defaults: by field, as the class in transformers has them.
      attention: from a config, an index and the arguments of every layer to the layer.
      rules: from a config and an index to the rules of the layer's weights.
      names: what its files call a field, see `Config`.
      gguf: the rules for a GGUF file of llama.cpp; None where none are known.
      path: where the whole model has the attention of a layer, {} for its number, or several where
        it has some alike; None for that which `_paths.py` has for the model_type.
      lacks: what a layer has in place of attention, "" for a layer that has one.
      derived: from a config to the one that its class makes of it, where fields say others.
    """

    defaults: Mapping[str, Any]
    attention: Callable[[Config, int, Mapping[str, Any]], nnx.Module]
    rules: Callable[[Config, int], tuple[Rule, ...]] = lambda config, index: ()
    names: Names = NONE
    gguf: Callable[[Config, int], tuple[Rule, ...]] | None = None
    path: Callable[[Config, int], str | tuple[str, ...] | None] = lambda config, index: None
    missing_reason: Callable[[Config, int], str] = lambda config, index: ""
    derived: Callable[[Config], Config] = lambda config: config


@functools.cache  # which makes it once
def warn_once(sentence: str) -> None:
    """A warning for the line that calls `families`, once for each sentence."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(LIBRARY):
        level, frame = level + 1, frame.f_back
    warnings.warn(sentence, stacklevel=level)


def above_zero(name: str, x: Any) -> float:
    """`x`, if it is a number above zero; ValueError, naming the field, if not."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < float("inf"):
        raise ValueError(f"{name} must be a number above zero; got {x!r}.")
    return x
