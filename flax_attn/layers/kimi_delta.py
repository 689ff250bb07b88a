"""Kimi's delta attention: the gated delta rule with a decay per channel."""

from typing import Unpack

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.checks import check_positive
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


class KimiDeltaAttention(Recurrent):
    """`S_t = (I - b_t k_t k_t') diag(a_t) S_(t-1) + b_t k_t v_t'`, read by `q_t`, normed and gated.

    Also called: Kimi Delta Attention (KDA), Kimi Linear.

    q, k and v pass one short causal convolution and silu; q and k have unit length. The decay of
    each channel of k is `a_t = exp(-exp(A_log) softplus(f_b_proj(f_a_proj(x_t)) + dt_bias))`, the
    beta is `b_t = sigmoid(b_proj(x_t))`, and the output `o_proj(o_norm(S_t' q_t / sqrt(H)) *
    sigmoid(g_b_proj(g_a_proj(x_t))))`.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of heads, each with a state `key_dim value_dim`.
      key_dim, value_dim: width of a query or key, and of a value. The two projections of decays
        and gates have `value_dim` hidden components.
      conv_size, eps, chunk, kernel_init, bias_init, rngs, dtype, param_dtype: as in
        `GatedDeltaAttention`.

    Raises:
      ValueError: for counts below 1.
      TypeError: in the call, if x is not floating.

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.

    >>> layer = KimiDeltaAttention(12, 3, 4, 5, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 7, 12))
    >>> run = nnx.jit(KimiDeltaAttention.__call__)  # layer(x), compiled
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
        conv_size: int = 4,
        eps: float = 1e-5,
        chunk: int = 64,
        **more: Unpack[InitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, conv_size=conv_size)
        check_positive(key_dim=key_dim, value_dim=value_dim, chunk=chunk)
        init = InitWithoutDropout(**more)
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.chunk = chunk
        keys, values = num_heads * key_dim, num_heads * value_dim
        self.q_proj = init.linear(in_features, keys, use_bias=False)
        self.k_proj = init.linear(in_features, keys, use_bias=False)
        self.v_proj = init.linear(in_features, values, use_bias=False)
        self.conv1d = short_convolution(2 * keys + values, conv_size, False, init)
        self.f_a_proj = init.linear(in_features, value_dim, use_bias=False)
        self.f_b_proj = init.linear(value_dim, keys, use_bias=False)
        self.A_log, self.dt_bias = decay_parameters(num_heads, keys, init)
        self.b_proj = init.linear(in_features, num_heads, use_bias=False)
        self.g_a_proj = init.linear(in_features, value_dim, use_bias=False)
        self.g_b_proj = init.linear(value_dim, values, use_bias=False)
        self.o_norm = RMSNorm(value_dim, eps=eps, param_dtype=init.param_dtype)
        self.o_proj = init.linear(values, in_features, use_bias=False)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `o_proj`."""
        qkv = jnp.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        qkv, conv_state = tokens.convolved(self.conv1d, qkv)  # *B T E
        q, k, v = self.heads(qkv)  # *B T N H, *B T N H, *B T N h
        b = self.b_proj(x)  # *B T N
        kwargs = {
            "beta": nnx.sigmoid(b.astype(wide(b.dtype))),
            "chunk": self.chunk,
            **tokens.kwargs(),
        }
        o, recurrent_state = linear_recurrence(
            q, k, v, log_decay=self.log_decay(x), delta=True, **kwargs
        )
        gate = split_heads(self.g_b_proj(self.g_a_proj(x)), self.value_dim)  # *B T N h
        o = gated(self.o_norm(tap("context", o)), gate, nnx.sigmoid)  # *B T N h
        return merge_heads(o), recurrent_state, conv_state

    def heads(
        self, qkv: Float[Array, "*B T E"]
    ) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T N H"], Float[Array, "*B T N h"]]:
        """Queries and keys of unit length, and values."""
        width = self.num_heads * self.key_dim
        active = nnx.silu(qkv.astype(wide(qkv.dtype)))
        q, k, v = jnp.split(active, [width, 2 * width], axis=-1)
        q, k = (l2_norm(split_heads(x, self.key_dim), eps=1e-6) for x in (q, k))
        return q * self.key_dim**-0.5, k, split_heads(v.astype(qkv.dtype), self.value_dim)

    def log_decay(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T N H"]:
        """The logarithm of each channel's decay, in float32 or wider."""
        f = split_heads(self.f_b_proj(self.f_a_proj(x)), self.key_dim)  # *B T N H
        bias = self.dt_bias[...].reshape(self.num_heads, self.key_dim)  # N H
        return log_decay(f, self.A_log[...][:, None], bias)

    def state_shapes(self) -> tuple[Shape, Shape]:
        """As in `GatedDeltaAttention`."""
        return (self.num_heads, self.key_dim, self.value_dim), state_of(self.conv1d)
