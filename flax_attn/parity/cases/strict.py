"""The strict modes in which this library's own cases are proven, by pytest and by the command."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

MODES = {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}
WARNINGS = "error"
# A cache that cannot be read or written says so in a warning; nothing is wrong with the case.
CACHE = ".*persistent compilation cache"


@contextmanager
def strict() -> Iterator[None]:
    """Promotion of ranks and dtypes raises inside, and so does every warning.

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
