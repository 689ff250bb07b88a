"""Drop-in replacement for `jax.nn.dot_product_attention` on `attend`."""

import operator
from functools import reduce
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import is_count, to_grid
from .._internal.types import Sizes, wide
from ..attend import attend
from ..masks import CAUSAL, FULL, Dense, Lengths, Mask, Window
from ..masks.algebra import check_array
from ..rules import sizes_of
from ..scores import IDENTITY, Additive, Score

BACKEND_OF = {None: "auto", "xla": "reference", "cudnn": "cudnn"}


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[False] = ...,
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...
def dot_product_attention(
    query: Float[ArrayLike, "*B T N H"],
    key: Float[ArrayLike, "*B S K H"],
    value: Float[ArrayLike, "*B S K h"],
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> Any:
    """`softmax(scale * q.k + bias, where masked) . v`: jax.nn's function of this name, on `attend`.

    Also called: scaled dot-product attention (SDPA), flash attention.

    Arguments and their meaning are those of `jax.nn.dot_product_attention` (jax 0.10 to 0.12).

    Args:
      query: `B T N H`, or `T N H`, which is a batch of one.
      key: `B S K H` or `S K H`; K must divide N.
      value: `B S K h` or `S K h`; h may differ from H, unlike in jax.nn.
      bias: added to the scaled logits; a number, or broadcasts to `B N T S`; differentiable.
      mask: boolean, broadcasts to `B N T S`; True means "may attend".
      scale: None means `H ** -0.5`.
      is_causal: whether query t attends only to keys up to t (upper-left aligned if T != S).
      query_seq_lengths: integers, shape B; queries after that give zeros.
      key_value_seq_lengths: integers, shape B; keys after that are masked.
      local_window_size: number of visible keys to the left and right of a query's own; one
        count for both sides, or a pair.
      implementation: None for `attend`'s choice of a backend, "xla" for the plain formula, "cudnn"
        for the kernel, or an error with the reason. Forward mode (`jax.jvp`, `jax.jacfwd`,
        `jax.linearize`) needs `use_backend("autodiff")`, in linear memory, or "xla", from
        128 x 128 weights per head on.
      return_residual: whether to return the log-sum-exp too.

    Returns:
      The output, `B T N h` or `T N h` like `query`, in its dtype; with `return_residual` also
      the log-sum-exp, `B T N` or `T N`.

    Raises:
      ValueError: for ranks, sizes, windows or an implementation that do not fit.
      TypeError: for integer or mixed dtypes, a mask that is not boolean, lengths that are not
        integers, a flag that is neither True nor False.
      NotImplementedError: if "cudnn" cannot serve the request, with its reason.

    Where the results differ from jax.nn's on purpose:

    * A fully masked query returns zeros and a residual of -inf; jax.nn returns the mean of
      v, as `attend(empty="mean")` does, and NaN where a bias of -inf masks all keys.
    * NaN at masked positions never reaches outputs or gradients; in jax.nn 0 * NaN does.
    * The residual is float32 or wider and differentiable; jax.nn rounds it to the dtype of the
      keys and stops its gradient.
    * float64 stays float64; jax.nn takes its softmax in float32. In bfloat16 and float16 the plain
      formula keeps its weights in float32 until the product with v; jax.nn rounds them first.
      `jax.default_matmul_precision` reaches every product; jax.nn overrides it in q.k
      (and so cannot be jitted for a CPU in float16).
    * These raise an error, though jax.nn accepts them: a negative count in a window, a boolean
      bias, a query, key or value of rank 2, a scale that is not a scalar. Wrong dtypes raise
      TypeError instead of ValueError.

    Source: jax.nn.dot_product_attention, jax 0.10 to 0.12.

    >>> import jax.numpy as jnp
    >>> from flax_attn import dot_product_attention
    >>> q, kv = jnp.ones((2, 5, 6, 8)), jnp.ones((2, 9, 3, 8))
    >>> lengths = jnp.asarray([9, 0])
    >>> out = dot_product_attention(q, kv, kv, is_causal=True, key_value_seq_lengths=lengths)
    >>> out.shape, float(out[0].min()), float(out[1].max())
    ((2, 5, 6, 8), 1.0, 0.0)
    """
    _check_choices(implementation, is_causal=is_causal, return_residual=return_residual)
    q, k, v = _batched("query", query), _batched("key", key), _batched("value", value)
    sizes = sizes_of(q, k)
    lengths = _lengths(query_seq_lengths, key_value_seq_lengths, sizes)
    result = attend(
        q,  # B T N H
        k,
        v,
        mask=_mask(mask, is_causal, local_window_size, lengths, sizes),
        score=_score(bias, q, sizes),
        scale=scale,
        backend=BACKEND_OF[implementation],
        return_lse=return_residual,
    )
    return result if jnp.ndim(query) == 4 else jax.tree.map(lambda x: x[0], result)


def _mask(mask: Any, is_causal: bool, window: Any, lengths: Lengths | None, sizes: Sizes) -> Mask:
    """The conjunction of all masks, as separate parts, so that backends recognise each."""
    parts: list[Mask] = [CAUSAL] if is_causal else []
    if window is not None:
        parts.append(_window(window))
    if lengths is not None:
        parts.append(lengths)
    if mask is not None:
        parts.append(Dense(to_grid("mask", _boolean(mask), sizes)))
    return reduce(operator.and_, parts) if parts else FULL


def _score(bias: Any, q: jax.Array, sizes: Sizes) -> Score:
    if bias is None:
        return IDENTITY
    bias = jnp.asarray(bias)
    if jnp.issubdtype(bias.dtype, jnp.integer):
        bias = bias.astype(wide(q.dtype))
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        raise TypeError(
            f"bias must hold real numbers; got {bias.dtype}. A boolean mask goes to mask=."
        )
    return Additive(to_grid("bias", bias, sizes))


def _batched(name: str, x: Any) -> Float[Array, "B L M W"]:
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have the axes (batch, length, heads, width) or (length, heads, width); "
            f"got shape {x.shape}. attend takes any number of batch axes."
        )
    return x if x.ndim == 4 else x[None]


def _boolean(mask: Any) -> Bool[Array, "..."]:
    check_array("mask", mask)
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(
            f"mask must be boolean, True where a query may attend; got {mask.dtype}. "
            "An additive mask (0 and -inf) goes to bias=."
        )
    return mask


def _window(size: Any) -> Window:
    pair = size if isinstance(size, tuple | list) else (size, size)
    pair = [int(n) if isinstance(n, np.integer) else n for n in pair]
    if len(pair) != 2 or not all(is_count(n, 0) for n in pair):
        raise ValueError(
            "local_window_size must be a count of keys, 0 or more, or two of them, (left, right); "
            f"got {size!r}. A side without limit is attend(mask=Window(left, None))."
        )
    return Window(*pair)


def _lengths(query: Any, key_value: Any, sizes: Sizes) -> Lengths | None:
    if query is None and key_value is None:
        return None
    return Lengths(
        sizes.S if key_value is None else _per_entry("key_value_seq_lengths", key_value, sizes),
        q=None if query is None else _per_entry("query_seq_lengths", query, sizes),
    )


def _per_entry(name: str, lengths: Any, sizes: Sizes) -> Int[Array, " B"]:
    lengths = lengths if isinstance(lengths, jax.Array) else np.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers; got {lengths.dtype}.")
    if lengths.shape != (sizes.B,):
        raise ValueError(
            f"{name} needs one length a batch entry, shape ({sizes.B},); got shape {lengths.shape}."
        )
    return lengths


def _check_choices(implementation: Any, **flags: Any) -> None:
    if not isinstance(implementation, str | None) or implementation not in BACKEND_OF:
        raise ValueError(
            f"implementation must be None, 'xla' or 'cudnn'; got {implementation!r}. "
            "Other backends are asked for by attend(backend=...)."
        )
    for name, flag in flags.items():
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"{name} must be True or False; got {flag!r}.")
