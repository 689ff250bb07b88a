"""Rules of a whole model: the rules of each layer's attention, named from the model's root."""

from collections.abc import Iterable
from typing import NamedTuple

from flax import nnx

from ..weights.known_layers import flax_state
from ..weights.rule import Rule, spread


class Named(NamedTuple):
    """The attention of one layer in a whole model.

    Attributes:
      source: its path in torch, {} for the number of the layer.
      target: its path in Flax.
      rules: of its weights, by their names inside the module.
      rest: whether it has other weights, which are moved unchanged.
      optional: whether it may have another path, so that its rules may match nothing.
    """

    source: str
    target: str
    rules: tuple[Rule, ...]
    rest: bool = False
    optional: bool = False

    def all_rules(self, number: int | str) -> list[Rule]:
        """Returns its rules with names in the whole model, for this layer number."""
        source, target = (place.format(number) for place in (self.source, self.target))
        named = [rule.inside(source, target) for rule in self.rules]
        named += [Rule(f"{source} -> {target}")] if self.rest else []
        return [rule.made_optional() for rule in named] if self.optional else named


def of_all(layers: Iterable[tuple[int, Named]]) -> tuple[Rule, ...]:
    """Returns the rules of all layers, with a star for the number where layers are equal.

    Args:
      layers: the number of each and its attention.

    >>> one = Named("h.{}.attn", "layers.{}.attn", (Rule("out -> o_proj"),), rest=True)
    >>> print(*of_all(enumerate([one, one])), sep="; ")
    Rule("h.*.attn.out -> layers.*.attn.o_proj"); Rule("h.*.attn -> layers.*.attn")
    """
    by_place: dict[tuple[str, str], dict[int, Named]] = {}
    for number, layer in layers:
        by_place.setdefault((layer.source, layer.target), {})[number] = layer
    result = list[Rule]()
    for places, same_rules in by_place.items():
        first = next(iter(same_rules.values()))
        numbered = {"{}" in place for place in places}  # both, unless stages count blocks
        is_one = len(numbered) == 1 and all(layer == first for layer in same_rules.values())
        for number, layer in [("*", first)] if is_one else same_rules.items():
            result += layer.all_rules(number)
    return tuple(result)


def leaves_some(layer: nnx.Module, rules: Iterable[Rule]) -> bool:
    """Whether a layer has weights that no rule names."""
    named = {name for rule in rules for name in spread(rule.sides[1])}
    paths = (path.split(".") for path in flax_state(layer))
    return not all({".".join(x[: i + 1]) for i in range(len(x))} & named for x in paths)
