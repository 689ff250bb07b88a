"""Multi-head attention as in "Attention Is All You Need": self, cross, masked, any widths."""

from typing import Unpack

from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_input, check_positive
from ..attend import attend
from ..masks import FULL, Mask
from ._common import merge_heads, split_heads
from ._dropout import AttentionDropout
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer


class TransformerMultiHeadAttention(Layer):
    """`out_proj(attend(q_proj(query), k_proj(key), v_proj(value)))`, N heads of width D / N.

    Also called: multi-head attention (MHA), `nn.MultiheadAttention`.

    The same function as `torch.nn.MultiheadAttention(batch_first=True)`, whose packed or separate
    weights `port` copies, with three differences: True in a mask means "may attend"
    (`mask=CAUSAL`, `mask=Lengths(n)` or `mask=~blocked`); a fully masked query gives zeros
    before out_proj, where torch gives NaN; `taps.listen()` records the weights of each head before
    dropout, where torch returns their mean after it.

    Shapes: query `*B T embed_dim`, key `*B S kdim`, value `*B S vdim` -> `*B T embed_dim`.

    Args:
      embed_dim: width of queries and output.
      num_heads: number of heads; must divide embed_dim.
      dropout: dropout rate of the weights in training, from 0 to 1.
      bias: whether the four projections have biases.
      kdim: width of keys; None for embed_dim.
      vdim: width of values; None for embed_dim.
      kernel_init, bias_init, rngs, dtype, param_dtype: as in `CausalAttention`.

    Raises:
      ValueError: for counts below 1, heads that do not divide embed_dim, a rate outside [0, 1], or
        inputs and masks of other shapes.
      TypeError: for inputs that are not floating and masks that are not boolean.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    >>> from flax import nnx
    >>> import jax.numpy as jnp
    >>> from flax_attn import CAUSAL, Lengths
    >>> layer = TransformerMultiHeadAttention(8, 2, rngs=nnx.Rngs(0))
    >>> x, memory = jnp.ones((3, 5, 8)), jnp.ones((3, 7, 8))
    >>> layer(x, mask=CAUSAL).shape  # self attention
    (3, 5, 8)
    >>> layer(x, memory, mask=Lengths(jnp.asarray([7, 7, 4]))).shape  # padding behind the memory
    (3, 5, 8)
    """

    @init_signature
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        **more: Unpack[InitKeywords],
    ):
        kdim, vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        check_positive(embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        self.head_dim = check_divides("num_heads", num_heads, "embed_dim", embed_dim)
        init = InitWithoutDropout(**more)
        self.q_proj = init.linear(embed_dim, embed_dim, use_bias=bias)
        self.k_proj = init.linear(kdim, embed_dim, use_bias=bias)
        self.v_proj = init.linear(vdim, embed_dim, use_bias=bias)
        self.out_proj = init.linear(embed_dim, embed_dim, use_bias=bias)
        self.dropout = AttentionDropout(dropout, rngs=init.rngs)

    def __call__(
        self,
        query: Float[Array, "*B T D"],
        key: Float[Array, "*B S kdim"] | None = None,
        value: Float[Array, "*B S vdim"] | None = None,
        *,
        mask: Mask | Array = FULL,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of query over key and value; key is query, and value is key, unless given."""
        key = query if key is None else key
        query = check_input("query", query, self.q_proj.in_features)
        value = check_input("value", key if value is None else value, self.v_proj.in_features)
        key = check_input("key", key, self.k_proj.in_features)
        q = split_heads(self.q_proj(query), self.head_dim)  # *B T N H
        k = split_heads(self.k_proj(key), self.head_dim)  # *B S N H
        v = split_heads(self.v_proj(value), self.head_dim)  # *B S N H
        o = attend(q, k, v, mask=mask, dropout=self.dropout(deterministic))  # *B T N H
        return self.out_proj(merge_heads(o))  # *B T D
