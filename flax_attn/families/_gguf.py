"""Rules for attention in the GGUF files of llama.cpp, with names as `blk.3.attn_q.weight`."""

from ..weights.rule import Rule

# Other weights below `blk.3`: the norm before the attention, and the MLP with its norm.
_OTHERS = (Rule.skip("attn_norm"), Rule.skip("ffn_*"))


def names(*parts: str) -> tuple[Rule, ...]:
    """Renames projections that need no other change, and skips what is not the attention's.

    >>> print(names("output")[0])
    Rule("attn_output -> o_proj")
    """
    return (*(Rule(f"attn_{part} -> {part[0]}_proj") for part in parts), *_OTHERS)


def unpermuted(part: str, heads: int, bias: bool) -> tuple[Rule, ...]:
    """Transposes rows in rotary pairs, (n, h / 2, 2), to rows in halves, (n, 2, h / 2)."""
    name = f"attn_{part}.{{}} -> {part}_proj.{{}}"
    weight = Rule(name.format("weight", "kernel"), "(n h r) i -> i (n r h)", n=heads, r=2)
    last = Rule(name.format("bias", "bias"), "(n h r) -> (n r h)", n=heads, r=2)
    return (weight, last) if bias else (weight,)
