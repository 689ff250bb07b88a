"""Modules that are not ours, and ports of them as a stranger would write: the harness knows none.

Each file holds the original, its port, the rules between them and a fault to be found. They need
torch; `parity_tests/core/parity/test_foreign.py` compares them.
"""
