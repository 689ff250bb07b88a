"""The `flax-attn` command and the pytest plugin; importing this package imports neither."""
