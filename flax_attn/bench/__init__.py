"""The benchmark: every competitor is proven equal on the very shapes before it is timed."""
