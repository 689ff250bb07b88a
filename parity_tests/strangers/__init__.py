"""Published modules of other people, each with a port written in place and compared with it.

The originals are classes of `transformers` and `x_transformers`. The ports keep their names where
they can, take `flax_attn.attend` for the attention, and differ from them in layout: fused weights
are split, positions come before heads, channels come last. Six of them run at each commit, the
others nightly.
"""
