"""Attention beside a cache by kernels, which take no positions: what is shown, by slot.

A cache stores a row's tokens in order, so what a mask shows at positions is a run of slots:

    one token          the slots before its own, of which a window is sliced first
    several tokens     a run of slots for each of them
    a prompt           its own tokens alone, if no row has any before

Which of them serves is decided while the program is traced. While it runs, the slots are compared
with what the mask shows at positions, and the output is checked for NaN, which a kernel may have
read in a slot that nobody sees: otherwise attention is computed at positions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from .._internal.arrays import INT32_MAX, rotate_rows
from .._internal.types import Sizes
from ..attend import dispatch, kernel_for
from ..backends import BACKENDS
from ..backends.choice import KERNELS
from ..backends.local import flat
from ..backends.sinks import add_sinks, output_share
from ..masks import Lengths, Mask
from ..masks.at_positions import at_positions as mask_at_positions
from ..masks.at_positions import leaves_of
from ..masks.documents import document_count
from ..masks.ranges import as_known_band, reach_of, runs_of
from ..masks.stored_keys import StoredKeys
from ..places import Positions, is_indexed_by_slot
from ..quantized import Quantized
from ..reference import Stats
from ..rules import Request, Rules, sizes_of
from ..scores import Chain, Identity, Score, Softcap
from ..where import platform_of
from .rows import counted
from .stored import attend_over

_Shape: Any = jax.ShapeDtypeStruct  # where only the shape is needed
LANES = 128  # slots of which splash attention reads a multiple


class Slots(NamedTuple):
    """The keys of a call by slot.

    Attributes:
      start: `B`, the first slot of a slice of each row; None for all slots.
      mask: over these slots.
    """

    start: Any
    mask: StoredKeys


class Kernel(NamedTuple):
    """A backend's name, and the number of slots that it reads of each row."""

    name: str
    size: int


def attend_by_slot(
    q: Float[Array, "*B T N H"], stored: Any, rules: Rules, backend: str
) -> Float[Array, "*B T N h"]:
    """Attention of a call's queries over what it has `Stored`, by a kernel where one serves."""
    # With one batch axis they are what `Positions.bind` makes.
    is_bound = stored.q_positions.ndim == 2
    at = Positions(stored.q_positions, stored.positions, stored.cache.by_slot, is_bound=is_bound)
    arrays, positioned = (q, stored.keys, stored.values), replace(rules, positions=at)
    if platform_of(q) not in KERNELS or not _is_plain(*arrays, rules):
        return attend_over(*arrays, positioned, backend)
    by_slot = _kernel_by_slot(q, stored, rules, backend)
    if by_slot is None:
        general = partial(attend_over, *arrays, positioned, backend)
    else:
        general = partial(_checked, by_slot[0], *arrays, positioned, by_slot[1])
    return _prompt_or(general, q, stored, rules, backend)


def _is_plain(q: jax.Array, keys: Any, values: Any, rules: Rules) -> bool:
    """Whether nothing but the mask can keep a kernel from reading these slots."""
    if isinstance(keys, Quantized) or not q.dtype == keys.dtype == values.dtype:
        return False
    parts = (*leaves_of(rules.mask), rules.score)
    if rules.dropout is not None or any(is_indexed_by_slot(part) for part in parts):
        return False
    is_known = all(isinstance(n, int) and n for n in (*q.shape, *keys.shape, values.shape[-1]))
    return is_known and Request(q, keys, values, rules).where.axes is None


def _prompt_or(
    other: Callable[[], jax.Array], q: jax.Array, stored: Any, rules: Rules, backend: str
) -> jax.Array:
    """Attention of a prompt to itself if a kernel serves it and no row has a token before it.

    Its padding may be at either end of a row.
    """
    T, is_ring = q.shape[-3], stored.cache.window is not None
    # Documents have the lengths of whole rows, of which a prompt may be a part.
    packed = any(document_count(part) is not None for part in leaves_of(rules.mask))
    if T == 1 or packed:
        return other()
    last = slice(-T, None) if is_ring else slice(None, T)
    k, v = (jnp.swapaxes(x[..., last, :], -3, -2) for x in (stored.keys, stored.values))
    at, mask = stored.q_positions, rules.mask
    tokens = counted(T, at.ndim - 1)
    padding = None
    if stored.is_padded:
        count = (at >= 0).sum(-1, dtype=jnp.int32)
        padding = jnp.argmax(at >= 0, axis=-1).astype(jnp.int32)
        q, at = rotate_rows(q, padding), rotate_rows(at, padding)
        if is_ring:  # which has them as the call had; a static cache stores no padding
            k, v = rotate_rows(k, padding), rotate_rows(v, padding)
        tokens = jnp.where(tokens < count[..., None], tokens, -1)
        mask = mask & Lengths(count, q=count)
    request = Request(q, k, v, replace(rules, mask=mask))
    name = kernel_for(request, backend)
    if name is None:
        return other()

    def prompt() -> jax.Array:
        o, _ = dispatch(request, name, "zero")
        return o if padding is None else rotate_rows(o, -padding)

    is_prompt = (at == tokens).all()
    if not isinstance(is_prompt, Tracer):
        return prompt() if is_prompt else other()
    return jax.lax.cond(is_prompt, prompt, other)


def _kernel_by_slot(
    q: jax.Array, stored: Any, rules: Rules, backend: str
) -> tuple[Kernel, Slots] | None:
    """The kernel that serves these queries by slot, and the slots; None if there is none."""
    K, S = stored.keys.shape[-3:-1]
    if not _is_without_indices(rules.score):
        return None
    shown = _slots(rules.mask, q, stored)
    if shown is None:
        return None
    slots, size = shown
    # Of a slice it is not passed over: the alternative is to read all slots.
    k, v = (
        _Shape((*x.shape[:-3], S, K, x.shape[-1]), x.dtype) for x in (stored.keys, stored.values)
    )
    name = kernel_for(Request(q, k, v, replace(rules, mask=slots.mask)), backend)
    if name is None or (name == "splash" and slots.start is None and S % LANES):
        return None  # splash attention would copy all slots to append some
    return Kernel(name, size), slots


def _is_without_indices(score: Score) -> bool:
    """Whether a score reads only the logit."""
    if isinstance(score, Chain):
        return _is_without_indices(score.first) and _is_without_indices(score.then)
    return isinstance(score, Identity | Softcap)


def _slots(mask: Mask, q: jax.Array, stored: Any) -> tuple[Slots, int] | None:
    """The slots that a mask at positions shows, and how many are read of a row, or None.

    None if they are no run of slots: by a mask that may show several runs, and in a ring, whose
    slots are in another order than its tokens, unless one token sees all of it.
    """
    cache, S = stored.cache, stored.keys.shape[-2]
    *batch, T, N, _ = q.shape
    sizes = Sizes(tuple(batch), N, INT32_MAX, INT32_MAX)
    at = stored.q_positions.reshape(-1, T)
    last = cache.length.reshape(-1, 1)
    bound = mask.bind(sizes)
    if cache.window is not None:
        band = as_known_band(bound)
        if T > 1 or band is None or band.kv is not None or band.rows is not None:
            return None
        end = jnp.where(at >= 0, jnp.minimum(last, S), 0)
        return (Slots(None, StoredKeys(None, end)), S) if band.lo == 1 - S else None
    runs = runs_of(bound, at)
    if runs is None:
        return None
    first, end = runs
    end = last if end is None else jnp.minimum(end, last)
    end = jnp.where(at >= 0, jnp.maximum(end, 0), 0)
    if first is None:
        return Slots(None, StoredKeys(None, end)), S
    first = jnp.broadcast_to(jnp.maximum(first, 0), at.shape)
    back = reach_of(bound)
    if T > 1 or back is None:
        return Slots(None, StoredKeys(first, end)), S
    if back >= S:
        return Slots(None, StoredKeys(None, end)), S
    start = jnp.clip(first[:, 0], 0, S - back)
    return Slots(start, StoredKeys(None, jnp.maximum(end - start[:, None], 0))), back


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _checked(
    kernel: Kernel, q: Any, keys: Any, values: Any, rules: Rules, slots: Slots
) -> jax.Array:
    """Attention by a kernel, or at positions if the slots differ from these or NaN came in."""
    o = _by_kernel(kernel, q, keys, values, rules, slots)
    good = _is_explained(kernel, q, keys, rules, slots) & ~jnp.isnan(o).any()
    at_positions = partial(attend_over, q, keys, values, rules, "blockwise")
    if not isinstance(good, Tracer):
        return o if good else at_positions()
    return jax.lax.cond(good, lambda: o, at_positions)


def _forward(kernel: Kernel, *args: Any) -> Any:
    return _checked(kernel, *args), args


def _backward(kernel: Kernel, args: Any, do: jax.Array) -> Any:
    # The kernel's own backward pass would multiply NaN in hidden keys by zero.
    *arrays, _ = args
    grads = jax.vjp(partial(attend_over, backend="blockwise"), *arrays)[1](do)
    return *grads, None


_checked.defvjp(_forward, _backward)


def _is_explained(
    kernel: Kernel, q: jax.Array, keys: jax.Array, rules: Rules, slots: Slots
) -> jax.Array:
    """Whether the mask at positions shows the same keys as the one by slot."""
    K, S = keys.shape[-3:-1]
    sizes = sizes_of(q, _Shape((*keys.shape[:-3], S, K, q.shape[-1]), q.dtype))
    at: Any = rules.positions
    shown = mask_at_positions(rules.mask, at.bind(sizes)).bind(sizes).grid(sizes)
    b, n, rows, slot = sizes.iotas()
    if slots.start is not None:
        slot = slot - slots.start.reshape(-1, 1, 1, 1)
    return (shown == (slots.mask(b, n, rows, slot) & (slot >= 0) & (slot < kernel.size))).all()


def _by_kernel(
    kernel: Kernel, q: jax.Array, keys: jax.Array, values: jax.Array, rules: Rules, slots: Slots
) -> jax.Array:
    """Attention by slot, each key head with its queries as a batch entry: no key is moved."""
    K, S, H = keys.shape[-3:]
    sizes = sizes_of(q, _Shape((*keys.shape[:-3], S, K, H), q.dtype))
    (rows,) = flat(sizes, q)
    keys, values = (x.reshape(sizes.B, *x.shape[-3:]) for x in (keys, values))
    if slots.start is not None:
        cut = partial(jax.lax.dynamic_slice_in_dim, slice_size=kernel.size, axis=1)
        keys, values = (jax.vmap(cut)(x, slots.start) for x in (keys, values))
    B, T, N, _ = rows.shape
    rows = jnp.moveaxis(rows.reshape(B, T, K, N // K, H), 2, 1).reshape(B * K, T, N // K, H)
    keys, values = (x.reshape(B * K, kernel.size, 1, x.shape[-1]) for x in (keys, values))
    mask = jax.tree.map(lambda x: jnp.repeat(x, K, axis=0), slots.mask)
    one = replace(rules, mask=mask, sinks=None, positions=None).bind(sizes_of(rows, keys), H)
    o, stats = BACKENDS[kernel.name].attention(rows, keys, values, one)
    o = jnp.moveaxis(o.reshape(B, K, T, N // K, -1), 1, 2).reshape(B, T, N, -1)
    if rules.sinks is not None:
        stats = Stats(*(x.reshape(B, N, T) for x in stats))
        share = output_share(stats, add_sinks(stats, jnp.asarray(rules.sinks)))
        o = (o.astype(share.dtype) * jnp.swapaxes(share, 1, 2)[..., None]).astype(o.dtype)
    return o.reshape(*q.shape[:-1], o.shape[-1])
