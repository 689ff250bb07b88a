"""Searches for the one change of torch's program that gives Flax's value."""
