"""Shared wrapper of other libraries' kernels, so that each keeps every guarantee of `attend`.

A kernel here is two functions: one returns the output and each row's maximum m and sum l, the other
the gradients of q, k and v from these and the output's cotangent. A kernel that returns only
lse = m + log(l) uses lse as m and 1 as l. The wrapper adds, once for all kernels:

    sinks       added to m and l afterwards (see `sinks`); gradients are computed from these
    dlse        ds = p * (do.v - (rowsum(do * o) - dlse)): `with_dlse`, if a kernel takes no dlse
    masked      zeros for fully masked queries and keys, so that NaN in them does not spread
"""

import math
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from .. import taps
from .._internal.arrays import saturating_add, unify_varying
from .._internal.types import Sizes
from ..masks import Band, Mask
from ..masks.ranges import as_known_band, runs_of
from ..masks.stored_keys import StoredKeys
from ..reference import Stats
from ..rules import Request, Rules, sizes_of
from ..token_layouts import named_for
from .sinks import add_sinks, gradient, output_share

# Queries times keys of a head, up to which the plain formula is as fast as a kernel, and as blocks.
MAX_REFERENCE_PAIRS, MAX_PAIRS_BEFORE_BLOCKS = 256 * 256, 128 * 128 - 1
# Bytes of keys and values a query, up to which it may copy them, also where blocks would not.
MAX_COPIED_BYTES, MAX_DECODE_COPIED_BYTES = 2**20, 2**16
MAX_DECODE_ROWS = 64  # queries of all heads that share a key head, in decoding
MASK_ROWS = 256  # queries for which a mask is evaluated at once
NO_POSITIONS = "takes no q_positions and kv_positions; blockwise and reference do"
Grads = tuple[jax.Array, jax.Array, jax.Array]


def passed_over(request: Request, by_blocks: bool = False) -> str | None:
    """Why "auto" prefers the plain formula although a backend could serve, or None.

    Up to some weights a head the plain formula is as fast as a kernel, and up to fewer as blocks in
    plain JAX, unless it would copy too many bytes of keys and values a query: blocks read a cache
    in place while decoding on a CPU. And only it has weights that `listen` can record.
    """
    if taps.listening():
        return "listen() needs the weights"
    T, S, copied = request.q.shape[-3], request.k.shape[-3], bytes_of(request.k, request.v)
    few = by_blocks and copied > MAX_DECODE_COPIED_BYTES * T and request.where.platform == "cpu"
    if few and is_decode_step(request.sizes, request.k.shape[-2]):
        return None
    pairs = MAX_PAIRS_BEFORE_BLOCKS if by_blocks else MAX_REFERENCE_PAIRS
    if T * S <= pairs and copied <= MAX_COPIED_BYTES * T:
        return f"the plain formula is as fast for {T} x {S} weights"
    return None


def bytes_of(*arrays: Any) -> int:
    """Bytes of arrays, without the axes that `jax.export` has left symbolic.

    >>> bytes_of(jnp.ones((3, 5)), jnp.ones(2, jnp.int8))
    62
    """
    counts = ([n for n in x.shape if isinstance(n, int)] for x in arrays)
    return sum(math.prod(n) * x.dtype.itemsize for n, x in zip(counts, arrays, strict=True))


def is_decode_step(sizes: Sizes, key_heads: int) -> bool:
    """Whether reading the keys dominates the cost: few queries share a key head."""
    return isinstance(sizes.T, int) and sizes.T * (sizes.N // key_heads) <= MAX_DECODE_ROWS


def is_number(x: Any) -> bool:
    """Whether `x` is static at trace time: a number, not an array."""
    return isinstance(x, int | float | np.number)


def of_mesh(request: Request) -> str | None:
    """Why a Pallas kernel cannot run on the devices of a request, or None.

    A Pallas call declares no varying axes for its output, and XLA cannot partition it.
    """
    x, mesh = request.q, request.where.mesh
    if mesh.size > 1 and jax.sharding.AxisType.Auto in mesh.axis_types and named_for(x) is None:
        return (
            "cannot be cut along mesh axes of type Auto; give the mesh Explicit axes, which is "
            "jax.make_mesh's default, name the axes by flax_attn.sharding.on, or call attend "
            "inside a jax.shard_map"
        )
    varies = jax.typeof(x).manual_axis_type.varying
    return "needs check_vma=False in the shard_map around it" if varies else None


# Fully masked queries and keys.


def visible_rows_and_keys(mask: Mask, sizes: Sizes) -> tuple[Any, Any]:
    """Queries that see a key, `B|1 T`, and keys that some query sees, `B|1 S`; None for all.

    For a bound mask that depends neither on the head nor on an array of weights.
    """
    # A band or ranges have a closed form; any other mask is evaluated in pieces.
    band = as_known_band(mask)
    if band is None:
        runs = runs_of(mask, np.arange(sizes.T, dtype=np.int32)[None])
        return (
            _visible_by_rows(mask, sizes) if runs is None else _visible_in_runs(mask, runs, sizes)
        )
    rows, keys = (
        None if isinstance(x, np.ndarray) and x.all() else jnp.asarray(x)
        for x in visible_in_band(band, sizes)
    )
    return rows, keys


def _visible_by_rows(mask: Mask, sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """The same for any mask, `MASK_ROWS` queries at a time: never an array of T x S."""
    b, n, _, k = sizes._replace(N=1).iotas()
    rows = min(MASK_ROWS, sizes.T)

    def step(keys: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The last piece overlaps the one before it; `any` over keys does not mind.
        q = jnp.minimum(at * rows, sizes.T - rows) + jnp.arange(rows, dtype=jnp.int32)
        visible = mask(b, n, q.reshape(1, 1, rows, 1), k)
        visible = jnp.broadcast_to(visible, (sizes.B, 1, rows, sizes.S)).squeeze(1)
        return keys | visible.any(axis=1), visible.any(axis=2)

    count = -(-sizes.T // rows)
    keys = unify_varying((jnp.zeros((sizes.B, sizes.S), bool), mask))[0]
    keys, seeing = jax.lax.scan(step, keys, jnp.arange(count, dtype=jnp.int32))
    whole = jnp.moveaxis(seeing[:-1], 0, 1).reshape(sizes.B, (count - 1) * rows)
    last = seeing[-1][:, count * rows - sizes.T :]  # without its overlap
    return jnp.concatenate([whole, last], axis=1), keys


def _visible_in_runs(
    mask: Mask, runs: tuple[Any, Any], sizes: Sizes
) -> tuple[jax.Array, jax.Array]:
    """Rows with a visible key, and visible keys, where each row sees one range of keys.

    Visible keys are counted by a cumulative sum: +1 where a range begins, -1 where it ends.
    """
    first, end = (
        jnp.broadcast_to(most if x is None else jnp.clip(x, 0, sizes.S), (sizes.B, sizes.T))
        for x, most in zip(runs, (0, sizes.S), strict=True)
    )
    # A range may still be hidden by the rest of the mask: evaluate it at the range's first key.
    b, n, q, _ = sizes._replace(N=1).iotas()
    sees = mask(b, n, q, first[:, None, :, None])
    sees = jnp.broadcast_to(sees, (sizes.B, 1, sizes.T, 1)).squeeze((1, 3))
    rows = (first < end) & sees
    steps, entry = jnp.zeros((sizes.B, sizes.S), jnp.int32), jnp.arange(sizes.B)[:, None]
    # A step behind the last key is dropped.
    steps = steps.at[entry, first].add(rows.astype(jnp.int32), mode="drop")
    steps = steps.at[entry, end].add(-rows.astype(jnp.int32), mode="drop")
    return rows, jnp.cumsum(steps, axis=1) > 0


def visible_in_band(band: Band, sizes: Sizes) -> tuple[Any, Any]:
    """Rows with a visible key, and visible keys, of a band; numpy arrays without lengths."""
    q, k = (np.arange(n, dtype=np.int32)[None] for n in (sizes.T, sizes.S))
    rows, kv = (_column(n, most) for n, most in ((band.rows, sizes.T), (band.kv, sizes.S)))
    # A query sees keys from q + lo to q + hi; a key is seen by queries from k - hi to k - lo.
    first, last = _shifted(q, band.lo, 0), _shifted(q, band.hi, sizes.S)
    sees = (q < rows) & (np.maximum(first, 0) <= _least(last, kv - 1))
    first, last = _shifted(k, band.hi, 0, -1), _shifted(k, band.lo, sizes.T, -1)
    return sees, (k < kv) & (np.maximum(first, 0) <= _least(last, rows - 1))


def _column(count: Any, most: int) -> Any:
    if count is None or isinstance(count, int | np.integer):
        return most if count is None else min(int(count), most)
    return jnp.clip(count, 0, most)[:, None]


def _shifted(at: np.ndarray, by: int | None, default: int, sign: int = 1) -> np.ndarray:
    return np.full_like(at, default) if by is None else saturating_add(at, sign * by)


def _least(a: np.ndarray, b: Any) -> Any:
    return np.minimum(a, b) if isinstance(b, int) else jnp.minimum(a, b)


# The kernel.


def of_lse(lse: jax.Array) -> Stats:
    """Softmax statistics from a log-sum-exp alone: m = lse, l = 1."""
    return Stats(lse, jnp.ones_like(lse))


@runtime_checkable
class Kernel(Protocol):
    """A kernel for one kind of request; hashable, so that it compiles once.

    `extras` are its other arrays: lengths, ids, biases. `fully_masked` says whether a query may be
    fully masked although the mask shows it a key, as by a bias of -inf; its lse is -inf then.
    """

    @property
    def fully_masked(self) -> bool: ...

    def run(self, q: Any, k: Any, v: Any, extras: Any) -> tuple[jax.Array, "Stats"]:
        """Output in the dtype of q, and m and l of each row."""
        ...

    def backward(
        self, q: Any, k: Any, v: Any, extras: Any, o: Any, stats: "Stats", do: Any, dlse: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """Gradients of q, k, v and `extras`; `dlse` is None if nothing depends on the lse."""
        ...


def serve(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rules, extras: Any = ()
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of a kernel, with sinks and with zeros in fully masked rows."""
    # Kernels compute 0 * x for masked x, so NaN in it is replaced before they run.
    rows, keys = visible_rows_and_keys(rules.mask, sizes_of(q, k))
    if rows is not None:
        q = jnp.where(rows[:, :, None, None], q, 0)
    if keys is not None and not isinstance(rules.mask, StoredKeys):
        k, v = (jnp.where(keys[:, :, None, None], x, 0) for x in (k, v))
    return _run(kernel, *unify_varying((q, k, v, extras, rules.sinks, rows)))


@partial(jax.jit, static_argnums=0)
def _run(kernel: Kernel, *args: Any) -> tuple[jax.Array, jax.Array]:
    return _serve(kernel, *args)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _serve(kernel: Kernel, *args: Any) -> tuple[jax.Array, jax.Array]:
    return _forward(kernel, *args)[0]


def _forward(kernel: Kernel, q, k, v, extras, sinks, rows) -> Any:
    # Kernels differ in what they return for fully masked rows: here they are zero, with lse -inf.
    o, stats = kernel.run(q, k, v, extras)  # B T N h, B N T
    dead = stats.m == -jnp.inf if kernel.fully_masked or rows is not None else None
    if rows is not None:
        dead = dead | ~rows[:, None]
    if dead is not None:
        o = jnp.where(_rows_last(dead), 0, o)
        stats = Stats(jnp.where(dead, -jnp.inf, stats.m), jnp.where(dead, 0, stats.l))
    if sinks is not None:
        without_sinks, stats = stats, add_sinks(stats, sinks)
        o = (
            o.astype(without_sinks.m.dtype) * _rows_last(output_share(without_sinks, stats))
        ).astype(o.dtype)
    return (o, stats.lse), (q, k, v, extras, sinks, rows, dead, o, stats)


def _residuals(kernel: Kernel, *args: Any) -> Any:
    return _forward(kernel, *custom_vjp_primal_tree_values(args))


def _backward(kernel: Kernel, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, extras, sinks, rows, dead, o, stats = residuals
    # Symbolic zeros spare a second kernel call where nothing depends on the lse.
    do, dlse = cotangents
    dlse = None if isinstance(dlse, SymbolicZero) else dlse
    do = jnp.zeros_like(o) if isinstance(do, SymbolicZero) else do
    if dead is not None:
        do = jnp.where(_rows_last(dead), 0, do)
    dsinks = None if sinks is None else gradient(sinks, stats, _delta(o, stats, do, dlse))
    # Finite statistics keep exp(score - m) / l finite; `do` is zero in these rows already.
    if dead is not None:
        dlse = None if dlse is None else jnp.where(dead, 0, dlse)
        stats = Stats(jnp.where(dead, 0, stats.m), jnp.where(dead, 1, stats.l))
    *grads, dgiven = kernel.backward(q, k, v, extras, o, stats, do, dlse)
    return *grads, dgiven, dsinks, jax.tree.map(zero_gradient, rows)


_serve.defvjp(_residuals, _backward, symbolic_zeros=True)


def with_dlse(vjp: Any, v: jax.Array, o: jax.Array, do: jax.Array, dlse: Any) -> Grads:
    """`dq, dk, dv` of a kernel `vjp(v, o, do)` that takes no dlse, by a second call if needed.

    The second call passes v = 0 and do = 1, so that do.v = 0, and -dlse as o, so that
    rowsum(do * o) = -dlse. o holds -dlse in several columns, whose sum has all of its bits even in
    a narrow dtype.
    """
    dq, dk, dv = vjp(v, o, do)
    if dlse is None:
        return dq, dk, dv
    rest, parts = -jnp.swapaxes(dlse, 1, 2), []  # B T N
    # Each column holds what rounding the ones before has left: three bfloat16 are one float32.
    info = jnp.finfo(o.dtype)
    for _ in range(min(3, o.shape[-1])):
        part = jax.lax.reduce_precision(rest, info.nexp, info.nmant)
        parts, rest = [*parts, part.astype(o.dtype)], rest - part
    stats = jnp.stack(parts, axis=-1)  # B T N 3
    wide = ((0, 0),) * 3 + ((0, o.shape[-1] - len(parts)),)
    ones = jnp.pad(jnp.ones_like(stats), wide)
    more = vjp(jnp.zeros_like(v), jnp.pad(stats, wide), ones)
    return dq + more[0], dk + more[1], dv


def zero_gradient(x: jax.Array) -> Any:
    """A zero gradient: float0 for integers and booleans."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    known = all(isinstance(n, int) for n in x.shape)  # else `jax.export` left a size symbolic
    return np.zeros(x.shape, jax.dtypes.float0) if known else None


def _delta(o: Any, stats: Stats, do: Any, dlse: Any) -> jax.Array:
    kind = stats.m.dtype
    delta = jnp.sum(do.astype(kind) * o.astype(kind), axis=-1)  # B T N
    delta = jnp.swapaxes(delta, 1, 2)  # B N T
    return delta if dlse is None else delta - dlse


def _rows_last(x: jax.Array) -> jax.Array:
    """B N T to B T N 1."""
    return jnp.swapaxes(x, 1, 2)[..., None]
