"""Runs torch's side, in float64 where its code asks for float32, and records what it computes."""
