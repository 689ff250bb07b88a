"""The base of all layers."""

from typing import Any, ClassVar

import jax
from flax import nnx

from .._internal.checks import checked_arguments
from .._internal.silent import warn_if_padding


class Layer(nnx.Module):
    """A module whose constructor and call say what they take if an argument does not fit."""

    mask_is_of: ClassVar[str] = "pairs"  # one of `other_names.MASKS`
    renamed_arguments: ClassVar[frozenset[str]] = frozenset()  # old ones, still taken

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, look in (("__init__", None), ("__call__", _look_at_mask), ("init_cache", None)):
            if name in vars(cls):
                setattr(cls, name, checked_arguments(vars(cls)[name], look))


def _look_at_mask(layer: Layer, *inputs: Any, mask: Any, **call: Any) -> None:
    """Warns if a mask of queries and keys may be meant as one of tokens."""
    named = (call.get(name) for name in ("x", "query", "memory", "key"))
    tokens = [x for x in (*inputs, *named) if isinstance(x, jax.Array) and x.ndim >= 2]
    if tokens and layer.mask_is_of == "pairs":
        (*batch, queries, _), keys = tokens[0].shape, tokens[:2][-1].shape[-2]
        warn_if_padding(mask, tuple(batch), queries, keys)
