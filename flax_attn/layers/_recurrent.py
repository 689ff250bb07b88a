"""The forward pass of recurrent layers, and shared parts: short convolution, decay, state.

x           = the tokens, zeros at padding
y, state    = recur(x, tokens): the layer's equation, from the state before x
y           = the last projection; zeros at padding
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from .._internal.arrays import aligned
from .._internal.checks import check_input, check_positive
from .._internal.types import Sizes, wide
from ..cache import State
from ..cache.rows import batch_axes
from ..masks import CAUSAL, Mask, as_mask
from ..masks.algebra import parts_of
from ..masks.documents import document_count
from ..recurrence import causal_convolution
from ._cached import arithmetic_dtype
from ._common import check_tokens
from ._init import LayerInit
from ._inputs import zero_padding
from ._layer import Layer
from ._token_indices import check_positions, segment_ids


class RecurrentCall(TypedDict, total=False):
    """Keyword arguments of a call of a recurrent layer, except `cache`."""

    mask: Mask | None
    positions: Int[Array, "... T"] | None
    segments: Int[Array, "*#B T"] | None
    valid: Bool[Array, "*#B T"] | Mask | None
    deterministic: bool | None


class Tokens(NamedTuple):
    """Token metadata of a call: documents, padding, and the state before."""

    segments: Int[Array, "*#B T"] | None
    valid: Bool[Array, "*#B T"] | None
    cache: State | None

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a recurrence, except its arrays."""
        state = None if self.cache is None else self.cache.recurrent
        return {"segments": self.segments, "valid": self.valid, "state": state}

    def convolved(
        self, conv: nnx.Conv, x: Float[Array, "*B T D"]
    ) -> tuple[Float[Array, "*B T D"], Float[Array, "*B V D"]]:
        """The causal convolution of x, and its state after the last token."""
        weight = conv.kernel[...][:, 0].T  # D W
        bias = None if conv.bias is None else conv.bias[...]
        state = None if self.cache is None else self.cache.convolution
        return causal_convolution(
            x, weight, bias, segments=self.segments, valid=self.valid, state=state
        )


Recurred = tuple[Float[Array, "*B T E"], Float[Array, "..."] | None, Float[Array, "*B V W"] | None]
Shape = tuple[int, ...] | None


class Recurrent(Layer):
    """Base of recurrent layers. Subclasses define `recur`, `state_shapes`, optionally `last`."""

    mask_is_of = "recurrence"

    last = "out_proj"  # name of the output projection

    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: None = None, **call: Unpack[RecurrentCall]
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def __call__(
        self, x: Float[Array, "*B T D"], *, cache: State, **call: Unpack[RecurrentCall]
    ) -> tuple[Float[Array, "*B T D"], State]: ...
    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | None = None,
        positions: Int[Array, "... T"] | None = None,
        segments: Int[Array, "*#B T"] | None = None,
        valid: Bool[Array, "*#B T"] | Mask | None = None,
        cache: State | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"] | tuple[Float[Array, "*B T D"], State]:
        """The outputs of all tokens, and with a cache the state after them.

        There is no dropout, so `deterministic` has no effect.

        Args:
          x: the tokens.
          mask: only masks that a recurrence implies, so that one loop can call all layers of a
            model: CAUSAL, or `CAUSAL & Segments(ids)` for `segments=ids`, with the ids of x only,
            or `CAUSAL & Documents(lengths)`.
          positions: has no effect, because a recurrence reads no positions.
          segments: ids of packed documents; the state resets at each start. The first document
            continues from the cache if the cache's last token has its id, or if there are no ids.
          valid: which tokens are real. Padding does not change the state; its outputs are zero.
          cache: the `State` of the tokens before; then the call returns `(y, state)`.
        """
        check_positions(positions)
        last: nnx.Linear = getattr(self, self.last)
        x = check_and_mask(x, last.out_features, valid, cache)
        stored = None if valid is None else check_tokens("valid", valid, x)
        segments, real = documents_of_recurrence(mask, segments, x, stored, cache)
        x = x if real is stored else zero_padding(x, real)
        start, documents = cache, None
        if cache is not None and segments is not None:
            documents = cache.join_documents(x, segments, real)
            start = cache.reset(documents.is_other)
        y, recurrent_state, conv_state = self.recur(x, Tokens(segments, real, start))  # *B T E
        y = zero_padding(last(y), real)  # *B T D
        if cache is None:
            return y
        count = check_tokens("valid", stored, y).sum(axis=-1, dtype=jnp.int32)
        return y, cache.advance(recurrent_state, conv_state, count, documents)

    def recur(self, x: Float[Array, "*B T D"], tokens: Tokens) -> Recurred:
        """Input of the last projection, and the states of recurrence and convolution."""
        raise NotImplementedError

    def state_shapes(self) -> tuple[Shape, Shape]:
        """State shapes of recurrence and convolution, without batch axes; None if stateless."""
        raise NotImplementedError

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        length: int,
        *,
        layers: int | None = None,
        dtype: Any = None,
    ) -> State:
        """The `State` before the first token; arguments as for attention caches."""
        recurrent, convolution = self.state_shapes()
        dtype = dtype or arithmetic_dtype(getattr(self, self.last))
        state_kwargs = {"recurrent": recurrent, "convolution": convolution}
        return empty_state(batch, length, layers, dtype, **state_kwargs)


def documents_of_recurrence(
    mask: Any, segments: Any, x: Any, valid: Any, cache: State | None
) -> tuple[Any, Any]:
    """Returns the ids of packed documents, from `segments` or the mask, and what is no padding.

    `Documents` count from the first token of a row. What comes behind the last is padding.

    Raises:
      ValueError: for a mask that a recurrence cannot apply, or for ids in both.
    """
    parts = [] if mask is None else parts_of(as_mask(mask))
    before = None if cache is None else cache.length
    real = None if valid is None else check_tokens("valid", valid, x)
    both = [ids for part in parts if (ids := segment_ids(part, x, real, before)) is not None]
    ids = [q_ids for q_ids, kv_ids in both if q_ids is kv_ids]
    causal = [part for part in parts if part == CAUSAL]
    if parts and (not causal or len(ids) + len(causal) < len(parts) or len(ids) > 1):
        raise ValueError(
            "A recurrence is causal: it takes mask=CAUSAL, "
            "CAUSAL & Segments(ids) or CAUSAL & Documents(lengths); got "
            f"{mask if isinstance(mask, Mask) else 'an array'}."
        )
    if ids and segments is not None:
        raise ValueError("Documents are passed twice, by segments= and in the mask; leave one out.")
    packed = [(n, part) for part in parts if (n := document_count(part)) is not None]
    for count, part in packed:
        if cache is None:  # else its tokens are not all of the row
            part.bind(Sizes(x.shape[:-2], 1, x.shape[-2], x.shape[-2]))
        inside = ids[0] < count  # behind the last document, their number is the id
        if isinstance(inside, Tracer) or not inside.all():
            shape = x.shape[:-1]
            valid = jnp.broadcast_to(inside, shape) & check_tokens("valid", valid, x)
    return ids[0] if ids else segments, valid


def state_of(conv: nnx.Conv) -> tuple[int, int]:
    """Shape of a convolution's state: number of past tokens, and their width."""
    return conv.kernel.shape[0] - 1, conv.out_features


def check_and_mask(
    x: Float[Array, "*B T D"],
    width: int,
    valid: Bool[Array, "*#B T"] | Mask | None,
    cache: State | None,
) -> Float[Array, "*B T D"]:
    """Returns x with zeros at padding.

    Raises:
      TypeError: if x is not floating, valid not boolean, or the cache no State.
      ValueError: if their shapes do not fit.

    >>> check_and_mask(jnp.ones((2, 1)), 1, jnp.asarray([True, False]), None).tolist()
    [[1.0], [0.0]]
    """
    x = check_input("x", x, width)
    if cache is not None and not isinstance(cache, State):
        raise TypeError(
            "cache must be a State, made by this layer's init_cache(batch, length); got "
            f"{type(cache).__name__}."
        )
    if cache is not None and cache.length.shape != x.shape[:-2]:
        raise ValueError(
            f"The cache has rows {cache.length.shape}, and x has {x.shape[:-2]}; make it with "
            f"init_cache({x.shape[:-2]}, length)."
        )
    return zero_padding(x, valid)


def short_convolution(features: int, size: int, use_bias: bool, init: LayerInit) -> nnx.Conv:
    """Weights of a depthwise causal convolution, initialized as in PyTorch.

    `Tokens.convolved` reads them; the module itself is never called.
    """
    conv_kwargs = {"padding": "CAUSAL", "feature_group_count": features, "use_bias": use_bias}
    return nnx.Conv(features, features, (size,), **conv_kwargs, **init.torch_initializers(size))


def empty_state(
    batch: int | tuple[int, ...],
    length: int,
    layers: int | None,
    dtype: Any,
    *,
    recurrent: tuple[int, ...] | None,
    convolution: tuple[int, ...] | None,
) -> State:
    """The initial state of `batch` rows; with `layers`, stacked for a scan.

    Args:
      batch: number of rows, or the batch axes.
      length: accepted for compatibility with attention caches; the state's size is constant.
      layers: None for one layer.
      dtype: of the convolution's state; the recurrence's is float32 or wider.
      recurrent, convolution: shapes without batch axes; None for no state.

    Raises:
      ValueError: for counts below 1.

    >>> empty_state(2, 9, None, jnp.float32, recurrent=(3,), convolution=None).recurrent.shape
    (2, 3)
    """
    check_positive(length=length)
    rows = batch_axes(batch, layers)
    recurrent_state = None if recurrent is None else jnp.zeros((*rows, *recurrent), wide(dtype))
    conv_state = None if convolution is None else jnp.zeros((*rows, *convolution), dtype)
    none = jnp.zeros(rows, jnp.int32)
    return State(
        recurrent_state, conv_state, length=none, segment=none, has_segment=jnp.zeros(rows, bool)
    )


def decay_parameters(heads: int, biases: int, init: LayerInit) -> tuple[nnx.Param, nnx.Param]:
    """Mamba's initial `A_log` per head, A in [1, 16], and `dt_bias`, steps in [0.001, 0.1].

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023.

    >>> A_log, dt_bias = decay_parameters(3, 3, LayerInit(rngs=nnx.Rngs(0)))
    >>> bool((A_log[...] >= 0).all()), dt_bias.shape
    (True, (3,))
    """
    a = jax.random.uniform(init.rngs.params(), (heads,), init.param_dtype, 1.0, 16.0)
    low, high = np.log(1e-3), np.log(1e-1)
    steps = jax.random.uniform(init.rngs.params(), (biases,), init.param_dtype, low, high)
    dt = jnp.exp(steps)
    return nnx.Param(jnp.log(a)), nnx.Param(dt + jnp.log(-jnp.expm1(-dt)))


def log_decay(
    a: Float[Array, "*X"], A_log: Float[Array, "..."], dt_bias: Float[Array, "..."]
) -> Float[Array, "*X"]:
    """`-exp(A_log) softplus(a + dt_bias)`, in float32 or wider: never above zero.

    >>> log_decay(jnp.zeros((1, 1)), jnp.zeros(1), jnp.full(1, 200.0)).tolist()
    [[-200.0]]
    """
    a = a.astype(wide(a.dtype))
    return -jnp.exp(aligned(A_log, a)) * jax.nn.softplus(a + aligned(dt_bias, a))


def gated(
    x: Float[Array, "*B T N h"],
    gate: Float[Array, "*B T N h"],
    activation: Callable[[jax.Array], jax.Array] = nnx.silu,
) -> Float[Array, "*B T N h"]:
    """`x * activation(gate)`, computed in float32 or wider, in the dtype of x."""
    kind = wide(x.dtype)
    return (x.astype(kind) * activation(gate.astype(kind))).astype(x.dtype)
