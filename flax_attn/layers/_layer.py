"""The base of all layers."""

from functools import lru_cache
from inspect import isfunction
from typing import Any, ClassVar

import jax
from flax import nnx

from .._internal.checks import checked_arguments
from .._internal.silent import warn_if_padding

# Steps of layers, whose arguments and results are not all arrays.
STEPS = ("tokens", "project", "attention", "read", "output", "projections")


class Layer(nnx.Module):
    """A module whose constructor and call say what they take if an argument does not fit."""

    mask_is_of: ClassVar[str] = "pairs"  # one of `other_names.MASKS`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, look in (("__init__", None), ("__call__", _look_at_mask), ("init_cache", None)):
            if name in vars(cls):
                setattr(cls, name, checked_arguments(vars(cls)[name], look))
        for name in filter(vars(cls).__contains__, STEPS):
            if isfunction(vars(cls)[name]):
                # nnx.tabulate calls each function of a class by jax.jit. This is none, and it
                # keeps nothing at size 0.
                setattr(cls, name, lru_cache(maxsize=0)(vars(cls)[name]))


def _look_at_mask(layer: Layer, *inputs: Any, mask: Any, **call: Any) -> None:
    """Warns if a mask of queries and keys may be meant as one of tokens."""
    named = (call.get(name) for name in ("x", "query", "memory", "key"))
    tokens = [x for x in (*inputs, *named) if isinstance(x, jax.Array) and x.ndim >= 2]
    if tokens and layer.mask_is_of == "pairs":
        (*batch, queries, _), keys = tokens[0].shape, tokens[:2][-1].shape[-2]
        warn_if_padding(mask, tuple(batch), queries, keys)
