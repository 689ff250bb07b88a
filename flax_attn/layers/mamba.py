"""Mamba: a selective state space model with a decay per component."""

import math
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from .._internal.arrays import aligned
from .._internal.checks import check_choice, check_positive
from .._internal.types import wide
from ..norms import RMSNorm
from ..recurrence import elementwise_recurrence
from ..taps import tap
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


class Mamba(Recurrent):
    """`h_t = exp(-exp(A_log) dt_t) h_(t-1) + dt_t x_t B_t'`, `y_t = h_t C_t + D x_t`.

    Also called: selective state space model (SSM), S6, selective scan.

    `in_proj` gives x and a gate z; x passes a short causal convolution and silu. `x_proj(x)` gives
    a low-rank dt, B and C, and `dt = softplus(dt_proj(dt) + dt_bias)` is a step per component.
    The output is `out_proj(y * silu(z))`. The states of all tokens are materialized, with
    `width state_dim` numbers each.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      width: width of x after `in_proj`; None for twice in_features.
      state_dim: width of B and C, the state size in Mamba's configs.
      step_rank: width of dt before `dt_proj`; None for in_features / 16, rounded up.
      conv_size: kernel size of the convolution, in tokens.
      conv_bias: whether the convolution has a bias.
      use_bias: whether `in_proj` and `out_proj` have one.
      norms: norms of dt, B and C after `x_proj`, with a scale "gains" (Jamba) or without "plain"
        (Falcon Mamba); None for no norms.
      eps: of those norms.
      kernel_init, bias_init: initializers of projections and convolution; None for PyTorch's.
        `dt_bias`, `A_log` and `D` are initialized as in Mamba.
      rngs, dtype, param_dtype: as in `GatedDeltaAttention`.

    Raises:
      ValueError: for counts below 1, or unknown norms.
      TypeError: in the call, if x is not floating.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023;
    names as in Mamba's published checkpoints, whose `dt_proj.bias` is `dt_bias` here.

    >>> layer = Mamba(12, state_dim=4, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 7, 12))
    >>> run = nnx.jit(Mamba.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(7)[None] < jnp.asarray([[7], [3]])).shape  # padding behind
    (2, 7, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    dt_layernorm: RMSNorm | None
    b_layernorm: RMSNorm | None
    c_layernorm: RMSNorm | None

    @init_signature
    def __init__(
        self,
        in_features: int,
        *,
        width: int | None = None,
        state_dim: int = 16,
        step_rank: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        use_bias: bool = False,
        norms: Literal["gains", "plain"] | None = None,
        eps: float = 1e-6,
        **more: Unpack[InitKeywords],
    ):
        size = 2 * in_features if width is None else width
        rank = math.ceil(in_features / 16) if step_rank is None else step_rank
        check_positive(in_features=in_features, width=size, step_rank=rank)
        check_positive(state_dim=state_dim, conv_size=conv_size)
        check_choice("norms", norms, "gains", "plain", None)
        init = InitWithoutDropout(**more)
        self.state_dim = state_dim
        self.in_proj = init.linear(in_features, 2 * size, use_bias=use_bias)
        self.conv1d = short_convolution(size, conv_size, conv_bias, init)
        self.x_proj = init.linear(size, rank + 2 * state_dim, use_bias=False)
        widths = {"dt": rank, "b": state_dim, "c": state_dim}
        for name, each in widths.items():
            features = each if norms == "gains" else None
            norm = RMSNorm(features, eps=eps, cast="before", param_dtype=init.param_dtype)
            setattr(self, f"{name}_layernorm", norm if norms else None)
        self.dt_proj = init.linear(rank, size, use_bias=False)
        self.dt_bias = decay_parameters(1, size, init)[1]
        decay = jnp.arange(1, state_dim + 1, dtype=init.param_dtype)
        self.A_log = nnx.Param(jnp.log(jnp.broadcast_to(decay, (size, state_dim))))
        self.D = nnx.Param(jnp.ones(size, init.param_dtype))
        self.out_proj = init.linear(size, in_features, use_bias=use_bias)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `out_proj`."""
        x, z = jnp.split(self.in_proj(x), 2, axis=-1)  # *B T E, *B T E
        x, conv_state = tokens.convolved(self.conv1d, x)
        x = nnx.silu(x)
        step, b, c = self.selected(x)  # *B T E, *B T N, *B T N
        kind = step.dtype
        log_decay = step[..., None] * -jnp.exp(aligned(self.A_log[...], step[..., None]))
        added = (step * x.astype(kind))[..., None] * b.astype(kind)[..., None, :]  # *B T E N
        kwargs = tokens.kwargs()
        kwargs["state"] = None if kwargs["state"] is None else _flat(kwargs["state"])
        h, recurrent_state = elementwise_recurrence(_flat(added), _flat(log_decay), **kwargs)
        h = h.reshape(added.shape)  # *B T E N
        y = jnp.einsum("...en,...n->...e", h, c.astype(kind))
        y = y + aligned(self.D[...], y) * x.astype(kind)  # *B T E
        y = tap("context", y.astype(x.dtype))
        return (
            gated(y, z),
            recurrent_state.reshape(*recurrent_state.shape[:-1], *added.shape[-2:]),
            conv_state,
        )

    def selected(
        self, x: Float[Array, "*B T E"]
    ) -> tuple[Float[Array, "*B T E"], Float[Array, "*B T N"], Float[Array, "*B T N"]]:
        """The steps, in float32 or wider, and B and C, which all depend on x."""
        rank = self.dt_proj.in_features
        parts = jnp.split(self.x_proj(x), [rank, rank + self.state_dim], axis=-1)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        dt, b, c = (x if norm is None else norm(x) for norm, x in zip(norms, parts, strict=True))
        dt = self.dt_proj(dt)
        dt = dt.astype(wide(dt.dtype))
        return jax.nn.softplus(dt + aligned(self.dt_bias[...], dt)), b, c

    def state_shapes(self) -> tuple[Shape, Shape]:
        """A matrix, and the past tokens of the convolution."""
        return (self.out_proj.in_features, self.state_dim), state_of(self.conv1d)


def _flat(x: Float[Array, "*X E N"]) -> Float[Array, "*X D"]:
    """Flattens the last two axes."""
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
