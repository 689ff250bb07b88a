"""Ring attention (Liu et al., 2023): keys and values rotate among the devices of a mesh axis.

Forward, each step attends to the current shard of keys and merges two partial softmaxes by m and l:

    m = max(m1, m2)      l = l1 exp(m1 - m) + l2 exp(m2 - m)
    o = (o1 l1 exp(m1 - m) + o2 l2 exp(m2 - m)) / l

Backward, the keys rotate again and their gradients with them: every step computes its weights from
the m and l of the whole row, so that the gradients of the steps add up. Sinks are added to m and l
once, at the end. The next shard of keys is sent while a step is computed.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._internal.arrays import is_float, unify_varying, zero_to_one
from .._internal.types import Sizes, leaf_axes, wide
from ..backends import blockwise
from ..backends.blockwise.plan import make_plan
from ..backends.local import flat
from ..backends.protocol import zero_gradient
from ..places import Places
from ..reference import Stats
from ..rules import Rules, sizes_of
from ..where import platform_of
from .sequence import Sequence
from .specs import letters

Part = tuple[jax.Array, jax.Array, jax.Array]  # o, B T N h, and m and l, B N T


class Ring(NamedTuple):
    """Static facts of one ring.

    Attributes:
      structure: of the rules, which are not bound.
      travels: for each leaf of the rules, whether it is sharded along the keys and sent with them.
      cut: for each leaf, the axis of length S of all keys that a step slices; or None.
      sizes, width: of one device's queries and one device's keys.
    """

    sequence: Sequence
    structure: Any
    travels: tuple[bool, ...]
    cut: tuple[int | None, ...]
    sizes: Sizes
    width: int
    plan: Any = None

    def bind_rules(self, leaves: list, places: Places, step: Any) -> Rules:
        """Rules of a step, whose keys are those `ahead - step` shards from this device."""
        sequence, S = self.sequence, self.sizes.S
        me = jax.lax.axis_index(sequence.axis)
        # The global index of the first key of this step's shard.
        first = (me + sequence.ahead - step) % sequence.devices * S
        parts = [
            x if axis is None else jax.lax.dynamic_slice_in_dim(x, first, S, axis)
            for x, axis in zip(leaves, self.cut, strict=True)
        ]
        rules: Rules = self.structure.unflatten(parts)
        return rules.at(places).bind(self.sizes, self.width)

    def send(self, tree: Any, by: int = 1) -> Any:
        """`tree` of the device `by` places before this one."""
        count = self.sequence.devices
        if by % count == 0:
            return tree
        pairs = [(i, (i + by) % count) for i in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.sequence.axis, pairs), tree)

    def split(self, leaves: list) -> tuple[list, list]:
        """Leaves that stay, with None for those that travel, and leaves that travel."""
        pairs = list(zip(leaves, self.travels, strict=True))
        return [None if goes else x for x, goes in pairs], [x for x, goes in pairs if goes]

    def joined(self, stay: list, travel: list) -> list:
        """Inverse of `split`."""
        travelling = iter(travel)
        pairs = zip(stay, self.travels, strict=True)
        return [next(travelling) if goes else x for x, goes in pairs]


def ring(
    sequence: Sequence, places: Places, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules
) -> tuple[jax.Array, Stats]:
    """Output `*B T N h` and softmax statistics `*B N T` of one device's queries."""
    # Sinks count once in a row, not once in every step.
    sizes, sinks = sizes_of(q, k), rules.sinks
    rules, places = replace(rules, sinks=None), places.bind(sizes)
    leaves, structure = jax.tree.flatten(rules)
    axes = [
        _key_axis(letters(axes, jnp.ndim(x), len(sizes.batch)))
        for axes, x in zip(leaf_axes(rules), leaves, strict=True)
    ]
    counts = [None if i is None else jnp.shape(x)[i] for i, x in zip(axes, leaves, strict=True)]
    # A leaf as long as one shard of keys travels; one as long as all keys is sliced in place.
    goes = tuple(n == sizes.S for n in counts)
    whole = sizes.S * sequence.devices
    cut = tuple(i if n == whole > sizes.S else None for i, n in zip(axes, counts, strict=True))
    made = Ring(sequence, structure, goes, cut, sizes, q.shape[-1])
    plan = make_plan(sizes, k.shape[-2], made.bind_rules(leaves, places, 0), platform_of(q))
    # Gradients of several steps are added, so each stays in float32 or wider.
    made = made._replace(plan=plan._replace(adds=True))
    stay, travel = made.split(leaves)
    q, k, v = flat(sizes, q, k, v)
    outputs: Any = _attend(made, *unify_varying((q, k, v, sinks, places, stay, travel)))
    o, m, l = (x.reshape(*sizes.batch, *x.shape[1:]) for x in jax.tree.leaves(outputs))
    return o, Stats(m, l)


def _key_axis(mine: list[str]) -> int | None:
    return mine.index("k") if "k" in mine else None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: Ring, *operands: Any) -> tuple[jax.Array, Stats]:
    return _forward(ring, *operands)[0]


def _forward(ring: Ring, q, k, v, sinks, places: Places, stay: list, travel: list) -> Any:
    def add(total: Part, pair: Any, step: Any) -> Part:
        k, v, travel = pair
        rules = ring.bind_rules(ring.joined(stay, travel), places, step)
        return merge_softmax(total, blockwise.forward_pass(ring.plan, q, k, v, rules))

    part = _around_ring(ring, add, _empty_part(q, k, v, stay), (k, v, travel))
    o, stats = blockwise.with_sinks(sinks, *part)
    residuals = (q, k, v, sinks, places, stay, travel), (o, *part[1:])
    return (o.astype(q.dtype), stats), residuals


def _empty_part(q: jax.Array, *rest: Any) -> Part:
    """Output, m and l of a softmax over no keys."""
    (B, T, N, _), v, kind = q.shape, rest[1], wide(q.dtype)
    m, l = jnp.full((B, N, T), -jnp.inf, kind), jnp.zeros((B, N, T), kind)
    return unify_varying((jnp.zeros((B, T, N, v.shape[3]), kind), m, l, q, rest))[:3]


def _around_ring(ring: Ring, add: Any, total: Any, pair: Any) -> Any:
    """Scans `total = add(total, pair, step)` over the shards of keys."""
    steps = ring.sequence.steps

    def step(state: Any, i: jax.Array) -> Any:
        total, pair = state
        # Sent before the step is computed, so that the transfer overlaps with it.
        following = ring.send(pair)
        return (add(total, pair, i), following), None

    start = total, ring.send(pair, -ring.sequence.ahead)
    # The last step sends nothing on.
    (total, pair), _ = jax.lax.scan(step, start, jnp.arange(steps - 1, dtype=jnp.int32))
    return add(total, pair, steps - 1)


def merge_softmax(one: Part, two: Part) -> Part:
    """Merges the softmaxes over two sets of keys."""
    m = jnp.maximum(one[1], two[1])
    # A row that is fully masked in both has m = -inf; 0 avoids inf - inf.
    shift = jnp.where(m == -jnp.inf, 0, m)
    first, second = (l * jnp.exp(m - shift) for _, m, l in (one, two))
    l = first + second

    def by_row(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x / zero_to_one(l), 1, 2)[..., None]

    return one[0] * by_row(first) + two[0] * by_row(second), m, l


def _backward(ring: Ring, residuals: tuple, cotangents: tuple) -> tuple:
    (q, k, v, sinks, places, stay, travel), (o, m, l) = residuals
    do, dstats = cotangents
    # o, m and l are those of whole rows, so delta and the weights of each step are too.
    rows, dsinks = blockwise.row_statistics(sinks, o, m, l, do, dstats.l)

    def add(state: Any, pair: Any, step: Any) -> Any:
        (dq, dstay), came = state
        # The gradients follow their keys from device to device and grow by each device's part.
        came = ring.send(came)
        gradients = _step_gradients(ring, q, do, rows, places, stay, pair, step)
        return jax.tree.map(_add, ((dq, dstay), came), gradients)

    zeros = ((q, _floats(stay)), (k, v, _floats(travel)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), zeros)
    zeros = unify_varying((zeros, q))[0]
    (dq, dstay), came = _around_ring(ring, add, zeros, (k, v, travel))
    # One more send brings the gradients home to the device that holds the keys.
    dk, dv, dtravel = ring.send(came, ring.sequence.ahead - ring.sequence.steps + 1)
    grads = (dq, dk, dv, dsinks, places, _with_floats(stay, dstay), _with_floats(travel, dtravel))
    return jax.tree.map(_cotangent, (q, k, v, sinks, places, stay, travel), grads)


_attend.defvjp(_forward, _backward)


def _step_gradients(ring: Ring, q, do, rows, places: Places, stay, pair: Any, step: Any) -> Any:
    """`(dq, dstay), (dk, dv, dtravel)` of one step."""
    k, v, travel = pair

    def bind(stay_: list, travel_: list) -> Rules:
        leaves = ring.joined(_with_floats(stay, stay_), _with_floats(travel, travel_))
        return ring.bind_rules(leaves, places, step)

    # Binding slices the leaves: its vjp puts their gradients into the right places.
    rules, pull = jax.vjp(bind, _floats(stay), _floats(travel))
    dq, dk, dv, drules = blockwise.gradients(ring.plan, q, k, v, rules, do, rows)
    dstay, dtravel = pull(drules)
    return (dq, dstay), (dk, dv, dtravel)


def _add(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)


def _floats(leaves: list) -> list:
    return [x for x in leaves if is_float(x)]


def _with_floats(leaves: list, floats: list) -> list:
    """The leaves with their floating arrays replaced."""
    values = iter(floats)
    return [next(values) if is_float(x) else x for x in leaves]


def _cotangent(x: jax.Array, gradient: Any) -> Any:
    return gradient.astype(x.dtype) if is_float(x) else zero_gradient(x)
