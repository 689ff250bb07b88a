"""Griffin's recurrent block with its real-gated linear recurrent unit."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import aligned
from .._internal.checks import check_divides, check_positive
from .._internal.types import wide
from ..cache import State
from ..masks import Mask
from ..recurrence import elementwise_recurrence
from ..recurrence.documents import begins, check_segments
from ..taps import tap
from ._common import check_tokens, merge_heads, split_heads, torch_uniform
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._recurrent import Recurred, Recurrent, Shape, Tokens, short_convolution, state_of

SHARPNESS = 8.0
STEEPEST = 1000.0  # upper bound of the square root's derivative


class RGLRU(Recurrent):
    """`h_t = a_t h_(t-1) + sqrt(1 - a_t^2) i_t x'_t`, `y = linear_out(h * gelu(linear_y(x)))`.

    Also called: real-gated linear recurrent unit (RG-LRU), Griffin and Hawk's recurrent block.

    x' is `linear_x(x)` after a causal convolution, `a = exp(-8 r softplus(recurrent_param))`,
    and the gates r and i are sigmoids of block-diagonal projections of x' by
    `recurrent_gate_weight` and `input_gate_weight`. At the first token of a document the factor
    `sqrt(1 - a^2)` is omitted.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of blocks of the gates.
      width: width of the recurrence; None for in_features.
      conv_size: kernel size of the convolution, in tokens; it has a bias.
      kernel_init, bias_init: initializers of projections, gates and convolution; None
        for PyTorch's.
      rngs: source of the initial values. `a` starts in [0.9, 0.999] for r = 1.
      dtype, param_dtype: as in `GatedDeltaAttention`.

    Raises:
      ValueError: for counts below 1, or if num_heads does not divide the width.
      TypeError: in the call, if x is not floating.

    Source: De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models", 2024; names as in RecurrentGemma's published checkpoints.

    >>> layer = RGLRU(12, 3, rngs=nnx.Rngs(0))
    >>> x = jnp.ones((2, 7, 12))
    >>> run = nnx.jit(RGLRU.__call__)  # layer(x), compiled
    >>> run(layer, x, valid=jnp.arange(7)[None] < jnp.asarray([[7], [3]])).shape  # padding behind
    (2, 7, 12)
    >>> y, cache = run(layer, x, cache=layer.init_cache(2, length=8))  # a prompt
    >>> run(layer, x[:, :1], cache=cache)[0].shape  # then token by token
    (2, 1, 12)
    """

    last = "linear_out"
    input_gate_weight: nnx.Param
    input_gate_bias: nnx.Param
    recurrent_gate_weight: nnx.Param
    recurrent_gate_bias: nnx.Param

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        width: int | None = None,
        conv_size: int = 4,
        **more: Unpack[InitKeywords],
    ):
        size = in_features if width is None else width
        check_positive(in_features=in_features, num_heads=num_heads, width=size)
        check_positive(conv_size=conv_size)
        block = check_divides("num_heads", num_heads, "width", size)
        init = InitWithoutDropout(**more)
        self.linear_y = init.linear(in_features, size)
        self.linear_x = init.linear(in_features, size)
        self.conv_1d = short_convolution(size, conv_size, True, init)
        for gate in ("input_gate", "recurrent_gate"):
            start, shape = torch_uniform(block), (num_heads, block)
            setattr(self, f"{gate}_weight", init.param((*shape, block), start))
            setattr(self, f"{gate}_bias", init.param(shape, start, is_bias=True))
        a = jax.random.uniform(init.rngs.params(), (size,), init.param_dtype, 0.9, 0.999)
        self.recurrent_param = nnx.Param(jnp.log(jnp.expm1(-jnp.log(a) / SHARPNESS)))
        self.linear_out = init.linear(size, in_features)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """The equation above, up to `linear_out`."""
        z, conv_state = tokens.convolved(self.conv_1d, self.linear_x(x))  # *B T W
        log_a, gated = self.gates(z)  # *B T W, in float32 or wider
        size = root(-jnp.expm1(2 * log_a))
        first = first_tokens(x, *tokens)[..., None]  # *B T 1
        h, recurrent_state = elementwise_recurrence(
            gated * jnp.where(first, 1, size), log_a, **tokens.kwargs()
        )
        return (
            tap("context", h.astype(z.dtype)) * nnx.gelu(self.linear_y(x)),
            recurrent_state,
            conv_state,
        )

    def gates(self, z: Float[Array, "*B T W"]) -> tuple[Float[Array, "*B T W"], ...]:
        """The logarithm of the decay, and the components times their input gate."""
        blocks = split_heads(z.astype(wide(z.dtype)), self.input_gate_bias.shape[-1])  # *B T N w

        def gate(name: str) -> jax.Array:
            weight = getattr(self, f"{name}_weight")[...].astype(blocks.dtype)
            bias = aligned(getattr(self, f"{name}_bias")[...], blocks)
            return merge_heads(nnx.sigmoid(jnp.einsum("...nw,nwv->...nv", blocks, weight) + bias))

        rate = jax.nn.softplus(aligned(self.recurrent_param[...], merge_heads(blocks)))
        return -SHARPNESS * gate("recurrent_gate") * rate, merge_heads(blocks) * gate("input_gate")

    def state_shapes(self) -> tuple[Shape, Shape]:
        """A vector, and the past tokens of the convolution."""
        return (self.conv_1d.out_features,), state_of(self.conv_1d)


def first_tokens(
    x: Float[Array, "*B T D"],
    segments: Int[Array, "*#B T"] | None,
    valid: Bool[Array, "*#B T"] | Mask | None,
    cache: State | None,
) -> Bool[Array, "*B T"]:
    """True for the first token of each document, and of each row without cached tokens.

    >>> first_tokens(jnp.ones((3, 1)), jnp.asarray([5, 5, 2]), None, None).tolist()
    [True, False, True]
    """
    is_valid = check_tokens("valid", valid, x)
    first = is_valid & (jnp.cumsum(is_valid, axis=-1, dtype=jnp.int32) == 1)
    if cache is not None:
        first = first & (cache.length == 0)[..., None]
    if segments is not None:
        first = first | begins(check_segments(segments, x.shape[:-1]), is_valid)
    return first


@jax.custom_jvp
def root(x: Float[Array, "*X"]) -> Float[Array, "*X"]:
    """Square root with a derivative of at most 1000, so that gradients at zero are finite.

    >>> round(float(jax.grad(root)(0.0)))
    1000
    """
    return jnp.sqrt(x)


@root.defjvp
def _slope(primals: Any, tangents: Any) -> Any:
    x, dx = primals[0], tangents[0]
    return root(x), dx / jnp.sqrt(jnp.maximum(4 * x, STEEPEST**-2))
