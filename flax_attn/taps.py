"""Named taps inside a forward pass: identities, unless a `listen` block records them.

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
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

# Tap points inside attention, which have no parameters; a porting rule may map them to Flax taps.
__all__ = ["POINTS", "listen", "listening", "tap"]
POINTS = ("query", "key", "value", "scores", "weights", "context")

TapHook = Callable[[str, jax.Array], jax.Array | None]
_listener: ContextVar[TapHook | None] = ContextVar("listener", default=None)


def tap(name: str, value: jax.Array) -> jax.Array:
    """Returns `value`, or what the `hear` of an enclosing `listen` block returns."""
    hear = _listener.get()
    if hear is None:
        return value
    other = hear(name, value)
    return value if other is None else other


def listening() -> bool:
    """Whether the caller runs inside a `listen` block."""
    return _listener.get() is not None


@contextmanager
def listen(hear: TapHook | None = None) -> Iterator[list[tuple[str, jax.Array]]]:
    """Collects `(name, value)` of every tap passed inside the block, or calls `hear` with them.

    If `hear` returns a value, it replaces the tap's value; None keeps it. Under `jax.jit`, in a
    scan, under remat or vmap, open the block inside the traced function and return the collected
    values: those of one trace cannot be read outside of it. A `hear` is called in every trace: it
    may replace values there and note names and shapes, as under `jax.eval_shape`, but must keep no
    values.

    Raises:
      ValueError: without `hear`, by a tap inside a transformation that began after the block was
        opened.

    >>> import jax.numpy as jnp
    >>> def weights(x):
    ...     with listen() as heard:
    ...         _ = tap("weights", x / x.sum())
    ...     return dict(heard)["weights"]
    >>> jax.vmap(weights)(jnp.asarray([[1.0, 3.0]])).tolist()
    [[0.25, 0.75]]
    """
    collected: list[tuple[str, jax.Array]] = []
    opened_in = get_opaque_trace_state()

    def collect(name: str, value: jax.Array) -> None:
        if isinstance(value, Tracer) and get_opaque_trace_state() != opened_in:
            raise ValueError(
                f"The tap {name!r} is inside a transformation (scan, remat, vmap, grad, cond or "
                "jit) that began after listen() was opened, so its value cannot leave it. Open "
                "listen inside the function that is transformed, and return the values from there: "
                "dict(heard)[name]."
            )
        collected.append((name, value))

    token = _listener.set(hear or collect)
    try:
        yield collected
    finally:
        _listener.reset(token)


def __dir__() -> list[str]:
    return sorted(__all__)
