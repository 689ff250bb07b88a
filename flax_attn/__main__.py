"""`python -m flax_attn` is `flax-attn`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
