"""Few queries on many keys, as a cache has them: one loop over blocks of keys, all heads at once.

    x  = score(scale * q.k)                    B K R C, where R is G query heads times T queries
    m' = max(m, max x)                         p = exp(x - m')
    l' = exp(m - m') l + sum p                 o' = exp(m - m') o + p.v

Keys and values are read only from the first to the last block that some query sees. On a CPU every
batch entry has a loop with bounds of its own, so that a long row costs the others nothing.

Products want each head as a matrix, `B K S H`, as a cache stores it. There, where most keys are
seen, one block of all keys is quicker: XLA reads a whole array as it lies, but copies what is cut
from one. `B S K H`, as users hand it in, is turned block by block, while a block is in the
processor's cache: to turn all of it first takes three times as long, and as much memory again.
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
from .plan import Plan, static_fully_visible_range

MAX_SINGLE_BLOCK_ROWS = 8  # rows of a key head, up to which all keys may be one block
MIN_KEY_SHARE = 0.4  # of the keys: from here on they are

Carry = tuple[jax.Array, jax.Array, jax.Array]  # m and l, B K R, and o, B K R h


def untransposed(plan: Plan, k: jax.Array, v: jax.Array) -> tuple[Plan, jax.Array, jax.Array]:
    """The plan, keys and values, without the turn of both from `B K S H` just before, if any."""
    stored = [_transposed_from(x) for x in (k, v)]
    if any(x is None for x in stored):
        return plan, k, v
    return plan._replace(layout="heads first"), *stored


def _transposed_from(x: Any) -> Any:
    """`B K S H`, if the program has just turned it into x, `B S K H`; None if not.

    XLA would turn all of it, and turn back what is read. JAX shows from which operation a traced
    array comes, but promises no name for it: where it shows none, x is taken as it is.
    """
    before, operation = x, _producing_equation(x)
    if "new_sizes" in operation.params:  # many batch axes are made one in between
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
    """From which operation a traced array comes, as JAX shows it."""
    return getattr(x, "parent", None) or SimpleNamespace(params={})


def forward_decode(
    plan: Plan,
    q: Float[Array, "B T N H"],
    k: Any,
    v: Any,
    rules: Rules,
) -> tuple[Float[Array, "B T N h"], Float[Array, "B N T"], Float[Array, "B N T"]]:
    """Output, m and l, all in float32 or wider and before the sinks.

    k and v lie as `plan.layout` says: `B S K H` and `B S K h`, or `B K S H`, also `Quantized`.
    """
    (B, T, N, H), G = q.shape, plan.groups
    rows = jnp.moveaxis(q.reshape(B, T, N // G, G, H), 1, 3).reshape(B, N // G, G * T, H)
    if plan.layout == "tokens first" and plan.batched:  # accelerators read any layout
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        plan = plan._replace(layout="heads first")
    m, l, o = _loop_keys(plan, rows, k, v, rules)
    o = o / jnp.where(l == 0, 1, l)[..., None]
    return jnp.moveaxis(o.reshape(B, N, T, -1), 1, 2), m.reshape(B, N, T), l.reshape(B, N, T)


def _loop_keys(plan: Plan, q, k, v, rules: Rules) -> Carry:
    B, S = plan.sizes.B, plan.sizes.S
    b = jnp.arange(B, dtype=jnp.int32)
    lo, hi = _visible_ranges(plan, rules.mask)
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
    if isinstance(lo, int):
        most = hi - lo >= int(MIN_KEY_SHARE * S)
    else:  # B may be a symbol
        most = jnp.sum(jnp.maximum(hi - lo, 0)) >= int(MIN_KEY_SHARE * S) * B
    if most is False:
        return per_entry()
    whole = _cond(
        most, lambda: _single_block(plan, q, k, v, rules, b), lambda: _initial_carry(q, k, v, rules)
    )
    if plan.hides_keys:  # a number that nobody sees is looked for where the output is not finite
        most = most & jnp.isfinite(whole[2]).all()
    return _cond(most, lambda: whole, per_entry)


def _cond(condition: Any, yes: Any, no: Any) -> Carry:
    return yes() if condition is True else jax.lax.cond(condition, yes, no)


def _single_block(plan: Plan, q, k, v, rules: Rules, b: jax.Array) -> Carry:
    """All keys of all batch entries as one block."""
    plan = plan._replace(cols=plan.sizes.S, hides_keys=False)
    return _loop(plan, q, k, v, rules, b, 0, plan.sizes.S)


def _visible_ranges(plan: Plan, mask: Mask) -> tuple[Any, Any]:
    """First key that a query sees and end of the last: numbers, or of each batch entry, B."""
    rows = Rows(0, plan.sizes.T)
    if mask.is_static:
        return visible_range(mask, 0, rows, plan.sizes)

    def entry_range(b: jax.Array) -> tuple[Any, Any]:
        lo, hi = visible_range(mask, b, rows, plan.sizes)
        return jnp.asarray(lo, jnp.int32), jnp.asarray(hi, jnp.int32)

    return jax.vmap(entry_range)(jnp.arange(plan.sizes.B, dtype=jnp.int32))


def _per_entry(plan: Plan, q, k, v, rules: Rules, lo: Any, hi: Any) -> Carry:
    """One batch entry after the other, each as far as its own queries see."""

    def one(_: Any, b: jax.Array) -> tuple[Any, Carry]:
        ends = (x if isinstance(x, int) else x[b] for x in (lo, hi))
        mine = jax.lax.dynamic_slice_in_dim(q, b, 1)
        m, l, o = _loop(plan, mine, k, v, rules, b[None], *ends)
        return (), (m[0], l[0], o[0])

    return jax.lax.scan(one, (), jnp.arange(plan.sizes.B, dtype=jnp.int32))[1]


def _loop(plan: Plan, q, k, v, rules: Rules, b: jax.Array, lo: Any, hi: Any) -> Carry:
    """The blocks from key `lo` to `hi` for the batch entries `b`, whose queries are given."""
    S, cols, start = plan.sizes.S, plan.cols, _initial_carry(q, k, v, rules)
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
    """m, l and o of queries that have seen nothing."""
    kind, rows = wide(q.dtype), q.shape[:3]
    m, l, o = jnp.full(rows, -jnp.inf, kind), jnp.zeros(rows, kind), (*rows, v.shape[3])
    return unify_varying(((m, l, jnp.zeros(o, kind)), q, k, v, rules))[0]


def _cut(plan: Plan, x: Any, b: jax.Array, at: jax.Array) -> Any:
    """The keys or values of a block, of all batch entries or, on a CPU, of the one in `b`.

    There it is a branch of its own that is always taken: XLA then copies whole rows of bytes, and
    number by number, which takes three times as long, where it fuses the cut with the product.
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
    flat = x.reshape(-1, *heads, S * token)

    def rows(at: Any) -> jax.Array:
        first = (b[0], *[jnp.int32(0) for _ in heads], at * token)
        rows_of_entry = jax.lax.dynamic_slice(flat, first, (1, *heads, cols * token))
        return rows_of_entry.astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype)

    block = jax.lax.cond(at < S, rows, lambda at: rows(0 * at), at)
    if plan.layout == "heads first":
        return block.reshape(1, *heads, cols, h)
    return jnp.swapaxes(block.reshape(1, cols, -1, h), 1, 2)


def _step(plan: Plan, q, kb, vb, rules: Rules, b: jax.Array, at: Block, carry: Carry) -> Carry:
    """The online softmax, one block further."""
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
    new = jnp.maximum(m, jnp.max(x, axis=3))
    shift = jnp.where(new == -jnp.inf, 0, new)
    p = jnp.exp(at_most(x, shift[..., None]) - shift[..., None])
    alpha = jnp.exp(m - shift)
    l = alpha * l + jnp.sum(p, axis=3)
    if rules.dropout is not None:
        p = rules.dropout.apply(p.reshape(shape), _dropout_keep(rules.dropout, b, at))
    pv = _weighted_sum(plan, p.reshape(x.shape), *_values_and_scale(vb, kind), shown)
    return new, l, alpha[..., None] * o + pv


def _all_visible(plan: Plan, mask: Mask) -> bool:
    lo, hi = static_fully_visible_range(mask, Rows(0, plan.sizes.T), plan.sizes)
    return hi - lo == plan.sizes.S


def _for_each_entry(fn: Any, b: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`fn` for every batch entry of `b`; of a single one slices stay slices."""
    if b.shape[0] == 1:
        return fn(b[0], *(x[0] for x in arrays))[None]
    return jax.vmap(fn)(b, *arrays)


def _dropout_keep(dropout: Drop, b: jax.Array, at: Block) -> jax.Array:
    """Which of the block's elements survive, B N T C."""
    if isinstance(dropout, DropoutMask):
        return _for_each_entry(lambda b: dropout_keep(dropout, at._replace(b=b)), b)
    n, q, k = (x[None] for x in at._replace(b=0).indices()[1:])
    return dropout.keep(b.reshape(-1, 1, 1, 1), n, q, k)  # jax cannot map this draw over b alone


def _logits(plan: Plan, q, kb, rules: Rules) -> Float[Array, "B K R C"]:
    """`scale * q.k`; the scale goes to the queries where that rounds nothing away."""
    kind = wide(q.dtype)
    scale = jnp.asarray(rules.scale, kind)
    if plan.batched and q.dtype == kb.dtype != kind:  # whose products are quick when narrow
        return jnp.einsum("bkrh,bkch->bkrc", q, kb, preferred_element_type=kind) * scale
    kb, factor = _values_and_scale(kb, kind)
    q = q.astype(kind) * scale
    if plan.batched or q.shape[2] == 1:
        x = jnp.einsum("bkrh,bkch->bkrc", q, kb)
    else:  # quicker on a CPU
        x = jnp.swapaxes(jnp.einsum("bkch,bkrh->bkcr", kb, q), 2, 3)
    return x if factor is None else x * factor


def _values_and_scale(x: Any, kind: Any) -> tuple[jax.Array, Any]:
    """The numbers of a block, and their scale as `B K 1 C`, or None."""
    if isinstance(x, Quantized):
        return x.values.astype(kind), x.scale[:, :, None].astype(kind)
    return x.astype(kind), None


def _weighted_sum(plan: Plan, p, vb, factor: Any, shown: Any) -> Float[Array, "B K R h"]:
    """`p.v`, with zeros in place of values that nobody sees: NaN times no weight is NaN.

    On a CPU they are looked for only where the product is not finite, since that is a copy.
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
