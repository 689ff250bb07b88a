"""A published config as families read it: fields, defaults and checks."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from flax import nnx

from .._internal.checks import check_choice, check_divides, check_positive, check_rate
from ..weights.rule import Rule

Names = Mapping[str, tuple[str, ...]]
# Layer types that older files name differently.
RENAMED = {"attention": "full_attention", "mamba": "linear_attention"}
USUAL = "layers.{}.self_attn"  # the most common path of a layer's attention
NONE: Names = MappingProxyType({})
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Config:
    """The fields of one config.

    A missing field takes the default of its class in transformers, from `published.json`.
    Families use the field names of Llama; `names` maps them to the names in a family's files:
    `hidden_size` is `n_embd` in GPT-2.

    Args:
      fields: the config, as returned by `json.load` or `to_dict()`.
      defaults: of the fields that the family reads, by the names of its class.
      names: all names of a field in this family's files if they differ, its class's first.
      fixed: values that override the config, by Llama's names.
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
        """Returns a field, or its default."""
        if name in self._fixed:
            return self._fixed[name]
        name = self.name(name)
        return self._entries.get(name, self.defaults.get(name))

    def replaced(self, **fields: Any) -> "Config":
        """Returns a copy with these fields fixed."""
        return Config(self._entries, self.defaults, self._names, {**self._fixed, **fields})

    def with_defaults(self, **fields: Any) -> "Config":
        """Returns a copy with other defaults of these fields."""
        return Config(self._entries, {**self.defaults, **fields}, self._names, self._fixed)

    def entry(self, name: str) -> Any:
        """Returns a field that the config itself contains, else None."""
        return self._fixed[name] if name in self._fixed else self._entries.get(self.name(name))

    def is_explicit_null(self, name: str) -> bool:
        """Whether the config itself contains a field and its value is None."""
        return self.name(name) in self._entries and self.entry(name) is None

    def name(self, field: str) -> str:
        """The config's name of a field, or its class's name if the config lacks it.

        Raises:
          ValueError: if the config has the field under two names with different values.
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
        """Returns a field that must be a whole number of at least 1."""
        check_positive(**{self.name(name): self[name]})
        return self[name]

    def number(self, name: str) -> float:
        """Returns a field that must be a number above zero."""
        return above_zero(self.name(name), self[name])

    def flag(self, name: str) -> bool:
        """Whether a field is True; None means False, as in transformers."""
        check_choice(self.name(name), self[name], True, False, None)
        return bool(self[name])

    def rate(self, name: str) -> float:
        """Returns a field that must be between 0 and 1."""
        return check_rate(self.name(name), self[name])

    def whole(self, name: str) -> int:
        """Returns a field that must be a whole number, of either sign."""
        if isinstance(self[name], bool) or not isinstance(self[name], int):
            raise ValueError(f"{self.name(name)} must be a whole number; got {self[name]!r}.")
        return self[name]

    def listed(self, name: str) -> Sequence[Any]:
        """Returns a field that must be a list; empty for None."""
        if not isinstance(self[name], list | tuple | None):
            raise ValueError(f"{self.name(name)} must be a list; got {self[name]!r}.")
        return self[name] or ()

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Returns a field that must be a dict; empty for None."""
        if not isinstance(self[name], Mapping | None):
            raise ValueError(f"{self.name(name)} must be a dict; got {self[name]!r}.")
        return self[name] or {}

    def of_layer(self, name: str, index: int) -> Any:
        """Returns a layer's entry of a field that must be a list with one for each layer."""
        each, layers = self.listed(name), self.count("num_hidden_layers")
        if len(each) != layers:
            raise ValueError(
                f"{self.name(name)} must have an entry for each of num_hidden_layers={layers}; got "
                f"{len(each)}."
            )
        return each[index]

    def heads(self) -> tuple[int, int, int]:
        """N, K and H; K is N if the config's value is None."""
        n, h = self.query_heads()
        if self["num_key_value_heads"] is None:
            return n, n, h
        k = self.count("num_key_value_heads")
        check_divides(self.name("num_key_value_heads"), k, self.name("num_attention_heads"), n)
        return n, k, h

    def query_heads(self) -> tuple[int, int]:
        """N and H; H is the width divided by N if the config has no head_dim.

        Raises:
          ValueError: for a different head_dim that the class does not read.
        """
        n, h = self.count("num_attention_heads"), self["head_dim"]
        if h is not None and ("head_dim" in self._names or "head_dim" in self.defaults):
            return n, self.count("head_dim")
        width, names = self.count("hidden_size"), (self.name("num_attention_heads"), "hidden_size")
        each = check_divides(names[0], n, self.name(names[1]), width)
        if h not in (None, each):
            raise ValueError(
                f"head_dim={h!r} is not served: heads of this model_type have "
                f"{self.name('hidden_size')} / {names[0]} = {each} components; leave it out."
            )
        return n, each

    def index(self, index: int) -> int:
        """Returns `index`; ValueError if the model has no such layer."""
        layers = self.count("num_hidden_layers")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers:
            raise ValueError(
                f"index must be the place of a layer, from 0 to {layers - 1}, since "
                f"{self.name('num_hidden_layers')}={layers}; got {index!r}."
            )
        return index

    def layer_type(self, index: int, default: Callable[[int], str], other: str) -> str:
        """The type of a layer: `layer_types[index]`, else `default(index)`.

        Args:
          index: of the layer.
          default: the type that the config's class derives without layer_types.
          other: the type allowed in this family besides "full_attention".
        """
        if self["layer_types"] is None:
            return default(index)
        kind = self.of_layer("layer_types", index)
        kind = RENAMED.get(kind, kind) if isinstance(kind, str) else kind
        check_choice(f"layer_types[{index}]", kind, "full_attention", other)
        return kind


class Family(NamedTuple):
    """The row of a model type: how its layer is built, and the rules of its weights.

    Attributes:
      attention: builds the layer from a config, an index and the arguments common to all layers.
      rules: returns the rules of the layer's weights from a config and an index.
      names: names of fields in its files that its class does not map, see `Config`.
      defaults: of fields that the class in transformers lacks or derives; `published.json` holds
        those of the others.
      gguf: the rules for a GGUF file of llama.cpp; None if unknown.
      path: path of a layer's attention in the whole model, {} for the layer's number, or several
        paths of equal attentions; None for the path in `published.json`.
      missing_reason: what a layer has instead of attention; "" if it has attention.
      derived: returns the config with the fields that its class derives from other fields.
      kv_source: the earlier layer whose keys and values a layer reads; None for its own.
    """

    attention: Callable[[Config, int, Mapping[str, Any]], nnx.Module]
    rules: Callable[[Config, int], tuple[Rule, ...]] = lambda config, index: ()
    names: Names = NONE
    defaults: Mapping[str, Any] = NOTHING
    gguf: Callable[[Config, int], tuple[Rule, ...]] | None = None
    path: Callable[[Config, int], str | tuple[str, ...] | None] = lambda config, index: None
    missing_reason: Callable[[Config, int], str] = lambda config, index: ""
    derived: Callable[[Config], Config] = lambda config: config
    kv_source: Callable[[Config, int], int | None] = lambda config, index: None


ByPart = Mapping[str, Family]  # of a model with several attentions in a layer: the row of each


def above_zero(name: str, x: Any) -> float:
    """Returns `x` if it is a number above zero; else ValueError with the field's name."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < float("inf"):
        raise ValueError(f"{name} must be a number above zero; got {x!r}.")
    return x
