"""Runs the torch and the Flax side of a comparison, and matches their taps."""
