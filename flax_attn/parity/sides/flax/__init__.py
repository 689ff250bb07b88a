"""Runs Flax's side and records its taps, dropout masks and dtypes."""
