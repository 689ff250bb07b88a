"""Drop-in replacements for the attention functions of jax.nn and Flax."""

import sys

from .._internal.lazy import Lazy

TYPE_CHECKING = False  # what type checkers take for true; typing itself is not imported
if TYPE_CHECKING:
    from .flax_nnx import flax_attention as flax_attention
    from .jax_nn import dot_product_attention as dot_product_attention

# The module that defines each public name: that for jax.nn imports no flax.
_HOMES = {"flax_attention": ".flax_nnx", "dot_product_attention": ".jax_nn"}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]

sys.modules[__name__].__class__ = Lazy
