"""One set of weights in every layer's own layout, and every layer's gradients mapped back to it.

The set is `query, key, value, out`, each with a `weight`, `(in, out)`, and a `bias`. A `Plan`
maps it: `forward` returns a layer's arrays by path, `back` returns arrays of the set by name.
"""

from collections.abc import Sequence

from ..weights.move import Move
from ..weights.plan import Plan
from ..weights.rule import Rule

PROJECTIONS = ("query", "key", "value", "out")
THREE = "{query,key,value}"
NOTEBOOK = ("W_query", "W_key", "W_value", "out_proj")  # the book's names for the four projections


def plan_of(*rules: Rule) -> Plan:
    """Builds a plan from rules; each applies to the names that the rules before it left over."""
    names = [f"{name}.{kind}" for name in PROJECTIONS for kind in ("weight", "bias")]
    moves = []
    for rule in rules:
        groups = rule.groups(names)
        moves += [
            Move(sources, targets, rule.layout, dict(rule.sizes)) for sources, targets in groups
        ]
        names = [name for name in names if not any(name in sources for sources, _ in groups)]
    return Plan(tuple(moves), (), (), ())


def separate(layers: Sequence[str], weight: str, transposed: bool) -> Plan:
    """Four separate projections, each with a weight, `(out, in)` if transposed, and a bias."""
    pairs = zip(PROJECTIONS, layers, strict=True)
    return plan_of(*(rule for pair in pairs for rule in _linear(*pair, weight, transposed)))


def combined(weight: str, bias: str, out: str, kernel: str, transposed: bool) -> Plan:
    """One qkv projection with its weight and bias at these paths, and `out`."""
    return plan_of(
        Rule(
            f"{THREE}.weight -> {weight}", f"c i o -> {'(c o) i' if transposed else 'i (c o)'}", c=3
        ),
        Rule(f"{THREE}.bias -> {bias}", "c o -> (c o)", c=3),
        *_linear("out", out, kernel, transposed),
    )


def einsum(out: str, kernel: str, transposed: bool) -> Plan:
    """`W_query` of shape `(out, in)`, `b_query` and so on, and `out`."""
    rest = Rule("*.weight -> W_*", "i o -> o i"), Rule("*.bias -> b_*")
    return plan_of(*_linear("out", out, kernel, transposed), *rest)


def wrapper(heads: int, first: str, out: str, kernel: str, transposed: bool) -> Plan:
    """Separate heads, each with three projections, and `out`."""
    if heads == 1:
        layers = [f"{first}.heads.0.W_{name}" for name in PROJECTIONS[:3]]
        return separate([*layers, out], kernel, transposed)
    head = f"{first}.heads.{{{','.join(map(str, range(heads)))}}}.W_*"
    return plan_of(
        *_linear("out", out, kernel, transposed),
        Rule(
            f"*.weight -> {head}.{kernel}",
            f"i (n h) -> n {'h i' if transposed else 'i h'}",
            n=heads,
        ),
        Rule(f"*.bias -> {head}.bias", "(n h) -> n h", n=heads),
    )


def by_heads(heads: int) -> Plan:
    """flax.nnx's layout: kernels `(in, heads, width)`, and `(heads, width, out)` for `out`."""
    return plan_of(
        Rule("out.weight -> out.kernel", "(n h) o -> n h o", n=heads),
        Rule("out.bias -> out.bias"),
        Rule("*.weight -> *.kernel", "i (n h) -> i n h", n=heads),
        Rule("*.bias -> *.bias", "(n h) -> n h", n=heads),
    )


def _linear(name: str, path: str, weight: str, transposed: bool) -> tuple[Rule, Rule]:
    layout = "i o -> o i" if transposed else None
    return Rule(f"{name}.weight -> {path}.{weight}", layout), Rule(f"{name}.bias -> {path}.bias")
