"""Rules of a module that gives query, key and value as one."""

import re

from ..weights.rule import Rule, Size

PARTS = "{q_proj,k_proj,v_proj}"


def fused(name: str, layout: str, *, bias: bool, **sizes: Size) -> tuple[Rule, ...]:
    """The rules of its weight and its bias.

    Args:
      name: of the module.
      layout: of the weight, whose inputs are the axis `i`; that of the bias has no such axis.
      bias: whether it has one.
      sizes: axes that the layout does not tell.

    >>> print(*fused("qkv", "(h n d) i -> n i (h d)", bias=True, h=6), sep="; ")
    Rule("qkv.weight -> {q_proj,k_proj,v_proj}.kernel", "(h n d) i -> n i (h d)", h=6);
    Rule("qkv.bias -> {q_proj,k_proj,v_proj}.bias", "(h n d) -> n (h d)", h=6)
    """
    weight = Rule(f"{name}.weight -> {PARTS}.kernel", layout, **sizes)
    plain = re.sub(r"\bi +", "", f"{layout} ").strip()
    return (weight, Rule(f"{name}.bias -> {PARTS}.bias", plain, **sizes)) if bias else (weight,)
