"""Strict JAX modes for this library's own cases, used by pytest and the command line."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

MODES = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
WARNINGS = "error"
# Failing to read or write the cache only warns; the case itself is unaffected.
CACHE = ".*persistent compilation cache"


@contextmanager
def strict() -> Iterator[None]:
    """Context in which rank promotion, implicit dtype promotion and all warnings raise.

    >>> import jax.numpy as jnp
    >>> with strict():
    ...     try:
    ...         jnp.ones(3) + jnp.ones((2, 3))
    ...     except ValueError as error:
    ...         print(str(error).partition(" for ")[0])
    Operands could not be broadcast together
    """
    import jax

    with warnings.catch_warnings(), ExitStack() as modes:
        for name, mode in MODES.items():
            modes.enter_context(getattr(jax, name.removeprefix("jax_"))(mode))
        warnings.simplefilter(WARNINGS)
        warnings.filterwarnings("ignore", CACHE)
        yield
