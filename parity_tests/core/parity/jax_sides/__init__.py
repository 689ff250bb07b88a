"""JAX functions in pairs: rewrites that are right, and the same with one mistake."""
