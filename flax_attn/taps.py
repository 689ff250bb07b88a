"""Named points inside a forward: identity for everybody, a record for whoever listens.

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
    """`value`, unchanged, unless somebody who listens puts another in its place."""
    hear = _listener.get()
    if hear is None:
        return value
    other = hear(name, value)
    return value if other is None else other


def listening() -> bool:
    """Whether somebody listens here."""
    return _listener.get() is not None


@contextmanager
def listen(hear: Hear | None = None) -> Iterator[list[tuple[str, jax.Array]]]:
    """Collects `(name, value)` of every tap passed inside the block, or calls `hear` with them.

    What `hear` returns goes on in the value's place; None leaves it as it is. Under `jax.jit` open
    it inside the traced function and return what was heard.
    """
    heard: list[tuple[str, jax.Array]] = []
    token = _listener.set(hear or (lambda name, value: heard.append((name, value))))
    try:
        yield heard
    finally:
        _listener.reset(token)
