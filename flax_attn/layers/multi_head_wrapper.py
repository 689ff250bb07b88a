"""Multi-head attention by hand: several causal attentions side by side."""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Float

from .._checks import check_positive
from .causal_attention import CausalAttention


class MultiHeadAttentionWrapper(nnx.Module):
    """`concat(heads[0](x), ..., heads[N - 1](x))`, each head a `CausalAttention` of its own.

    Shapes: x `*B T d_in` -> context `*B T D` with `D = num_heads * d_out`: here d_out is the width
    of one head.

    Args:
      d_in: width of a token.
      d_out: width of one head.
      context_length: the longest sequence taken; it adds no parameter.
      dropout: share of the weights that is dropped in training, from 0 to 1.
      num_heads: how many heads.
      qkv_bias: whether the projections have biases.
      kernel_init, bias_init: initializers of the projections; None draws as torch does.
      rngs: source of the random start, torch's U(+-1 / sqrt(d_in)), and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, a share outside [0, 1], or if x is too long or not
        `*B T d_in`.
      TypeError: if x is not floating.

    Source: Raschka, "Build a Large Language Model (From Scratch)", 2024, chapter 3.

    >>> layer = MultiHeadAttentionWrapper(3, 2, 6, 0.0, num_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((6, 3))).shape
    (6, 4)
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
        *,
        kernel_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        rngs: nnx.Rngs,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
    ):
        check_positive(num_heads=num_heads)
        arguments = (d_in, d_out, context_length, dropout, qkv_bias)
        inits = {"kernel_init": kernel_init, "bias_init": bias_init}
        head = partial(CausalAttention, **inits, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.heads = nnx.List(head(*arguments) for _ in range(num_heads))

    def __call__(
        self, x: Float[Array, "*B T d_in"], *, deterministic: bool | None = None
    ) -> Float[Array, "*B T D"]:
        """The heads' context vectors, joined; `deterministic` overrules `train()` and `eval()`."""
        contexts = [head(x, deterministic=deterministic) for head in self.heads]
        return jnp.concatenate(contexts, axis=-1)  # *B T (N d_out)
