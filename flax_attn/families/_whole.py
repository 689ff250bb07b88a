"""Rules of a whole model: those of the attention of each layer, named from the model's root."""

from collections.abc import Iterable
from typing import NamedTuple

from flax import nnx

from ..weights.known_layers import flax_state
from ..weights.rule import Rule, spread


class Named(NamedTuple):
    """The attention of one layer in a whole model.

    Attributes:
      source: where torch has it, {} for the number of the layer.
      target: where Flax has it.
      rules: of its weights, by their names in there.
      rest: whether it has others, which are moved as they are.
      optional: whether it may be elsewhere, so that its rules may match nothing.
    """

    source: str
    target: str
    rules: tuple[Rule, ...]
    rest: bool = False
    optional: bool = False

    def all_rules(self, number: int | str) -> list[Rule]:
        """Its rules by their names in the whole model, where it has this number."""
        source, target = (place.format(number) for place in (self.source, self.target))
        named = [rule.inside(source, target) for rule in self.rules]
        named += [Rule(f"{source} -> {target}")] if self.rest else []
        return [rule.made_optional() for rule in named] if self.optional else named


def of_all(layers: Iterable[tuple[int, Named]]) -> tuple[Rule, ...]:
    """The rules of all layers, with a star for their number where it makes no difference.

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
        numbered = {"{}" in place for place in places}  # both, unless a stage counts its blocks
        is_one = len(numbered) == 1 and all(layer == first for layer in same_rules.values())
        for number, layer in [("*", first)] if is_one else same_rules.items():
            result += layer.all_rules(number)
    return tuple(result)


def leaves_some(layer: nnx.Module, rules: Iterable[Rule]) -> bool:
    """Whether a layer has weights that no rule names."""
    named = {name for rule in rules for name in spread(rule.sides[1])}
    paths = (path.split(".") for path in flax_state(layer))
    return not all({".".join(x[: i + 1]) for i in range(len(x))} & named for x in paths)
