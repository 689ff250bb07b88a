"""Flax's `dot_product_attention` on `attend`: an `attention_fn=` for its modules."""

import contextlib
from collections.abc import Callable
from typing import Any
from warnings import warn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype as promote_by_flax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._internal.checks import check_rate
from .._internal.types import Sizes, wide
from ..attend import attend, attention_weights
from ..dropout import DropoutMask
from ..masks import CAUSAL, FULL, Dense, Mask
from ..masks.algebra import check_array
from ..rules import sizes_of
from ..scores import IDENTITY, Additive, Score


def flax_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K h"],
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    promote_dtype: Callable[..., Any] = promote_by_flax,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
) -> Float[Array, "*B T N h"]:
    """`dropout(softmax(q.k / sqrt(H) + bias, where masked)) . v`: flax's function, on `attend`.

    Pass it to `flax.nnx.MultiHeadAttention`, `flax.linen.MultiHeadDotProductAttention` or
    `flax.linen.MultiHeadAttention` as `attention_fn=flax_attention`; weights, caches and calls stay
    as they are. The arguments are those of flax's two functions of the name
    `dot_product_attention`; in flax 0.12 the first twelve are shared and the others are passed by
    keyword.

    Args:
      query: `*B T N H`; any number of batch axes, none included.
      key: `*B S K H`; K must divide N.
      value: `*B S K h`; h may differ from H.
      bias: added to the scaled logits; broadcasts to `*B N T S`; differentiable.
      mask: broadcasts to `*B N T S`; boolean or numeric; nonzero means "may attend", as from
        `make_attention_mask`. Pass an additive mask (0 and -inf) as `bias`.
      broadcast_dropout: whether all batch entries and heads share one dropout mask of shape `T S`.
      dropout_rng: a random key; the dropout mask equals flax's own, bit for bit.
      dropout_rate: dropout rate of the weights, from 0 to 1.
      deterministic: whether dropout is off.
      dtype: of the arithmetic and the output; None promotes query, key and value.
      precision: of both products, instead of `jax.default_matmul_precision`: one `jax.lax`
        precision, its name, or the name of a `jax.lax.DotAlgorithmPreset`.
      module: the flax module whose `sow` receives the weights before dropout, `*B N T S`, as
        "attention_weights" among its intermediates; the outputs do not change.
      is_causal: whether query t attends only to keys up to t, in addition to the mask. A single
        query beside several keys then sees key 0 alone, of which a warning tells.
      promote_dtype: nnx's `promote_dtype((query, key, value), dtype=dtype)`.
      force_fp32_for_softmax: whether output and sown weights are float32 where dtype is narrower;
        the softmax is taken in float32 or wider in either case.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: custom products; no
        backend supports them, so they raise an error.

    Returns:
      The output, `*B T N h` in `dtype`.

    Raises:
      ValueError: for ranks, sizes or a precision that do not fit, a rate outside [0, 1], a dtype
        that is not inexact, a dropout without a key.
      TypeError: for complex arrays, a flag that is not boolean, a mask or bias that is not numeric,
        a module that cannot sow.
      NotImplementedError: for custom products or two different precisions.

    Where the results differ from flax's on purpose:

    * A fully masked query returns zeros and weights of zero; flax returns the mean of v.
    * NaN at masked positions never reaches outputs or gradients; in flax 0 * NaN does.
    * A rate of 1 drops everything and gives zeros; flax divides by 0 and gives NaN.
    * `force_fp32_for_softmax` leaves float64 as it is; flax rounds its weights to float32.
    * Complex arrays and custom einsums, which Linen accepts, raise an error.
    * Without `force_fp32_for_softmax` flax takes the softmax of bfloat16 and float16 in that dtype;
      here it is taken in float32, so results differ in their last bits. nnx without dropout and
      sowing takes it in float32 even in float64, and ignores `precision`; here float64 stays
      float64 and `precision` reaches both products.

    Source: `dot_product_attention` of flax.nnx and flax.linen, flax 0.12.

    >>> from flax import linen, nnx
    >>> from flax_attn import flax_attention
    >>> from flax_attn.parity.judge import allclose
    >>> reference = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    >>> options = {"decode": False, "attention_fn": flax_attention}
    >>> layer = nnx.MultiHeadAttention(2, 8, **options, rngs=nnx.Rngs(0))
    >>> x = nnx.Rngs(1).normal((3, 5, 8))
    >>> mask = nnx.make_causal_mask(x[..., 0])
    >>> allclose(layer(x, mask=mask), reference(x, mask=mask))
    True
    >>> layer = linen.MultiHeadDotProductAttention(2, attention_fn=flax_attention)
    >>> layer.init_with_output({"params": nnx.Rngs(0).params()}, x)[0].shape
    (3, 5, 8)
    """
    _check_flags(deterministic=deterministic, broadcast_dropout=broadcast_dropout)
    _check_flags(is_causal=is_causal, force_fp32_for_softmax=force_fp32_for_softmax)
    _refuse(
        einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    check_rate("dropout_rate", dropout_rate)
    q, k, v = promote_dtype((query, key, value), dtype=dtype)
    sizes = _sizes(q, k, v)
    rules = {"mask": _mask(mask, is_causal, sizes), "score": _score(bias, q.dtype)}
    drop = None if deterministic else _dropout(dropout_rate, dropout_rng, broadcast_dropout, sizes)
    kind = wide(q.dtype) if force_fp32_for_softmax else q.dtype
    with _precision(precision):
        if module is not None:
            _sow(module, attention_weights(q, k, **rules).astype(kind))
        return attend(q, k, v, **rules, dropout=drop).astype(kind)  # *B T N h


def _sizes(q: jax.Array, k: jax.Array, v: jax.Array) -> Sizes:
    if min(q.ndim, k.ndim, v.ndim) < 3:
        raise ValueError(
            "query, key and value need at least the axes (length, heads, width); "
            f"got query {q.shape}, key {k.shape}, value {v.shape}."
        )
    return sizes_of(q, k)


def _mask(mask: Any, is_causal: bool, sizes: Sizes) -> Mask:
    if is_causal and sizes.T == 1 < sizes.S:
        warn(
            f"is_causal=True with one query and {sizes.S} keys shows it key 0 alone, as in flax. "
            "In decoding the cache's mask hides what is not stored yet: leave is_causal out.",
            stacklevel=3,
        )
    if mask is None:
        return CAUSAL if is_causal else FULL
    check_array("mask", mask)
    mask = jnp.asarray(mask)
    if not any(jnp.issubdtype(mask.dtype, kind) for kind in (bool, jnp.integer, jnp.floating)):
        raise TypeError(
            f"mask must be boolean, or non-zero where a query may attend; got {mask.dtype}."
        )
    boolean_mask = Dense(mask.astype(bool))
    return CAUSAL & boolean_mask if is_causal else boolean_mask


def _score(bias: Any, dtype: Any) -> Score:
    if bias is None:
        return IDENTITY
    bias = jnp.asarray(bias)
    if bias.dtype == bool:
        raise TypeError(
            "bias must be floating, since it is added to the logits; got bool, which is a mask: "
            "pass mask=."
        )
    whole = jnp.issubdtype(bias.dtype, jnp.integer)
    return Additive(bias.astype(wide(dtype)) if whole else bias)


def _dropout(rate: Any, key: Any, broadcast: bool, sizes: Sizes) -> DropoutMask | None:
    """Flax's dropout mask, drawn as in flax."""
    if rate == 0:
        return None
    if key is None:
        raise ValueError(
            f"dropout_rate={rate} needs a dropout_rng, a jax.random.key(seed); got None. "
            "Pass deterministic=True to drop nothing."
        )
    batch = (1,) * (len(sizes.batch) + 1) if broadcast else (*sizes.batch, sizes.N)
    return DropoutMask(
        jax.random.bernoulli(key, 1.0 - rate, (*batch, sizes.T, sizes.S)), float(rate)
    )


def _sow(module: Any, weights: Float[Array, "*B N T S"]) -> None:
    from flax import linen  # late, since nnx's users need none of it

    if isinstance(module, nnx.Module):
        module.sow(nnx.Intermediate, "attention_weights", weights)
    elif isinstance(module, linen.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        raise TypeError(
            "module must be the flax.nnx or flax.linen module that sows the attention weights; "
            f"got {type(module).__name__}."
        )


def _precision(precision: Any) -> contextlib.AbstractContextManager[Any]:
    """Context manager that sets the precision of all products; None changes nothing."""
    if precision is None:
        return contextlib.nullcontext()
    if isinstance(precision, tuple | list):
        names = [_name_of(one) for one in precision]
        if len(names) != 2 or names[0] != names[1]:
            raise NotImplementedError(
                "precision must be one for both operands, since attend sets one for all products; "
                f"got {precision!r}."
            )
        return jax.default_matmul_precision(names[0])
    return jax.default_matmul_precision(_name_of(precision))


def _name_of(precision: Any) -> str:
    """The name of this precision in `jax.default_matmul_precision`."""
    presets = jax.lax.DotAlgorithmPreset.__members__
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str) and precision in presets and precision != "DEFAULT":
        return precision
    try:
        return jax.lax.Precision(precision).name.lower()
    except ValueError:
        raise ValueError(
            "precision must be None, a jax.lax.Precision, its name, or a "
            f"jax.lax.DotAlgorithmPreset; got {precision!r}."
        ) from None


def _refuse(einsum_dot_general: Any, **einsums: Any) -> None:
    """Raises NotImplementedError for custom products, which no backend supports."""
    names = [name for name, einsum in einsums.items() if einsum is not None]
    if einsum_dot_general not in (None, jax.lax.dot_general):
        names.append("einsum_dot_general")
    if names:
        raise NotImplementedError(
            "flax_attention takes its products by attend's backends and cannot serve "
            f"{' and '.join(names)}. Leave them out, or keep flax's own attention_fn."
        )


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name} must be True or False; got {flag!r}.")
