"""A published config as the families read it: fields, defaults, and one sentence where it fails."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from .._checks import check_choice, check_divides, check_positive, check_rate
from ..weights.rule import Rule


class Config:
    """The fields of one config.

    A field that is missing takes the default of its class in transformers, which stands in the
    family's file.

    Args:
      given: the config, as `json.load` or `to_dict()` gives it.
      defaults: of the fields that the family reads.
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]):
        self._given, self.defaults = given, defaults

    def __getitem__(self, name: str) -> Any:
        """A field, or its default."""
        return self._given.get(name, self.defaults.get(name))

    def given(self, name: str) -> Any:
        """A field that the config itself has, else None."""
        return self._given.get(name)

    def count(self, name: str) -> int:
        """A whole number of at least 1."""
        check_positive(**{name: self[name]})
        return self[name]

    def number(self, name: str) -> float:
        """A number above zero."""
        return above_zero(name, self[name])

    def flag(self, name: str) -> bool:
        """Whether a field is True; None stands for False, as transformers has it."""
        check_choice(name, self[name], True, False, None)
        return bool(self[name])

    def rate(self, name: str) -> float:
        """A share from 0 to 1."""
        return check_rate(name, self[name])

    def heads(self) -> tuple[int, int, int]:
        """N, K and H; None for K stands for N, and None for H for the width over N."""
        n = self.count("num_attention_heads")
        k = n if self["num_key_value_heads"] is None else self.count("num_key_value_heads")
        check_divides("num_key_value_heads", k, "num_attention_heads", n)
        if self["head_dim"] is not None:
            return n, k, self.count("head_dim")
        width = self.count("hidden_size")
        return n, k, check_divides("num_attention_heads", n, "hidden_size", width)

    def index(self, index: int) -> int:
        """`index`, if the model has such a layer."""
        layers = self.count("num_hidden_layers")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers:
            raise ValueError(
                f"index must be the place of a layer, from 0 to {layers - 1}, since "
                f"num_hidden_layers={layers}; got {index!r}."
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
        check_choice(f"layer_types[{index}]", kinds[index], "full_attention", other)
        return kinds[index]


class Family(NamedTuple):
    """One model_type: defaults of the fields it reads, its layer, and the rules of its weights.

    Attributes:
      defaults: by field, as the class in transformers has them.
      attention: from a config, an index and the arguments of every layer to the layer.
      rules: from a config and an index to the rules of the layer's weights.
    """

    defaults: Mapping[str, Any]
    attention: Callable[[Config, int, Mapping[str, Any]], nnx.Module]
    rules: Callable[[Config, int], tuple[Rule, ...]] = lambda config, index: ()


def check_whole(config: Mapping[str, Any]) -> None:
    """ValueError for a config of several models, of quantised weights, or of no decoder."""
    if "text_config" in config:
        raise ValueError(
            "The config has a text_config, so it is of a model with several parts; hand in "
            'config["text_config"] itself.'
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            "The config has a quantization_config, and quantised weights are not served; "
            "dequantise the checkpoint and leave the field out."
        )
    if config.get("is_causal") is False:
        raise ValueError("is_causal=False is not served: the families here are decoders.")


def above_zero(name: str, x: Any) -> float:
    """`x`, if it is a number above zero; ValueError, naming the field, if not."""
    if isinstance(x, bool) or not isinstance(x, int | float) or not 0 < x < float("inf"):
        raise ValueError(f"{name} must be a number above zero; got {x!r}.")
    return x
