"""Decoding: few queries on many keys, in one loop over blocks of keys for all heads at once.

    x  = score(scale * q.k)                    B K R C, where R is G query heads times T queries
    m' = max(m, max x)                         p = exp(x - m')
    l' = exp(m - m') l + sum p                 o' = exp(m - m') o + p.v

Keys and values are read only from the first to the last block that some query sees. On a CPU every
batch entry has its own loop bounds, so that a long row does not slow down short ones.

Matrix products need the heads apart, `B K S H`, which is how a cache stores them. If most keys are
visible, one block of all keys is faster then: XLA reads a whole array in place but copies slices.
`B S K H`, as callers pass it, is transposed block by block while a block is in the processor's
cache; transposing everything first takes three times as long and as much memory again.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._internal.arrays import bounded_loop, unify_varying
from ..._internal.types import wide
from ...dropout import Drop, DropoutMask
from ...masks import Mask, Rows
from ...masks.ranges import visible_range
from ...quantized import Quantized
from ...reference import at_most
from ...rules import Rules
from .block import Block, dropout_keep, local, modify_logits, visible_once
from .plan import BlockPlan, static_fully_visible_range

# All keys are one block if a key head has at most so many rows, and so large a share of the keys is
# visible.
MAX_SINGLE_BLOCK_ROWS = 8
MIN_KEY_SHARE = 0.4

Carry = tuple[jax.Array, jax.Array, jax.Array]  # m and l, B K R, and o, B K R h


def untransposed(
    plan: BlockPlan, k: jax.Array, v: jax.Array
) -> tuple[BlockPlan, jax.Array, jax.Array]:
    """Removes a transpose of keys and values from `B K S H` that the caller has just made."""
    stored = [_transposed_from(x) for x in (k, v)]
    if any(x is None for x in stored):
        return plan, k, v
    return plan._replace(layout="heads first"), *stored


def _transposed_from(x: Any) -> Any:
    """The array `B K S H` that x, `B S K H`, is a transpose of; None if it is none.

    XLA would transpose all of it, and transpose back what is read. JAX shows which equation made a
    traced array, but not by a stable API: where it shows none, x is used as it is.
    """
    before, operation = x, _producing_equation(x)
    if "new_sizes" in operation.params:  # a reshape that merges the batch axes
        before = operation.in_tracers[0]
        operation = _producing_equation(before)
    if before.ndim < 4 or before.shape[-3:] != x.shape[-3:]:
        return None
    *batch, S, K, H = range(before.ndim)
    if operation.params.get("permutation") != (*batch, K, S, H):
        return None
    stored = operation.in_tracers[0]
    return stored.reshape(x.shape[0], *stored.shape[-3:])


def _producing_equation(x: Any) -> Any:
    """The equation that produced a traced array, if JAX exposes it."""
    return getattr(x, "parent", None) or SimpleNamespace(params={})


def forward_decode(
    plan: BlockPlan,
    q: Float[Array, "B T N H"],
    k: Any,
    v: Any,
    rules: Rules,
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Output, m and l, all in float32 or wider and without the sinks.

    `plan.layout` says whether k and v are `B S K H` and `B S K h`, or `B K S H` and `B K S h`; the
    latter may be `Quantized`.
    """
    # The G query heads of a key head and the T queries are rows of one matrix product.
    (B, T, N, H), G = q.shape, plan.groups
    rows = jnp.moveaxis(q.reshape(B, T, N // G, G, H), 1, 3).reshape(B, N // G, G * T, H)
    if plan.layout == "tokens first" and plan.batched:  # accelerators fuse the transpose
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        plan = plan._replace(layout="heads first")
    m, l, o = _loop_keys(plan, rows, k, v, rules)
    # A fully masked row has l = 0 and o = 0: it stays zero.
    o = o / jnp.where(l == 0, 1, l)[..., None]
    return jnp.moveaxis(o.reshape(B, N, T, -1), 1, 2), m.reshape(B, N, T), l.reshape(B, N, T)


def _loop_keys(plan: BlockPlan, q, k, v, rules: Rules) -> Carry:
    B, S = plan.sizes.B, plan.sizes.S
    b = jnp.arange(B, dtype=jnp.int32)
    lo, hi = _visible_ranges(plan, rules.mask)
    # One loop for all batch entries, from the first key that any of them sees to the last.
    if plan.batched or S <= plan.cols:
        ends = (lo, hi) if isinstance(lo, int) else (jnp.min(lo), jnp.max(hi))
        return _loop(plan, q, k, v, rules, b, *ends)

    def per_entry() -> Carry:
        return _per_entry(plan, q, k, v, rules, lo, hi)

    if (
        plan.layout == "tokens first"
        or q.shape[2] > MAX_SINGLE_BLOCK_ROWS
        or k.dtype != wide(q.dtype)
    ):
        return per_entry()
    # Whether most keys are visible is decided at run time where lengths are arrays.
    if isinstance(lo, int):
        most = hi - lo >= int(MIN_KEY_SHARE * S)
    else:  # B may be a symbol
        most = jnp.sum(jnp.maximum(hi - lo, 0)) >= int(MIN_KEY_SHARE * S) * B
    if most is False:
        return per_entry()
    whole = _cond(
        most, lambda: _single_block(plan, q, k, v, rules, b), lambda: _initial_carry(q, k, v, rules)
    )
    if plan.hides_keys:  # NaN in a masked value would reach the single block: loop instead
        most = most & jnp.isfinite(whole[2]).all()
    return _cond(most, lambda: whole, per_entry)


def _cond(condition: Any, yes: Any, no: Any) -> Carry:
    return yes() if condition is True else jax.lax.cond(condition, yes, no)


def _single_block(plan: BlockPlan, q, k, v, rules: Rules, b: jax.Array) -> Carry:
    """Attention with all keys of all batch entries as one block."""
    plan = plan._replace(cols=plan.sizes.S, hides_keys=False)
    return _loop(plan, q, k, v, rules, b, 0, plan.sizes.S)


def _visible_ranges(plan: BlockPlan, mask: Mask) -> tuple[Any, Any]:
    """Bounds of the keys that some query sees: numbers, or one for each batch entry, B."""
    rows = Rows(0, plan.sizes.T)
    if mask.is_static:
        return visible_range(mask, 0, rows, plan.sizes)

    def entry_range(b: jax.Array) -> tuple[Any, Any]:
        lo, hi = visible_range(mask, b, rows, plan.sizes)
        return jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32)

    return jax.vmap(entry_range)(jnp.arange(plan.sizes.B, dtype=jnp.int32))


def _per_entry(plan: BlockPlan, q, k, v, rules: Rules, lo: Any, hi: Any) -> Carry:
    """One batch entry after the other, each within its own bounds."""

    def one(_: Any, b: jax.Array) -> tuple[Any, Carry]:
        ends = (x if isinstance(x, int) else x[b] for x in (lo, hi))
        mine = jax.lax.dynamic_slice_in_dim(q, b, 1)
        m, l, o = _loop(plan, mine, k, v, rules, b[None], *ends)
        return (), (m[0], l[0], o[0])

    return jax.lax.scan(one, (), jnp.arange(plan.sizes.B, dtype=jnp.int32))[1]


def _loop(plan: BlockPlan, q, k, v, rules: Rules, b: jax.Array, lo: Any, hi: Any) -> Carry:
    """Key blocks from `lo` to `hi` for the batch entries `b`, whose queries q holds."""
    S, cols, start = plan.sizes.S, plan.cols, _initial_carry(q, k, v, rules)
    # A single block needs neither a loop nor slices.
    if S <= cols:
        k, v = (jnp.swapaxes(x, 1, 2) if plan.layout == "tokens first" else x for x in (k, v))
        return _step(plan, q, k, v, rules, b, Block(b, 0, 0, 0, 1, 1, S), start)

    def step(j: jax.Array, carry: Carry) -> Carry:
        at = jnp.asarray(jnp.minimum(j * cols, S - cols), jnp.int32)
        kb, vb = (_cut(plan, x, b, at) for x in (k, v))
        fresh = j * cols if S % cols else None
        return _step(plan, q, kb, vb, rules, b, Block(b, 0, 0, at, 1, 1, cols, fresh), carry)

    return bounded_loop(lo // cols, (hi + cols - 1) // cols, -(-S // cols), step, start)


def _initial_carry(q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules) -> Carry:
    """m, l and o before the first key."""
    kind, rows = wide(q.dtype), q.shape[:3]
    m, l, o = jnp.full(rows, -jnp.inf, kind), jnp.zeros(rows, kind), (*rows, v.shape[3])
    return unify_varying(((m, l, jnp.zeros(o, kind)), q, k, v, rules))[0]


def _cut(plan: BlockPlan, x: Any, b: jax.Array, at: jax.Array) -> Any:
    """The keys or values of a block, of all batch entries or, on a CPU, of the one in `b`.

    On a CPU the slice is inside a `cond` that is always taken, so that XLA copies whole rows of
    bytes. Fused with the product it would copy element by element, which takes three times as long.
    """
    S, h, cols = plan.sizes.S, x.shape[3], plan.cols
    if isinstance(x, Quantized):
        first = (0 if plan.batched else b[0], 0, at)
        size = (x.shape[0] if plan.batched else 1, x.shape[1], cols)
        first = [jnp.asarray(i, jnp.int32) for i in first]
        scale = jax.lax.dynamic_slice(x.scale, first, size)
        return Quantized(_cut(plan, x.values, b, at), scale)
    if plan.batched:
        return jax.lax.dynamic_slice_in_dim(x, at, cols, axis=2)
    heads, token = ((x.shape[1],), h) if plan.layout == "heads first" else ((), x.shape[2] * h)
    # Tokens and components as one axis: the slice is one contiguous run of bytes.
    flat = x.reshape(-1, *heads, S * token)

    def rows(at: Any) -> jax.Array:
        first = (b[0], *[jnp.int32(0) for _ in heads], at * token)
        rows_of_entry = jax.lax.dynamic_slice(flat, first, (1, *heads, cols * token))
        return rows_of_entry.astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype)

    # Both branches compute the same, and the second is never taken.
    block = jax.lax.cond(at < S, rows, lambda at: rows(0 * at), at)
    if plan.layout == "heads first":
        return block.reshape(1, *heads, cols, h)
    return jnp.swapaxes(block.reshape(1, cols, -1, h), 1, 2)


def _step(plan: BlockPlan, q, kb, vb, rules: Rules, b: jax.Array, at: Block, carry: Carry) -> Carry:
    """One step of the online softmax."""
    m, l, o = carry
    kind, shape = m.dtype, (b.shape[0], plan.sizes.N, plan.sizes.T, at.cols)
    at = at._replace(G=shape[1], rows=shape[2])

    def change(b: jax.Array, x: jax.Array) -> jax.Array:
        here = at._replace(b=b)
        return modify_logits(local(rules.score, here), x, here)

    x = _for_each_entry(change, b, _logits(plan, q, kb, rules).reshape(shape))
    shown = None
    if at.fresh is not None or not _all_visible(plan, rules.mask):
        shown = _for_each_entry(lambda b: visible_once(rules.mask, at._replace(b=b)), b)
        x = jnp.where(shown, x, -jnp.inf)
    x = x.reshape(*m.shape, at.cols)
    # Before its first visible key a row has m = -inf; subtracting 0 then avoids inf - inf.
    new = jnp.maximum(m, jnp.max(x, axis=3))
    shift = jnp.where(new == -jnp.inf, 0, new)
    p = jnp.exp(at_most(x, shift[..., None]) - shift[..., None])
    alpha = jnp.exp(m - shift)
    l = alpha * l + jnp.sum(p, axis=3)
    # Dropout comes after the sum: the weights are normalised as if nothing was dropped.
    if rules.dropout is not None:
        p = rules.dropout.apply(p.reshape(shape), _dropout_keep(rules.dropout, b, at))
    pv = _weighted_sum(plan, p.reshape(x.shape), *_values_and_scale(vb, kind), shown)
    return new, l, alpha[..., None] * o + pv


def _all_visible(plan: BlockPlan, mask: Mask) -> bool:
    lo, hi = static_fully_visible_range(mask, Rows(0, plan.sizes.T), plan.sizes)
    return hi - lo == plan.sizes.S


def _for_each_entry(fn: Any, b: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`fn` for every entry of `b`; for a single one without vmap, so that slices stay slices."""
    if b.shape[0] == 1:
        return fn(b[0], *(x[0] for x in arrays))[None]
    return jax.vmap(fn)(b, *arrays)


def _dropout_keep(dropout: Drop, b: jax.Array, at: Block) -> jax.Array:
    """Dropout mask of the block, B N T C."""
    if isinstance(dropout, DropoutMask):
        return _for_each_entry(lambda b: dropout_keep(dropout, at._replace(b=b)), b)
    n, q, k = (x[None] for x in at._replace(b=0).indices()[1:])
    # The draw has no batching rule over b alone, so all entries are drawn at once.
    return dropout.keep(b.reshape(-1, 1, 1, 1), n, q, k)


def _logits(plan: BlockPlan, q, kb, rules: Rules) -> Float[Array, "B K R C"]:
    """`scale * q.k`; in float32 or wider the scale is applied to the queries, which are fewer."""
    kind = wide(q.dtype)
    scale = jnp.asarray(rules.scale, kind)
    # Accelerators multiply 16-bit inputs and sum in float32; scaled queries would be rounded.
    if plan.batched and q.dtype == kb.dtype != kind:
        return jnp.einsum("bkrh,bkch->bkrc", q, kb, preferred_element_type=kind) * scale
    kb, factor = _values_and_scale(kb, kind)
    q = q.astype(kind) * scale
    if plan.batched or q.shape[2] == 1:
        x = jnp.einsum("bkrh,bkch->bkrc", q, kb)
    else:  # keys as rows of the product are faster on a CPU
        x = jnp.swapaxes(jnp.einsum("bkch,bkrh->bkcr", kb, q), 2, 3)
    return x if factor is None else x * factor


def _values_and_scale(x: Any, kind: Any) -> tuple[jax.Array, Any]:
    """Values of a block, and their quantisation scale as `B K 1 C`, or None."""
    if isinstance(x, Quantized):
        return x.values.astype(kind), x.scale[:, :, None].astype(kind)
    return x.astype(kind), None


def _weighted_sum(plan: BlockPlan, p, vb, factor: Any, shown: Any) -> Float[Array, "B K R h"]:
    """`p.v`, with zeros for masked values: a weight of 0 times NaN would be NaN.

    Zeroing copies the values, so on a CPU it is done only if the plain product is not finite.
    """

    def product(p: jax.Array, vb: jax.Array, factor: Any) -> jax.Array:
        return jnp.einsum("bkrc,bkch->bkrh", p if factor is None else p * factor, vb)

    def zero_masked() -> jax.Array:
        any_visible = shown.reshape(p.shape).any(axis=2)
        some = None if factor is None else jnp.where(any_visible[:, :, None], factor, 0)
        return product(p, jnp.where(any_visible[..., None], vb, 0), some)

    hides = shown is not None and plan.hides_keys
    if hides and plan.batched:
        return zero_masked()
    pv = product(p, vb, factor)
    return jax.lax.cond(jnp.isfinite(pv).all(), lambda: pv, zero_masked) if hides else pv
