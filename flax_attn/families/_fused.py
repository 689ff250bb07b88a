"""Rules of a module that projects query, key and value together."""

import re

from ..weights.einops_layout import Size
from ..weights.rule import Rule

PARTS = "{q_proj,k_proj,v_proj}"


def fused(name: str, layout: str, *, bias: bool, **sizes: Size) -> tuple[Rule, ...]:
    """Returns the rules of its weight and its bias.

    Args:
      name: of the module.
      layout: of the weight, with input axis `i`; the bias has the same layout without it.
      bias: whether it has one.
      sizes: sizes of axes that the layout does not determine.

    >>> print(*fused("qkv", "(h n d) i -> n i (h d)", bias=True, h=6), sep="; ")
    Rule("qkv.weight -> {q_proj,k_proj,v_proj}.kernel", "(h n d) i -> n i (h d)", h=6);
    Rule("qkv.bias -> {q_proj,k_proj,v_proj}.bias", "(h n d) -> n (h d)", h=6)
    """
    weight = Rule(f"{name}.weight -> {PARTS}.kernel", layout, **sizes)
    plain = re.sub(r"\bi +", "", f"{layout} ").strip()
    return (weight, Rule(f"{name}.bias -> {PARTS}.bias", plain, **sizes)) if bias else (weight,)


def convolutions(*channels: int) -> tuple[Rule, ...]:
    """Returns the rules of a convolution of q, k and v that files store as three.

    transformers writes three of equal size, whatever the channels are.

    Args:
      channels: number of channels of each.

    >>> print(*convolutions(8, 8, 12), sep="; ")
    Rule("{q,k,v}_conv1d.weight -> conv1d.kernel", "n o i w -> w i (n o)", o=(8, 8, 12));
    Rule("{q,k,v}_conv1d.weight -> conv1d.kernel", "n o i w -> w i (n o)")
    """
    names, layout = "{q,k,v}_conv1d.weight -> conv1d.kernel", "n o i w -> w i (n o)"
    return (Rule(names, layout, o=channels), Rule(names, layout))
