"""Functions that are independent along rows, on Explicit axes: a `jax.shard_map` over the rows.

Operations on arrays with Explicit shardings need a sharding rule for their result, and many have
none. Inside a `jax.shard_map` arrays are local, and no rule is needed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..token_layouts import names_in, positions_of
from ..where import mesh_of
from .specs import spec_of

BATCH, LENGTH = "*", "t"  # of the letters that stand for the axes of an array


def by_rows(
    f: Callable[..., Any],
    fn_args: tuple[Any, ...],
    axes: Mapping[str, str],
    outputs: tuple[str, ...],
    apart: str,
    **arrays: Any,
) -> Any:
    """`f(*fn_args, **arrays)`, computed by each device for its own rows on Explicit axes.

    A sharded length is gathered to every device; there is no other communication.

    Args:
      f: a module-level function that is independent along batch entries.
      fn_args: its first arguments, hashable.
      axes: the axes of each array, one letter each: "*" for all batch axes, "t" for the length.
        The first array must always be present.
      outputs: the same for each result of f.
      apart: letters of other axes along which f is independent, such as heads.

    Raises:
      ValueError: if tokens are not in their own order, if arrays are sharded along one axis over
        different mesh axes, or along an axis on which f is not independent.
    """
    first = next(iter(axes))
    behind = axes[first].replace(BATCH, "")
    batch = arrays[first].ndim - len(behind)
    check_order(arrays[first], batch + behind.index(LENGTH))
    arrays = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    mesh = next((mesh_of(x) for x in arrays.values() if _is_partitioned(x)), None)
    letters = {name: _letters(axes[name], batch, x.ndim) for name, x in arrays.items()}
    if mesh is None or any(len(letters[name]) != x.ndim for name, x in arrays.items()):
        return f(*fn_args, **arrays)  # f itself reports a wrong rank
    cut = _entries(arrays, letters, {*map(str, range(batch)), LENGTH, *apart})
    # Inside, the length is replicated; outside, results get the sharding of the inputs back.
    whole = {**cut, LENGTH: None}
    specs = {name: _spec(whole, letters[name], x.shape) for name, x in sorted(arrays.items())}
    results = [_letters(x, batch) for x in outputs]
    inside = tuple(PartitionSpec(*map(whole.get, x)) for x in results)
    out = _shard_mapped(f, fn_args, mesh, tuple(specs.items()), inside, arrays)
    if cut[LENGTH] is None:
        return out
    result_shardings = (NamedSharding(mesh, PartitionSpec(*map(cut.get, x))) for x in results)
    return tuple(
        jax.sharding.reshard(x, where) for x, where in zip(out, result_shardings, strict=True)
    )


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _shard_mapped(
    f: Any, fn_args: Any, mesh: Any, in_specs: Any, out_specs: Any, arrays: dict[str, jax.Array]
) -> Any:
    """`f(*fn_args, **arrays)` on each device's part, after resharding to `in_specs`."""
    specs = dict(in_specs)
    arrays = {
        name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return jax.shard_map(
        lambda arrays: f(*fn_args, **arrays),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=out_specs,
        axis_names={name for name, kind in kinds if kind is AxisType.Explicit},
    )(arrays)


def may_be_sharded(x: Any) -> bool:
    """Whether an array may be sharded over several devices, by its type or by XLA."""
    mesh = mesh_of(x)
    if mesh.empty:  # jit's in_shardings may shard it; no type shows that
        return isinstance(x, Tracer) and jax.device_count() > 1
    return mesh.size > 1 and {*mesh.axis_types} != {AxisType.Manual}


def check_order(x: Any, axis: int) -> None:
    """ValueError if tokens along `axis` are known not to be in their own order."""
    if positions_of(x, axis) is not None:
        raise ValueError(
            "A recurrence takes tokens in their own order, and context_parallel says that they lie "
            'in another. Call it under layout="contiguous", or on tokens that unplace puts back.'
        )


def _is_partitioned(x: Any) -> bool:
    """Whether the array's sharding partitions any axis."""
    return AxisType.Explicit in mesh_of(x).axis_types and any(map(names_in, spec_of(x)))


def _letters(axes: str, batch: int, rank: int | None = None) -> tuple[str, ...]:
    """A name for each axis. Batch axes are numbered; an array may lack the first of them.

    >>> _letters("*tn", 2), _letters("*t", 2, 2)
    (('0', '1', 't', 'n'), ('1', 't'))
    """
    names = [x for axis in axes for x in (map(str, range(batch)) if axis == BATCH else axis)]
    return tuple(names if rank is None else names[max(len(names) - rank, 0) :])


def _entries(arrays: dict, letters: dict, may_be: set[str]) -> dict[str, Any]:
    """The mesh axes of each axis, on which all arrays that are cut there have to agree."""
    entries: dict[str, Any] = {LENGTH: None}
    listed = ", ".join(f"{name} {spec_of(x)}" for name, x in arrays.items())
    for name, x in arrays.items():
        for letter, entry in zip(letters[name], spec_of(x), strict=True):
            if not names_in(entry):
                continue
            if letter not in may_be:
                raise ValueError(
                    f"{name} is sharded along its width, over {entry!r}. Shard rows or heads. "
                    f"Given: {listed}."
                )
            if entries.get(letter) not in (None, entry):
                raise ValueError(f"Arrays must be sharded alike along each axis; got {listed}.")
            entries[letter] = entry
    return entries


def _spec(entries: dict[str, Any], letters: tuple[str, ...], shape: tuple) -> PartitionSpec:
    """How an array is cut; one of length 1 along an axis answers for all entries."""
    sizes = zip(letters, shape, strict=True)
    return PartitionSpec(*(entries.get(x) if n > 1 else None for x, n in sizes))
