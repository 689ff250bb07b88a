"""Helpers for arrays: validation, broadcasting, index arithmetic and shardings."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .types import Sizes


def to_grid(what: str, array: Any, sizes: Sizes) -> jax.Array:
    """Reshapes an array that broadcasts to `*B N T S` to `B|1 N|1 T|1 S|1`."""
    array, whole = jnp.asarray(array), sizes.shape
    fits = array.ndim <= len(whole) and all(
        a in (1, w) for a, w in zip(array.shape[::-1], whole[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{what} must broadcast to (*batch, heads, queries, keys) = {whole}; "
            f"got shape {array.shape}.{_axes_to_add(array.shape, sizes)}"
        )
    array = array.reshape((1,) * (len(whole) - array.ndim) + array.shape)
    batch, rest = array.shape[:-3], array.shape[-3:]
    if all(n == 1 for n in batch):
        return array.reshape(1, *rest)
    return jnp.broadcast_to(array, (*sizes.batch, *rest)).reshape(sizes.B, *rest)


def _axes_to_add(shape: tuple[int, ...], sizes: Sizes) -> str:
    """A sentence on an array that has the batch axes, but not those of heads and queries."""
    batch = shape[: len(sizes.batch)]
    each, rest = "".join(":, " for _ in batch), shape[len(batch) :]
    if not batch or batch != sizes.batch:
        return ""
    if rest == (sizes.S,):
        return (
            f" One of (*batch, keys) is array[{each}None, None]; if it says which tokens are real, "
            "a layer that has valid= takes it as valid=array."
        )
    return f" One of (*batch, queries, keys) is array[{each}None]." if len(rest) == 2 else ""


def per_entry(what: str, array: Any, sizes: Sizes, *length: int) -> jax.Array:
    """Integers that broadcast to `*B` (or `*B length`), one row for each batch entry."""
    array, whole = jnp.asarray(array), (*sizes.batch, *length)
    try:
        rows = jnp.broadcast_to(array, whole)
    except ValueError:
        raise ValueError(f"{what} must broadcast to {whole}; got shape {array.shape}.") from None
    return rows.reshape(sizes.B, *length)


def ids_per_entry(who: str, sizes: Sizes, **ids: Any) -> tuple[jax.Array, ...]:
    """Ids of queries, `B T`, and of keys if given, `B S`, in a common dtype.

    Raises:
      ValueError: if their shapes do not fit, or for concrete ids out of the dtype's range.
    """
    for name, x in ids.items():
        outside = out_of_range(x, ids_dtype())
        if outside.size:
            raise ValueError(
                f"{who}.{name} must fit {ids_dtype()}; got {outside[0]}. Number the documents: "
                "np.unique(ids, return_inverse=True)."
            )
    lengths = (sizes.T, sizes.S)
    rows = [
        per_entry(f"{who}.{name}", x, sizes, length)
        for (name, x), length in zip(ids.items(), lengths, strict=False)
    ]
    return tuple(x.astype(ids_dtype()) for x in rows)


def ids_dtype() -> np.dtype:
    """The widest enabled integer dtype: int32, or int64 with x64."""
    return jax.dtypes.canonicalize_dtype(np.int64)


def out_of_range(x: Any, dtype: Any) -> np.ndarray:
    """The values of a concrete integer array that are out of a dtype's range."""
    unsure = not isinstance(x, Tracer) and not np.can_cast(dtype_of(x), dtype)
    known, limits = np.asarray(x if unsure else ()), jnp.iinfo(dtype)
    return known[(known < limits.min) | (known > limits.max)]


def lists_to_arrays(node: Any, *names: str) -> None:
    """Converts list fields to arrays in place, since a list is several leaves of a pytree."""
    for name in names:
        if isinstance(getattr(node, name), list | tuple):
            object.__setattr__(node, name, np.asarray(getattr(node, name)))


def aligned(x: jax.Array, like: jax.Array) -> jax.Array:
    """Casts x to the dtype of `like`, and prepends axes of size 1 up to its rank."""
    return x.astype(like.dtype).reshape((1,) * (like.ndim - x.ndim) + x.shape)


def for_each_row(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Broadcasts x `T D` to the batch axes of `rows` `*B S E`, with the same batch sharding.

    With Explicit axes a gradient of x is then summed on each device first, and then over devices.
    """
    mesh, spec = jax.typeof(rows).sharding.mesh, jax.typeof(rows).sharding.spec
    batch = spec[: rows.ndim - 2]
    row_sharding = jax.NamedSharding(mesh, jax.P(*batch)) if any(batch) else None
    return jnp.broadcast_to(x, (*rows.shape[:-2], *x.shape), out_sharding=row_sharding)


def reshaped(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x.reshape(shape)` that keeps the sharding of the unchanged first and last axes.

    JAX cannot infer the sharding over Explicit axes if other axes are merged.
    """
    sharding = jax.typeof(x).sharding
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    first = _common_prefix(x.shape, shape)
    last = _common_prefix(x.shape[first:][::-1], shape[first:][::-1])
    before, between, after = spec[:first], spec[first : x.ndim - last], spec[x.ndim - last :]
    if any(between) or not any(before + after):
        return x.reshape(shape)
    kept_spec = jax.P(*before, *[None] * (len(shape) - first - last), *after)
    return jax.lax.reshape(x, shape, out_sharding=jax.NamedSharding(sharding.mesh, kept_spec))


def _common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    least = min(len(a), len(b))
    return next((i for i in range(least) if a[i] != b[i]), least)


def iota(length: Any) -> Any:
    """0 ... length - 1 in numpy, or in jax if the length is symbolic (`jax.export`)."""
    return jnp.arange(length) if is_symbolic_dim(length) else np.arange(length)


def vmap_leading(fn: Callable[..., Any], axes: int) -> Callable[..., Any]:
    """Applies `jax.vmap` to `fn` once for each of `axes` leading axes."""
    for _ in range(axes):
        fn = jax.vmap(fn)
    return fn


@jax.custom_vjp
def rotate_rows(x: jax.Array, by: jax.Array) -> jax.Array:
    """The tokens of x, `*B T ...`, with the first `by`, `*B`, of a row after its others.

    >>> rotate_rows(jnp.arange(8).reshape(2, 4), jnp.asarray([0, 3])).tolist()
    [[0, 1, 2, 3], [7, 4, 5, 6]]
    """
    T = x.shape[by.ndim]
    first = jnp.arange(T, dtype=jnp.int32).reshape((1,) * by.ndim + (T,))
    tokens = (first + by[..., None]) % T
    tokens = tokens.reshape(*tokens.shape, *[1] * (x.ndim - tokens.ndim))
    return jnp.take_along_axis(x, tokens, axis=by.ndim)


rotate_rows.defvjp(
    lambda x, by: (rotate_rows(x, by), by),
    lambda by, dx: (rotate_rows(dx, -by), None),
)


def bounded_loop(first: Any, end: Any, most: int, body: Callable, carry: Any) -> Any:
    """`carry = body(i, carry)` for i from `first` to `end`, with at most `most` iterations.

    Reverse-mode differentiable, unlike a loop of traced length: the derivative is that of a scan of
    `most` iterations, of which those from `end` on do nothing.
    """
    if not (isinstance(first, Tracer) or isinstance(end, Tracer)):
        return jax.lax.fori_loop(np.int32(first), np.int32(end), body, carry)
    leaves, structure = jax.tree.flatten(carry)
    first, end = (jnp.asarray(x, jnp.int32) for x in (first, end))
    program = jax.make_jaxpr(body)(first, carry)
    of = lambda consts: jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))  # noqa: E731
    run = jax.custom_jvp(
        lambda consts, first, end, leaves: jax.lax.fori_loop(
            first, end, lambda i, leaves: of(consts)(i, *leaves), leaves
        )
    )

    def run_iterations(consts: list, first: jax.Array, end: jax.Array, leaves: list) -> list:
        def one(leaves: list, i: jax.Array) -> tuple[list, None]:
            body_at = lambda leaves: of(consts)(i + first, *leaves)  # noqa: E731
            return jax.lax.cond(i + first < end, body_at, lambda leaves: leaves, leaves), None

        return jax.lax.scan(one, leaves, jnp.arange(most, dtype=jnp.int32))[0]

    run.defjvp(partial(jax.jvp, run_iterations))
    return structure.unflatten(run(program.consts, first, end, leaves))


def look_up(array: jax.Array, *indices: Any) -> jax.Array:
    """`array[indices]`, where an axis of size 1 broadcasts over its index."""
    return jnp.asarray(array)[
        tuple(0 * i if n == 1 else i for i, n in zip(indices, array.shape, strict=True))
    ]


def check_integers(what: str, **arrays: Any) -> None:
    """Raises TypeError unless every array given is of integers."""
    for name, array in arrays.items():
        kind = None if array is None or is_integer(array) else dtype_of(array)
        if kind is not None and not jnp.issubdtype(kind, jnp.integer):
            raise TypeError(f"{what}.{name} must hold integers; got {kind}.")


def check_boolean(array: Any) -> None:
    """Raises TypeError unless `array` is boolean, with hints for other kinds of masks."""
    kind = getattr(array, "dtype", None)
    if kind != np.dtype(bool):
        kind_name = type(array).__name__ if kind is None else kind
        raise TypeError(
            "A mask must be a flax_attn mask or a boolean array in which True means 'may attend'; "
            f"got {kind_name}.{_as_mask(array, kind)} An additive mask (0 and -inf) goes to "
            "score=Additive(array); torch.nn.MultiheadAttention's convention (True means "
            "'blocked') is inverted by ~array."
        )


def _as_mask(x: Any, kind: Any) -> str:
    """A sentence on what a value is that was given for a mask, and how it becomes one."""
    if isinstance(x, type):
        return f" {x.__name__} is a class: a mask of it is {x.__name__}(...)."
    if hasattr(x, "draw"):
        return " A score is given as score=."
    if callable(x):
        return " A function becomes a mask by MaskFn(lambda b, n, q, k: ...)."
    if isinstance(x, list | tuple):
        return " A list becomes an array by np.asarray."
    if isinstance(x, str | bool):
        return " Causal attention is mask=CAUSAL, attention to all keys mask=FULL."
    if kind is not None and jnp.issubdtype(kind, jnp.integer):
        return (
            " Ones and zeros become booleans by array == 1; those of the real tokens, (B, T), a "
            "layer that has valid= takes as valid=array == 1."
        )
    return ""


def clip(x: Any, most: int) -> Any:
    """Clips x to [0, most]; a Python int stays one."""
    return min(max(x, 0), most) if isinstance(x, int) else jnp.clip(x, 0, most)


INT32_MAX = 2**31 - 1  # largest index of a key


def saturate(x: Any, lowest: int = -INT32_MAX) -> Any:
    """Clips a distance to +-`lowest`, beyond which masks do not change; arrays become int32.

    Clipped in the array's own dtype and its range, before a cast could overflow. The offset of a
    mask may be -2**31, with which the query at `INT32_MAX` is fully masked; such an array must not
    be negated, since int32 would overflow.
    """
    if is_integer(x):
        return min(max(int(x), lowest), -lowest)
    x = x if isinstance(x, jax.Array) else np.asarray(x)  # jax would narrow it before the clip
    least, most = (int(n) for n in (jnp.iinfo(x.dtype).min, jnp.iinfo(x.dtype).max))
    return jnp.asarray(x.clip(max(least, lowest), min(most, INT32_MAX)).astype(np.int32))


def saturating_add(a: Any, b: Any, lowest: int = -INT32_MAX) -> Any:
    """`a + b`, saturated at `lowest` and `INT32_MAX` for arrays; numpy arrays stay numpy.

    If one is a Python int, the array is clipped first so that the sum cannot overflow.
    """
    number = int | np.integer
    if isinstance(a, number):
        a, b = b, a
    if isinstance(a, number):
        return int(a) + int(b)
    if not isinstance(b, number):
        return jnp.clip(a, lowest - jnp.minimum(b, 0), INT32_MAX - jnp.maximum(b, 0)) + b
    by = min(max(int(b), -INT32_MAX), INT32_MAX)
    if by:
        a = (a.clip(None, INT32_MAX - by) if by > 0 else a.clip(lowest - by, None)) + by
    return saturating_add(a, b - by, lowest) if b != by else a


def is_integer(x: Any) -> bool:
    """Whether `x` is a Python or numpy integer scalar, not an array or a bool."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def select(condition: Any, a: Any, b: Any) -> Any:
    """`a` if the condition holds, else `b`; Python values stay Python values."""
    if isinstance(condition, bool | np.bool_):
        return a if condition else b
    return jnp.where(condition, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two indices; Python numbers stay Python numbers."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two indices; Python numbers stay Python numbers."""
    return -minimum(-a, -b)


def dtype_of(array: Any) -> np.dtype:
    """The dtype of an array, traced or not, or of a number."""
    return array.dtype if hasattr(array, "dtype") else np.asarray(array).dtype


def is_count(n: Any, least: int) -> bool:
    """Whether `n` is an integer of at least `least`, not a bool."""
    return is_integer(n) and n >= least


def check_offset(who: str, offset: Any) -> None:
    """Raises ValueError unless `offset` is "end" or integers, which may be traced."""
    if isinstance(offset, str) or offset is None:
        fits = offset == "end"
    else:
        fits = is_integer(offset) or jnp.issubdtype(dtype_of(offset), jnp.integer)
    if not fits:
        raise ValueError(
            f'{who}.offset must be an integer or "end"; got {offset!r}. An array of integers gives '
            "each batch entry its own."
        )


def bound_offset(who: str, offset: Any, sizes: Sizes, lowest: int = -INT32_MAX) -> Any:
    """An offset for these sizes: an int, a traced scalar, or an array B, one per batch entry."""
    if isinstance(offset, str):  # "end"
        return sizes.S - sizes.T
    if is_integer(offset) or jnp.ndim(offset) == 0:
        return saturate(offset, lowest)
    return per_entry(f"{who}.offset", saturate(offset, lowest), sizes)


def zero_to_one(x: jax.Array) -> jax.Array:
    """`x` with 1 for 0, as a divisor: of a softmax's sum, which is 0 in fully masked rows."""
    return jnp.where(x == 0, 1, x)


def is_float(x: Any) -> bool:
    """Whether x is a floating array, which may have a gradient; False for None."""
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def expand_per_entry(x: Any) -> Any:
    """Returns a scalar as it is, and an array `B` as `B 1 1 1`."""
    return x.reshape(-1, 1, 1, 1) if jnp.ndim(x) else x


def take_entry(x: Any, b: Any) -> Any:
    """Returns a scalar as it is, and of an array `B` the entry b."""
    return jnp.asarray(x)[b] if jnp.ndim(x) else x


def check_number(what: str, x: Any) -> None:
    """Raises TypeError unless `x`, traced or not, is real, and ValueError unless it is scalar."""
    kind = dtype_of(x)
    if not (jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)):
        raise TypeError(f"{what} must be a number; got {x!r}.")
    if jnp.ndim(x):
        raise ValueError(f"{what} must be one number for all heads; got shape {jnp.shape(x)}.")


def unify_varying(tree: Any) -> Any:
    """Makes all leaves vary over the same manual mesh axes of a `shard_map`."""
    tree = jax.tree.map(jnp.asarray, tree)
    axes = frozenset().union(
        *(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    )
    return jax.tree.map(lambda x: as_varying(x, axes), tree)


def as_varying(x: jax.Array, axes: frozenset) -> jax.Array:
    """Makes x vary over these manual mesh axes of a `shard_map` too."""
    more = tuple(axes - jax.typeof(x).manual_axis_type.varying)
    return jax.lax.pcast(x, more, to="varying") if more else x


def on_elements(fn: Callable[..., jax.Array], index: tuple, *logits: jax.Array) -> jax.Array:
    """`fn(*logit, b, n, q, k)` of each element of a block, axes n, q and k, or b, n, q and k.

    Each index array is an open grid, long along its own axis alone; positions may also be long
    along the batch. Each is mapped along its own axis only, so that `fn` sees what it may vary by.

    >>> n, q, k = (np.arange(2).reshape(shape) for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2)))
    >>> on_elements(lambda b, n, q, k: b + 4 * n + 2 * q + k, (0, n, q, k)).tolist()
    [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    """
    index = tuple(x if hasattr(x, "reshape") else np.asarray(x) for x in index)
    deep = max(x.ndim for x in (*index, *logits))
    axes = (3, 2, 1, 0)[: 0 if deep < 3 else deep]
    has_batch = [i > 1 and 0 in axes and x.shape[0] != 1 for i, x in enumerate(index)]
    flat = [
        x.reshape((x.shape[0], -1) if batch else -1 if i in axes else ()) if axes else x
        for i, (x, batch) in enumerate(zip(index, has_batch, strict=True))
    ]

    def each(index: list, *logits: jax.Array) -> jax.Array:
        return fn(*logits, *index)

    for axis in axes:  # one vmap each, innermost first
        along = [0 if i == axis or (axis == 0 and has_batch[i]) else None for i in range(4)]
        each = jax.vmap(each, (along, *(0,) * len(logits)))
    return each(flat, *logits)
