"""The benchmark: every competitor is proven equal at the same shapes before it is timed."""
