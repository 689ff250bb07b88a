"""Mamba 2: a state space model with one decay per head, or linear attention with decay."""

from collections.abc import Sequence
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from .._internal.arrays import aligned
from .._internal.checks import check_choice, check_divides, check_positive
from .._internal.types import wide
from ..norms import RMSNorm, rms_norm
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
    short_convolution,
    state_of,
)


class Mamba2(Recurrent):
    """`S_t = exp(-exp(A_log) dt_t) S_(t-1) + dt_t B_t x_t'`, `y_t = S_t' C_t + D x_t`.

    Also called: state space duality (SSD), state space model (SSM).

    `in_proj` gives a gate z, the values x, the keys B, the queries C and the steps dt. x, B and C
    pass a short causal convolution and silu; `dt = softplus(dt + dt_bias)`. The output is
    `out_proj(norm(y * silu(z)))`, normalised in groups of heads.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of heads, each with a state `key_dim value_dim`.
      key_dim: width of B and C, the state size in Mamba's configs.
      value_dim: width of a head's x.
      groups: number of B and C, each shared by num_heads / groups adjacent heads.
      conv_size: kernel size of the convolution, in tokens.
      conv_bias: whether the convolution has a bias.
      use_bias: whether the projections have one.
      out_bias: whether `out_proj` has one; None for use_bias.
      norm: whether the norm is applied "after" the gate or "before" it, as optional in Falcon-H1;
        None for no norm.
      eps: of the norm.
      step_limits: least and greatest dt; None for none.
      multipliers: factors of the input of `in_proj` and of its outputs z, x, B, C and dt
        (Falcon-H1); None for none.
      kernel_init, bias_init: initializers of projections and convolution; None for PyTorch's.
        `dt_bias`, `A_log` and `D` are initialized as in Mamba.
      chunk, rngs, dtype, param_dtype: as in `GatedDeltaAttention`.

    Raises:
      ValueError: for counts below 1, groups that do not divide num_heads, an unknown `norm`,
        limits that are not two numbers in order, or other than six multipliers.
      TypeError: in the call, if x is not floating.

    Source: Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality", 2024; names as in Mamba 2's published checkpoints.

    >>> layer = Mamba2(12, 6, 4, 5, groups=3, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 7, 12))
    >>> run = nnx.jit(Mamba2.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(7)[None] < jnp.asarray([[7], [3]])).shape  # padding behind
    (2, 7, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        use_bias: bool = False,
        out_bias: bool | None = None,
        norm: Literal["after", "before"] | None = "after",
        eps: float = 1e-5,
        step_limits: tuple[float, float] | None = None,
        multipliers: Sequence[float] | None = None,
        chunk: int = 64,
        **more: Unpack[InitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, groups=groups, chunk=chunk)
        check_positive(key_dim=key_dim, value_dim=value_dim, conv_size=conv_size)
        check_divides("groups", groups, "num_heads", num_heads)
        check_choice("norm", norm, "after", "before", None)
        init = InitWithoutDropout(**more)
        self.num_heads, self.key_dim, self.value_dim = num_heads, key_dim, value_dim
        self.groups, self.chunk, self.norm_comes_first = groups, chunk, norm == "before"
        width = num_heads * value_dim
        mixed = width + 2 * groups * key_dim
        self.step_limits, self.multipliers = _limits(step_limits), _multipliers(multipliers)
        self.in_proj = init.linear(in_features, width + mixed + num_heads, use_bias=use_bias)
        self.conv1d = short_convolution(mixed, conv_size, conv_bias, init)
        self.A_log, self.dt_bias = decay_parameters(num_heads, num_heads, init)
        self.D = nnx.Param(jnp.ones(num_heads, init.param_dtype))
        gains = None if norm is None else RMSNorm(width, eps=eps, param_dtype=init.param_dtype)
        self.norm = gains
        out_bias = use_bias if out_bias is None else out_bias
        self.out_proj = init.linear(width, in_features, use_bias=out_bias)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `out_proj`."""
        z, mixed, dt = self.projected(x)  # *B T E, *B T E, *B T N
        mixed, conv_state = tokens.convolved(self.conv1d, mixed)  # *B T E
        v, k, q = self.heads(mixed)  # *B T N h, *B T N H, *B T N H
        step = self.steps(dt)  # *B T N
        decay = -jnp.exp(aligned(self.A_log[...], step)) * step  # *B T N
        kwargs = {"chunk": self.chunk, **tokens.kwargs()}
        y, recurrent_state = linear_recurrence(q, k, v, log_decay=decay, beta=step, **kwargs)
        y = tap("context", y + aligned(self.D[...][:, None], y) * v)  # *B T N h
        return self.normed_and_gated(merge_heads(y), z), recurrent_state, conv_state

    def projected(
        self, x: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "*B T F"], Float[Array, "*B T N"]]:
        """The gate, the convolution's input and the steps, each times its multiplier."""
        width, shared = self.out_proj.in_features, self.groups * self.key_dim
        first, *rest = self.multipliers or (1.0,)
        y = self.in_proj(x * first if rest else x)
        if rest:
            sizes = (width, width, shared, shared, self.num_heads)
            y = y * aligned(jnp.asarray(np.repeat(rest, sizes)), y)
        z, mixed, dt = jnp.split(y, [width, 2 * width + 2 * shared], axis=-1)
        return z, mixed, dt

    def heads(
        self, mixed: Float[Array, "*B T E"]
    ) -> tuple[Float[Array, "*B T N h"], Float[Array, "*B T N H"], Float[Array, "*B T N H"]]:
        """x, B and C of each head."""
        width, each = self.out_proj.in_features, self.num_heads // self.groups
        active = nnx.silu(mixed)
        x, b, c = jnp.split(active, [width, width + self.groups * self.key_dim], axis=-1)
        b, c = (jnp.repeat(split_heads(a, self.key_dim), each, axis=-2) for a in (b, c))
        return split_heads(x, self.value_dim), b, c

    def steps(self, dt: Float[Array, "*B T N"]) -> Float[Array, "*B T N"]:
        """The time steps, in float32 or wider."""
        dt = dt.astype(wide(dt.dtype))
        dt = jax.nn.softplus(dt + aligned(self.dt_bias[...], dt))
        return dt if self.step_limits is None else jnp.clip(dt, *self.step_limits)

    def normed_and_gated(
        self, y: Float[Array, "*B T E"], z: Float[Array, "*B T E"]
    ) -> Float[Array, "*B T E"]:
        """y times `silu(z)`, normalised before or after it."""
        if self.norm_comes_first:
            return gated(self.normed(y), z)
        return gated(y, z) if self.norm is None else self.normed(gated(y, z))

    def normed(self, y: Float[Array, "*B T E"]) -> Float[Array, "*B T E"]:
        """Normalises y in groups of heads."""
        assert self.norm is not None and self.norm.scale is not None
        whole = y.astype(wide(y.dtype))
        parts = rms_norm(split_heads(whole, y.shape[-1] // self.groups), eps=self.norm.eps)
        return (merge_heads(parts) * aligned(self.norm.scale[...], whole)).astype(y.dtype)

    def state_shapes(self) -> tuple[Shape, Shape]:
        """As in `GatedDeltaAttention`."""
        return (self.num_heads, self.key_dim, self.value_dim), state_of(self.conv1d)


def _limits(limits: tuple[float, float] | None) -> tuple[float, float] | None:
    if limits is not None and (len(limits) != 2 or not limits[0] <= limits[1]):
        raise ValueError(
            f"step_limits must be the least and the greatest step, in order; got {limits!r}."
        )
    return None if limits is None else (limits[0], limits[1])


def _multipliers(multipliers: Sequence[float] | None) -> tuple[float, ...] | None:
    if multipliers is not None and len(multipliers) != 6:
        raise ValueError(
            "multipliers must be six numbers, of what enters in_proj and of z, x, B, C and dt; "
            f"got {multipliers!r}."
        )
    return None if multipliers is None else tuple(multipliers)
