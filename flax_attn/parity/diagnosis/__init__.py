"""Diagnosis of a failed comparison: which step introduced the error, and its likely cause."""
