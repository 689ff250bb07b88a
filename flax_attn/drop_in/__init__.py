"""Drop-in replacements for the attention functions of jax.nn and Flax."""

from .flax_nnx import flax_attention as flax_attention
from .jax_nn import dot_product_attention as dot_product_attention
