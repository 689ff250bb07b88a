"""Keeps a Flax run in float64 where `jax.nn.dot_product_attention` casts to float32.

It always computes its softmax in float32, as does `nnx.MultiHeadAttention`, which calls it, so no
port that uses them can agree with a float64 reference to better than 5e-8. Lifted, as torch's casts
are, it computes the same function in float64.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from ..jax.evaluate import SINGLE, Evaluation

NAME = "dot_product_attention"
NOTE = (
    "jax.nn.dot_product_attention of Flax computes its softmax in float32: lifted to float64 "
    "(flax_attn.flax_attention, as attention_fn=, keeps the dtype of its inputs)"
)
LIFTED = Evaluation(SINGLE)


@contextmanager
def attention_lifted(notes: dict[str, None], files: Iterable[str] = ()) -> Iterator[None]:
    """Keeps `jax.nn.dot_product_attention` in float64 for float64 queries inside the block.

    Args:
      notes: receives a sentence when that happens.
      files: names of modules that may have imported it under another name.
    """
    original = jax.nn.dot_product_attention

    def wide(query: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(query, "dtype", None) != jnp.float64:
            return original(query, *args, **kwargs)
        notes[NOTE] = None
        return _computed(original, (query, *args), kwargs)

    # `from jax.nn import ...` binds the function in other modules, which need the patch too.
    modules = {name: vars(m) for name, m in sys.modules.items() if m is not None}
    names = [(space, NAME) for space in modules.values() if space.get(NAME) is original]
    names += [
        (space, name)
        for space in (modules.get(file, {}) for file in files)
        for name, x in space.items()
        if x is original and name != NAME
    ]
    for space, name in names:
        space[name] = wide
    try:
        yield
    finally:
        for space, name in names:
            space[name] = original


def _computed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping) -> Any:
    """Evaluates a function without its casts from float64 to float32."""
    flat, tree = jax.tree.flatten((args, dict(kwargs)))
    places = [i for i, x in enumerate(flat) if hasattr(x, "dtype") and hasattr(x, "shape")]

    def of(*arrays: Any) -> Any:
        filled = dict(zip(places, arrays, strict=True))
        args, kwargs = tree.unflatten([filled.get(i, x) for i, x in enumerate(flat)])
        return function(*args, **kwargs)

    arrays = [flat[i] for i in places]
    program, shapes = jax.make_jaxpr(of, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), LIFTED(program, arrays))
