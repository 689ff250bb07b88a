"""Shared helpers of layers: heads, projections and their initializers, softmax pooling."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Shaped

from .._internal.checks import valid_tokens
from .._internal.types import FROZEN, Sizes
from ..masks import Mask, as_mask
from ..reference import softmax
from ..taps import tap
from ..token_layouts import names_in, positions_of


def split_heads(x: Shaped[Array, "*B T D"], head_dim: int) -> Shaped[Array, "*B T N H"]:
    """`*B T (N H) -> *B T N H`: splits the model width D into N heads of width H.

    Args:
      x: any array whose last axis is D.
      head_dim: H, which must divide D.

    Raises:
      ValueError: if it does not.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    >>> split_heads(jnp.ones((2, 5, 12)), 4).shape
    (2, 5, 3, 4)
    """
    if head_dim < 1 or x.shape[-1] % head_dim:
        raise ValueError(
            f"head_dim must divide the width; got head_dim={head_dim}, width={x.shape[-1]}."
        )
    return x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)


def merge_heads(x: Shaped[Array, "*B T N H"]) -> Shaped[Array, "*B T D"]:
    """`*B T N H -> *B T (N H)`: concatenates the heads; inverse of `split_heads`. Raises nothing.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.2.

    >>> merge_heads(jnp.ones((2, 5, 3, 4))).shape
    (2, 5, 12)
    """
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def dot_general_sharded(
    x: Shaped[Array, "*B D"],
    kernel: Shaped[Array, "D E"],
    axes: Any,
    *,
    out_sharding: Any = None,
    **dot_general_kwargs: Any,
) -> Shaped[Array, "*B E"]:
    """`jax.lax.dot_general` that also accepts arrays sharded along the contracted axis.

    With Explicit mesh axes JAX requires an `out_sharding` then, as after the heads of a layer with
    tensor parallel weights. The output is sharded as the batch axes of x and the output axis of
    the kernel, and replicated along the contracted mesh axes. A kernel that is sharded over the
    mesh axes of the batch, as in FSDP, is gathered over them first.

    >>> dot_general_sharded(jnp.ones((2, 3)), jnp.ones((3, 4)), (((1,), (0,)), ((), ()))).shape
    (2, 4)
    """
    if any(jax.typeof(kernel).sharding.spec):
        kernel = _gathered_for(x, kernel)
    sharding = jax.typeof(kernel).sharding
    if out_sharding is None and sharding.spec[0] is not None:
        *batch, summed = jax.typeof(x).sharding.spec
        if summed == sharding.spec[0]:
            spec = jax.P(*batch, sharding.spec[1])
            out_sharding = jax.NamedSharding(sharding.mesh, spec)
    return jax.lax.dot_general(x, kernel, axes, out_sharding=out_sharding, **dot_general_kwargs)


contracted = dot_general_sharded  # old name, needed by pickles of the previous release


def _gathered_for(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Replicates `kernel` over the mesh axes that shard the batch axes of x."""
    mesh, spec = jax.typeof(kernel).sharding.mesh, jax.typeof(kernel).sharding.spec
    rows = {name for entry in jax.typeof(x).sharding.spec[:-1] for name in names_in(entry)}
    left = (tuple(name for name in names_in(entry) if name not in rows) for entry in spec)
    return jax.sharding.reshard(kernel, jax.NamedSharding(mesh, jax.P(*(x or None for x in left))))


def torch_uniform(fan_in: int) -> Any:
    """The initializer U(+-1 / sqrt(fan_in))."""
    bound = fan_in**-0.5

    def init(
        key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any
    ) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def as_module_data(value: Any) -> Any:
    """Returns `value`, wrapped in `nnx.data` if it is a frozen object that holds arrays.

    >>> from flax_attn import CAUSAL
    >>> as_module_data(CAUSAL) is CAUSAL
    True
    """
    return nnx.data(value) if type(value) in FROZEN and jax.tree.leaves(value) else value


def check_tokens(name: str, valid: Any, x: Float[Array, "*B T D"]) -> Bool[Array, "*B T"]:
    """Returns `valid` broadcast to `*B T`; None means that all tokens of `x` are valid.

    `Lengths` count tokens, which in a permuted layout are in other slots.

    Raises:
      TypeError: if `valid` is not boolean.
      ValueError: if it does not broadcast to `*B T`.

    >>> check_tokens("valid", None, jnp.ones((2, 3))).tolist()
    [True, True]
    """
    real = valid_tokens(name, valid, x.shape[:-1])
    at = positions_of(x, -2) if isinstance(valid, Mask) else None
    return real if at is None else real[..., at]


def visible_states(
    mask: Mask | Array, h: Float[Array, "*B S E"], s: Float[Array, "*B T F"]
) -> Bool[Array, "*B T S"]:
    """Boolean mask of the S states that each of the T queries may attend to; one head (N = 1).

    Raises:
      ValueError: if `h` and `s` have other batch axes, or the mask does not broadcast.

    >>> from flax_attn import Causal
    >>> visible_states(Causal(), jnp.ones((3, 4)), jnp.ones((2, 5))).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    if h.shape[:-2] != s.shape[:-2]:
        raise ValueError(f"h and s must share their batch axes; got h {h.shape}, s {s.shape}.")
    sizes = Sizes(h.shape[:-2], 1, s.shape[-2], h.shape[-2])
    visible = as_mask(mask).bind(sizes).grid(sizes)
    visible = jnp.broadcast_to(visible, (sizes.B, 1, sizes.T, sizes.S))
    return visible.reshape(*sizes.batch, sizes.T, sizes.S)


def zero_masked_states(
    h: Float[Array, "*B S E"], s: Float[Array, "*B T F"], visible: Bool[Array, "*B T S"]
) -> tuple[Float[Array, "*B S E"], Float[Array, "*B T F"]]:
    """Zeros fully masked states and queries, so that NaN in them cannot propagate."""
    h = jnp.where(visible.any(axis=-2)[..., None], h, 0)
    return h, jnp.where(visible.any(axis=-1)[..., None], s, 0)


def pool(
    logits: Float[Array, "*B T S"], h: Float[Array, "*B S E"], visible: Bool[Array, "*B T S"]
) -> Float[Array, "*B T E"]:
    """`softmax(logits where visible) . h`; a fully masked query gets zeros.

    >>> pool(jnp.zeros((1, 2)), jnp.asarray([[1.0], [3.0]]), jnp.ones((1, 2), bool)).tolist()
    [[2.0]]
    """
    scores = tap("scores", jnp.where(visible, logits, -jnp.inf))  # *B T S
    weights = tap("weights", softmax(scores))  # *B T S
    return tap("context", weights @ h.astype(weights.dtype))  # *B T E
