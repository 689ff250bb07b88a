"""Linear attention: a feature map replaces the softmax (Katharopoulos et al., 2020)."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Bool, Float, Int

from .._internal.checks import check_input, check_positive
from .._internal.types import wide
from ..masks import Mask
from ..recurrence.documents import begins, check_segments
from ..taps import tap
from ._common import check_tokens, merge_heads, split_heads
from ._init import InitKeywords, InitWithoutDropout, init_signature
from ._layer import Layer
from ._recurrent import documents_of_recurrence
from ._token_indices import check_positions

CHUNK = 64


class State(NamedTuple):
    """Recurrent state: `kv`, `*B N H h`, the sum of phi(k) v; `z`, `*B N H`, of phi(k)."""

    kv: jax.Array
    z: jax.Array


def phi(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """`elu(x) + 1`, in float32 or wider: x + 1 above zero, else exp(x), without cancellation.

    >>> phi(jnp.asarray([0.0, 1.0])).tolist()
    [1.0, 2.0]
    """
    x = x.astype(wide(x.dtype))
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def divide(
    sums: Float[Array, "*B T N h"], total: Float[Array, "*B T N"]
) -> Float[Array, "*B T N h"]:
    """`sums / total`, zero where the total is zero."""
    some = total != 0
    return jnp.where(some[..., None], sums / jnp.where(some, total, 1)[..., None], 0)


def update(state: State, k: jax.Array, v: jax.Array) -> State:
    """The state after keys `*B S N H` (mapped by phi) and values `*B S N h`."""
    kv = state.kv + jnp.einsum("...snh,...snd->...nhd", k, v)
    return State(kv, state.z + k.sum(axis=-3))


def read(state: State, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numerator and denominator of the attention of queries `*B T N H` over a state."""
    sums = jnp.einsum("...tnh,...nhd->...tnd", q, state.kv)
    return sums, jnp.einsum("...tnh,...nh->...tn", q, state.z)


def empty(batch: tuple[int, ...], heads: int, width: int, dtype: Any) -> State:
    """The state before the first token."""
    kv = jnp.zeros((*batch, heads, width, width), dtype)
    return State(kv, jnp.zeros((*batch, heads, width), dtype))


def causal(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> jax.Array:
    """Causal attention, chunk by chunk; phi is already applied to q and k.

    Memory grows with T, not with its square: all pairs within a chunk, the state for earlier ones.
    `document`, `*B T`, numbers the document of each token, from 0; None for one document a row.
    """
    length = q.shape[-3]
    chunk = CHUNK if is_symbolic_dim(length) else min(CHUNK, max(length, 1))
    packed = () if document is None else (document[..., None, None],)
    pieces = [_chunked(x, chunk) for x in (q, k, v, *packed)]
    start = empty(q.shape[:-3], q.shape[-2], q.shape[-1], q.dtype)
    past = jnp.tril(jnp.ones((chunk, chunk), q.dtype))

    def one(carry: tuple[State, jax.Array], chunks: list[jax.Array]) -> tuple[Any, jax.Array]:
        (state, before), (q, k, v, *packed) = carry, chunks  # before: *B 1 1 1
        pairs = jnp.einsum("...tnh,...snh->...nts", q, k)
        pairs = pairs * past.reshape((1,) * (pairs.ndim - 2) + past.shape)
        readers, old = q, state
        for document in packed:  # *B chunk 1 1; the state is of the document of the last token
            same = document[..., 0, 0][..., :, None] == document[..., 0, 0][..., None, :]
            pairs = jnp.where(same[..., None, :, :], pairs, 0)
            readers, last = jnp.where(document == before, q, 0), document[..., -1:, :, :]
            goes_on = (last == before)[..., 0]  # *B 1 1
            old = State(jnp.where(goes_on[..., None], state.kv, 0), jnp.where(goes_on, state.z, 0))
            k, before = jnp.where(document == last, k, 0), last
        sums, total = read(state, readers)
        sums = sums + jnp.einsum("...nts,...snd->...tnd", pairs, v)
        total = total + jnp.swapaxes(pairs.sum(axis=-1), -1, -2)
        return (update(old, k, v), before), divide(sums, total)

    first = jnp.zeros((*q.shape[:-3], 1, 1, 1), jnp.int32)
    _, chunks = jax.lax.scan(one, (start, first), pieces)  # C *B chunk N h
    whole = jnp.moveaxis(chunks, 0, -4)
    rows = whole.shape[-4] * chunk
    return whole.reshape(*whole.shape[:-4], rows, *whole.shape[-2:])[..., :length, :, :]


def _chunked(x: jax.Array, chunk: int) -> jax.Array:
    """`*B T N H` as `C *B chunk N H`, padded with zeros: keys without weight."""
    count = -(-x.shape[-3] // chunk)
    more = count * chunk - x.shape[-3]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, more), (0, 0), (0, 0)])
    return jnp.moveaxis(x.reshape(*x.shape[:-3], count, chunk, *x.shape[-2:]), -4, 0)


class LinearAttention(Layer):
    """`out_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s)`, phi = elu + 1.

    Also called: kernelized attention, Linear Transformer.

    The sums over s are taken first, so time grows with T, not with its square. With `causal=True`
    s runs up to t, and `step` does the same one token at a time from a state of fixed size.

    Shapes: x `*B T in_features` -> `*B T in_features`.

    Args:
      in_features: width of a token.
      num_heads: number of heads.
      head_dim: width of a head.
      causal: whether a token attends only to itself and to earlier tokens.
      dtype: of the projections; None promotes x and the weights. Sums run in float32 or wider.
      kernel_init, bias_init, rngs, param_dtype: as in `LightningAttention`.

    Raises:
      ValueError: for counts below 1, if x is not `*B T in_features`, or for packed documents,
        `recurrent` and `step` of a layer that is not causal.
      TypeError: if x is not floating.

    Source: Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with
    Linear Attention", 2020, equations 5, 7 and 12.

    >>> from flax import nnx
    >>> layer = LinearAttention(6, 2, 4, causal=True, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 6)), mask=jnp.arange(5) < 4).shape  # the last token is padding
    (3, 5, 6)
    """

    mask_is_of = "a token"

    @init_signature
    def __init__(
        self,
        in_features: int,
        num_heads: int,
        head_dim: int,
        *,
        causal: bool = False,
        **more: Unpack[InitKeywords],
    ):
        check_positive(in_features=in_features, num_heads=num_heads, head_dim=head_dim)
        linear = InitWithoutDropout(**more).linear
        self.num_heads, self.head_dim, self.causal = num_heads, head_dim, causal
        self.q_proj = linear(in_features, num_heads * head_dim, use_bias=False)
        self.k_proj = linear(in_features, num_heads * head_dim, use_bias=False)
        self.v_proj = linear(in_features, num_heads * head_dim, use_bias=False)
        self.o_proj = linear(num_heads * head_dim, in_features, use_bias=False)

    def __call__(
        self,
        x: Float[Array, "*B T D"],
        *,
        mask: Mask | Bool[Array, "*#B T"] | None = None,
        positions: Int[Array, "... T"] | None = None,
        deterministic: bool | None = None,
    ) -> Float[Array, "*B T D"]:
        """Attention of x over itself; tokens where `mask`, `*B T`, is False are masked out.

        Their outputs are zero. With `causal=True` the mask may be CAUSAL too, or packed documents,
        `CAUSAL & Documents(lengths)`, as for recurrent layers.

        No position is read and there is no dropout: `positions`, `deterministic` have no effect.
        """
        check_positions(positions)
        x = check_input("x", x, self.q_proj.in_features)
        is_valid, document = self._documents(mask, x)  # *B T
        is_valid = is_valid[..., None]  # *B T 1
        x = jnp.where(is_valid, x, 0)
        q, k, v = self._feature_map(x)  # *B T N H
        k = jnp.where(is_valid[..., None], k, 0)
        if self.causal:
            o = causal(q, k, v, document)  # *B T N H
        else:
            o = divide(*read(update(self.initial_state(x.shape[:-2], q.dtype), k, v), q))
        return self._out(jnp.where(is_valid[..., None], o, 0), x)  # *B T D

    def _documents(self, mask: Any, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Which tokens are real, and the number of each token's document, both `*B T`."""
        if not isinstance(mask, Mask):
            return check_tokens("mask", mask, x), None
        if not self.causal:
            raise ValueError(
                "LinearAttention without causal=True takes a mask of tokens, such as "
                f"mask=jnp.arange(T) < n; got {mask}."
            )
        ids, valid = documents_of_recurrence(mask, None, x, None, None)
        is_valid = check_tokens("mask", valid, x)
        if ids is None:
            return is_valid, None
        first = begins(check_segments(ids, x.shape[:-1]), is_valid)  # *B T
        return is_valid, jnp.cumsum(first, axis=-1, dtype=jnp.int32)

    def recurrent(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        """The causal call as a scan over tokens, with the same result."""
        x = check_input("x", x, self.q_proj.in_features)
        start = self.initial_state(x.shape[:-2], wide(self.q_proj(x).dtype))

        def one(state: State, x: jax.Array) -> tuple[State, jax.Array]:
            out, state = self.step(x, state)
            return state, out

        _, out = jax.lax.scan(one, start, jnp.moveaxis(x, -2, 0))
        return jnp.moveaxis(out, 0, -2)

    def step(self, x: Float[Array, "*B D"], state: State) -> tuple[Float[Array, "*B D"], State]:
        """One token's output, and the state after it."""
        if not self.causal:
            raise ValueError("step and recurrent need a layer built with causal=True.")
        q, k, v = self._feature_map(x[..., None, :])  # *B 1 N H
        state = update(state, k, v)
        return self._out(divide(*read(state, q)), x[..., None, :])[..., 0, :], state

    def initial_state(self, batch: tuple[int, ...] = (), dtype: Any = jnp.float32) -> State:
        """The state before the first token, for these batch axes."""
        return empty(batch, self.num_heads, self.head_dim, dtype)

    def _feature_map(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """phi(q), phi(k) and v, `*B T N H`, in float32 or wider."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(project(x), self.head_dim) for project in projections)
        return phi(q), phi(k), v.astype(wide(v.dtype))

    def _out(self, o: jax.Array, x: jax.Array) -> jax.Array:
        o = tap("context", o.astype(self.q_proj.dtype or x.dtype))
        return self.o_proj(merge_heads(o))
