"""The same attentions in plain PyTorch, as on a whiteboard: what flax_attn is measured against."""
