"""The gated delta rule: a decaying state with error-correcting updates."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_divides, check_positive
from .._internal.types import wide
from ..norms import RMSNorm, l2_norm
from ..recurrence import linear_recurrence
from ..taps import tap
from ._common import merge_heads, split_heads
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._recurrent import (
    Recurred,
    Recurrent,
    Shape,
    Tokens,
    decay_parameters,
    gated,
    log_decay,
    short_convolution,
    state_of,
)


class GatedDeltaAttention(Recurrent):
    """`S_t = a_t (I - b_t k_t k_t') S_(t-1) + b_t k_t v_t'`, read by `q_t`, normed and gated.

    Also called: Gated DeltaNet (GDN), DeltaNet with a decay, gated delta rule.

    q, k and v pass a short causal convolution and silu; q and k have unit length. The decay is
    `a_t = exp(-exp(A_log) softplus(a_proj(x_t) + dt_bias))`, beta `b_t = sigmoid(b_proj(
    x_t))`, and the output `o_proj(o_norm(S_t' q_t / sqrt(H)) * silu(g_proj(x_t)))`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of value heads, each with a state `key_dim value_dim`.
      key_dim, value_dim: width of a query or key, and of a value.
      num_key_heads: number of query and key heads, each shared by num_heads / num_key_heads
        adjacent value heads; None for num_heads.
      conv_size: kernel size of the convolution, in tokens.
      negative: whether beta is doubled, which allows negative eigenvalues (OLMo hybrid).
      eps: of `o_norm`.
      chunk: tokens per chunk, see `linear_recurrence`; it has no effect on results.
      kernel_init: initializer of projections and convolution; None for PyTorch's.
      bias_init: accepted by every layer; the only bias is `dt_bias`, initialized as in Mamba.
      rngs: source of the initial values.
      dtype: of the projections; None promotes x and the weights. The recurrence runs in float32 or
        wider.
      param_dtype: of the weights.

    Raises:
      ValueError: for counts below 1, or if num_key_heads does not divide num_heads.
      TypeError: in the call, if x is not floating.

    Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024; names as in
    OLMo hybrid's published checkpoints. Qwen3-Next fuses projections head by head.

    >>> layer = GatedDeltaAttention(12, 6, 4, 5, num_key_heads=3, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 7, 12))
    >>> run = nnx.jit(GatedDeltaAttention.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(7)[None] < jnp.asarray([[7], [3]])).shape  # padding behind
    (2, 7, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    last = "o_proj"

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        num_key_heads: int | None = None,
        conv_size: int = 4,
        negative: bool = False,
        eps: float = 1e-6,
        chunk: int = 64,
        **more: Unpack[InitKeywords],
    ):
        keys = num_heads if num_key_heads is None else num_key_heads
        check_positive(in_features=in_features, num_heads=num_heads, num_key_heads=keys)
        check_positive(key_dim=key_dim, value_dim=value_dim, conv_size=conv_size, chunk=chunk)
        check_divides("num_key_heads", keys, "num_heads", num_heads)
        init = InitWithoutDropout(**more)
        self.key_dim, self.value_dim = key_dim, value_dim
        self.num_heads, self.num_key_heads = num_heads, keys
        self.negative, self.chunk = negative, chunk
        self.q_proj = init.linear(in_features, keys * key_dim, use_bias=False)
        self.k_proj = init.linear(in_features, keys * key_dim, use_bias=False)
        self.v_proj = init.linear(in_features, num_heads * value_dim, use_bias=False)
        self.a_proj = init.linear(in_features, num_heads, use_bias=False)
        self.b_proj = init.linear(in_features, num_heads, use_bias=False)
        self.g_proj = init.linear(in_features, num_heads * value_dim, use_bias=False)
        self.o_proj = init.linear(num_heads * value_dim, in_features, use_bias=False)
        width = 2 * keys * key_dim + num_heads * value_dim
        self.conv1d = short_convolution(width, conv_size, False, init)
        self.A_log, self.dt_bias = decay_parameters(num_heads, num_heads, init)
        self.o_norm = RMSNorm(value_dim, eps=eps, cast="before", param_dtype=init.param_dtype)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `o_proj`."""
        qkv = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        qkv, conv_state = tokens.convolved(self.conv1d, qkv)  # *B T E
        q, k, v = self.heads(qkv)  # *B T N H, *B T N H, *B T N h
        g, beta = self.gates(x)  # *B T N
        kwargs = {"chunk": self.chunk, **tokens.kwargs()}
        o, recurrent_state = linear_recurrence(
            q, k, v, log_decay=g, beta=beta, delta=True, **kwargs
        )
        gate = split_heads(self.g_proj(x), self.value_dim)  # *B T N h
        o = gated(self.o_norm(tap("context", o)), gate)  # *B T N h
        return merge_heads(o), recurrent_state, conv_state

    def heads(
        self, qkv: Float[Array, "*B T E"]
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T N H"], Float[Array, "*B T N h"]]:
        """Queries and keys of unit length, repeated for each value head, and values."""
        width, each = self.num_key_heads * self.key_dim, self.num_heads // self.num_key_heads
        active = nnx.silu(qkv.astype(wide(qkv.dtype)))
        q, k, v = jnp.split(active, [width, 2 * width], axis=-1)
        q, k = (l2_norm(split_heads(x, self.key_dim), eps=1e-6) for x in (q, k))
        q, k = (jnp.repeat(x, each, axis=-2) for x in (q * self.key_dim**-0.5, k))
        return q, k, split_heads(v.astype(qkv.dtype), self.value_dim)

    def gates(
        self, x: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T N"], Float[Array, "*B T N"]]:
        """The logarithm of the decay, and beta, in float32 or wider."""
        a, b = self.a_proj(x), self.b_proj(x)
        beta = nnx.sigmoid(b.astype(wide(b.dtype))) * (2 if self.negative else 1)
        return log_decay(a, self.A_log[...], self.dt_bias[...]), beta

    def state_shapes(self) -> tuple[Shape, Shape]:
        """A matrix for each head, and the past tokens of the convolution."""
        return (self.num_heads, self.key_dim, self.value_dim), state_of(self.conv1d)
