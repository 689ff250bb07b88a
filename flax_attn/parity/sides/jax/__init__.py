"""Runs JAX as the first side of a comparison, and reads and evaluates traced JAX programs."""
