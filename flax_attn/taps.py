"""Named points inside a forward: the identity, unless a `listen` block records them.

>>> import jax.numpy as jnp
>>> with listen() as heard:
...     _ = tap("weights", jnp.ones(2))
>>> heard[0][0]
'weights'
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

# The points inside attention. They hold no weights; a rule may say where Flax taps them.
POINTS = ("query", "key", "value", "scores", "weights", "context")

Hear = Callable[[str, jax.Array], jax.Array | None]
_listener: ContextVar[Hear | None] = ContextVar("listener", default=None)


def tap(name: str, value: jax.Array) -> jax.Array:
    """`value`, unchanged, unless the `hear` of a `listen` block replaces it."""
    hear = _listener.get()
    if hear is None:
        return value
    other = hear(name, value)
    return value if other is None else other


def listening() -> bool:
    """Whether this runs inside a `listen` block."""
    return _listener.get() is not None


@contextmanager
def listen(hear: Hear | None = None) -> Iterator[list[tuple[str, jax.Array]]]:
    """Collects `(name, value)` of every tap passed inside the block, or calls `hear` with them.

    If `hear` returns a value, it replaces the tap's value; None keeps it. Under `jax.jit`, open the
    block inside the traced function and return the collected values.
    """
    heard: list[tuple[str, jax.Array]] = []
    token = _listener.set(hear or (lambda name, value: heard.append((name, value))))
    try:
        yield heard
    finally:
        _listener.reset(token)
