"""The command `flax-attn`, and the plugin of pytest; importing this package imports neither."""
