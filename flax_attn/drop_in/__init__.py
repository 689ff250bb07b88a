"""`attend` as jax.nn and Flax call it: change the import and keep the calls."""

from .flax_nnx import flax_attention as flax_attention
from .jax_nn import dot_product_attention as dot_product_attention
