"""The benchmark: every contender is proven equal on the very shapes before it is timed."""
