"""Lightning attention: linear attention with a decay that is fixed for each head."""

from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_positive
from .._internal.types import wide
from ..norms import RMSNorm
from ..recurrence import linear_recurrence
from ..taps import tap
from ._common import merge_heads, split_heads
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._recurrent import Recurred, Recurrent, Shape, Tokens, gated


class LightningAttention(Recurrent):
    """`S_t = exp(-slope) S_(t-1) + k_t v_t'`, `y = out_proj(norm(S_t' q_t) * sigmoid(gate))`.

    Also called: linear attention with decay, Lightning Attention-2, MiniMax attention.

    q, k and v pass silu; nothing is scaled. Head n of N, counted from 1, has `slope = slope_factor
    2^(-8 n / N)`, and one norm goes over all heads of a token.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of heads, each with a state `key_dim value_dim`.
      key_dim, value_dim: width of a query or key, and of a value.
      slope_factor: factor of all slopes, at least 0. In MiniMax `1 - i / (L - 1 + 1e-5) + 1e-5` for
        layer i of L, so that later layers decay more slowly.
      eps: of the norm.
      kernel_init: initializer of the projections; None for PyTorch's.
      bias_init: accepted by every layer; there is no bias.
      rngs: source of the initial values, torch's U(+-1 / sqrt(width in)).
      chunk, dtype, param_dtype: as in `GatedDeltaAttention`.

    Raises:
      ValueError: for counts below 1, or a slope_factor below 0.
      TypeError: in the call, if x is not floating.

    Source: Qin et al., "Various Lengths, Constant Speed: Efficient Language Modeling with Lightning
    Attention", 2024; MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention",
    2025, whose published checkpoints interleave q, k and v by head.

    >>> layer = LightningAttention(12, 3, 4, 5, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((2, 7, 12))).shape
    (2, 7, 12)
    """

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        slope_factor: float = 1.0,
        eps: float = 1e-6,
        chunk: int = 64,
        **more: Unpack[InitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, chunk=chunk)
        check_positive(key_dim=key_dim, value_dim=value_dim)
        if not 0 <= slope_factor < float("inf"):
            raise ValueError(f"slope_factor must be a number of at least 0; got {slope_factor!r}.")
        init = InitWithoutDropout(**more)
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.slope_factor, self.chunk = slope_factor, chunk
        self.q_proj = init.linear(in_features, num_heads * key_dim, use_bias=False)
        self.k_proj = init.linear(in_features, num_heads * key_dim, use_bias=False)
        self.v_proj = init.linear(in_features, num_heads * value_dim, use_bias=False)
        self.output_gate = init.linear(in_features, num_heads * value_dim, use_bias=False)
        self.norm = RMSNorm(
            num_heads * value_dim, eps=eps, cast="before", param_dtype=init.param_dtype
        )
        self.out_proj = init.linear(num_heads * value_dim, in_features, use_bias=False)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `out_proj`."""
        q = split_heads(nnx.silu(self.q_proj(x)), self.key_dim)  # *B T N H
        k = split_heads(nnx.silu(self.k_proj(x)), self.key_dim)  # *B T N H
        v = split_heads(nnx.silu(self.v_proj(x)), self.value_dim)  # *B T N h
        decay = jnp.broadcast_to(-self.slopes(wide(v.dtype)), v.shape[:-1])  # *B T N
        o, recurrent_state = linear_recurrence(
            q, k, v, log_decay=decay, chunk=self.chunk, **tokens.kwargs()
        )
        o = self.norm(merge_heads(tap("context", o)))  # *B T (N h)
        return gated(o, self.output_gate(x), nnx.sigmoid), recurrent_state, None

    def slopes(self, dtype: Any) -> Float[Array, " N"]:
        """Decrease of the log of each head's state per token."""
        heads = np.arange(1, self.num_heads + 1)
        return jnp.asarray(self.slope_factor * 2.0 ** (-8 * heads / self.num_heads), dtype)

    def state_shapes(self) -> tuple[Shape, Shape]:
        """A matrix for each head; there is no convolution."""
        return (self.num_heads, self.key_dim, self.value_dim), None
