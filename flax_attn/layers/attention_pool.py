"""Attention pooling: learned queries over the tokens of a sequence (Lee et al., 2019)."""

from typing import Unpack

from flax import nnx
from jaxtyping import Array, Bool, Float

from .._internal.arrays import for_each_row
from .._internal.checks import check_divides, check_positive
from ..attend import attend
from ..masks import FULL, Mask
from ._common import merge_heads, split_heads
from ._init import LayerInit, LayerInitKeywords, layer_init_signature
from ._inputs import tokens
from ._layer import Layer


class AttentionPool(Layer):
    """`out_proj(attend(q_proj(probe), k_proj(x), v_proj(x)))`: tokens pooled into a few vectors.

    Also called: attention pooling, multi-head attention pooling (MAP), pooling by multi-head
    attention (PMA).

    With one query it is the attention of SigLIP's pooling head, whose norm and MLP come after it.
    A sequence without real tokens gives `out_proj(0)`.

    Shapes: x `*B S dim` -> `*B queries dim`.

    Args:
      dim: width of a token.
      num_heads: number of heads; must divide dim.
      queries: number of output vectors.
      bias: whether the four projections have biases.
      dropout: dropout rate of the weights in training, from 0 to 1.
      kernel_init, bias_init: initializers of the projections, the first also of `probe`; None for
        PyTorch's, and N(0, 1) for `probe`.
      rngs: source of the initial values and of the dropout.
      dtype: of the arithmetic; None promotes x and the weights.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, heads that do not divide dim, a rate outside [0, 1]; in the
        call, if x or valid do not fit.
      TypeError: if x is not floating, or valid not boolean.

    Source: Lee et al., "Set Transformer", 2019, section 3.2; Zhai et al., "Sigmoid Loss for
    Language Image Pre-Training", 2023.

    >>> import jax.numpy as jnp
    >>> pool = AttentionPool(6, 2, 1, rngs=nnx.Rngs(0))
    >>> pool(jnp.ones((3, 5, 6)), valid=jnp.arange(5) < 4).shape  # one vector without the padding
    (3, 1, 6)
    """

    @layer_init_signature
    def __init__(
        self,
        dim: int,
        num_heads: int,
        queries: int,
        *,
        bias: bool = True,
        **more: Unpack[LayerInitKeywords],
    ):
        check_positive(dim=dim, num_heads=num_heads, queries=queries)
        self.head_dim = check_divides("num_heads", num_heads, "dim", dim)
        init = LayerInit(**more)
        self.q_proj = init.linear(dim, dim, use_bias=bias)
        self.k_proj = init.linear(dim, dim, use_bias=bias)
        self.v_proj = init.linear(dim, dim, use_bias=bias)
        self.out_proj = init.linear(dim, dim, use_bias=bias)
        self.probe = init.param((queries, dim), nnx.initializers.normal(1.0))
        self.dropout = init.attention_dropout()

    def __call__(
        self,
        x: Float[Array, "*B S D"],
        *,
        valid: Bool[Array, "*#B S"] | Mask | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B Q D"]:
        """Pools the tokens of x.

        Args:
          x: the tokens.
          valid: which tokens are real. Padding is masked out.
          deterministic: overrides `train()` and `eval()`.
        """
        width = self.k_proj.in_features
        x, _, visible, _ = tokens(x, None, FULL, None, valid, (width, width))
        probe = self.probe[...].astype(x.dtype)  # Q D
        probe = for_each_row(probe, x)  # *B Q D
        q = split_heads(self.q_proj(probe), self.head_dim)  # *B Q N H
        k = split_heads(self.k_proj(x), self.head_dim)  # *B S N H
        v = split_heads(self.v_proj(x), self.head_dim)  # *B S N H
        drop = None if self.dropout is None else self.dropout(deterministic)
        return self.out_proj(merge_heads(attend(q, k, v, mask=visible, dropout=drop)))  # *B Q D
