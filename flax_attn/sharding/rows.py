"""Functions that treat rows apart, over Explicit axes: each device computes its own rows.

An operation on arrays whose types say how they are sharded has to know how its result is, and many
do not. Inside a `jax.shard_map` arrays are a device's own, and nothing has to be known.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..backends.platform import mesh_of
from ..layouts import names_in, positions_of
from .specs import spec_of

BATCH, LENGTH = "*", "t"  # of the letters that stand for the axes of an array


def by_rows(
    f: Callable[..., Any],
    how: tuple[Any, ...],
    axes: Mapping[str, str],
    outputs: tuple[str, ...],
    apart: str,
    **arrays: Any,
) -> Any:
    """`f(*how, **arrays)`, of which each device computes its own part where types say so.

    A length that is cut comes whole to every device; nothing else goes between them.

    Args:
      f: a function of a module, which treats batch entries apart.
      how: its first arguments, hashable.
      axes: the axes of each array, one letter each: "*" for all batch axes, "t" for the length.
        The first is one that is always given.
      outputs: the same of what f gives.
      apart: letters of other axes along which f treats entries apart, as heads.

    Raises:
      ValueError: if tokens lie in another order than their own, or arrays are sharded along one
        axis over different mesh axes, or along a width whose entries meet.
    """
    first = next(iter(axes))
    x = arrays[first]
    batch = x.ndim - len(axes[first].replace(BATCH, ""))
    check_order(x, batch + axes[first].replace(BATCH, "").index(LENGTH))
    given = {name: jnp.asarray(y) for name, y in arrays.items() if y is not None}
    mesh = next((mesh_of(y) for y in given.values() if _is_cut(y)), None)
    letters = {name: _letters(axes[name], batch, y.ndim) for name, y in given.items()}
    if mesh is None or any(len(letters[name]) != y.ndim for name, y in given.items()):
        return f(*how, **arrays)  # which also says what is wrong with a rank
    cut = _cut(given, letters, apart, batch)
    wholes = [_letters(y, batch) for y in outputs]
    inner = {**cut, LENGTH: None}
    in_specs = {
        name: _spec(inner, letters[name], y.shape, mesh) for name, y in sorted(given.items())
    }
    out_specs = tuple(PartitionSpec(*map(inner.get, x)) for x in wholes)
    out = _run(f, how, mesh, tuple(in_specs.items()), out_specs, given)
    if not names_in(cut[LENGTH]):
        return out
    lies = (NamedSharding(mesh, PartitionSpec(*map(cut.get, x))) for x in wholes)
    return tuple(jax.sharding.reshard(y, where) for y, where in zip(out, lies, strict=True))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _run(f: Any, how: Any, mesh: Any, in_specs: Any, out_specs: Any, given: dict) -> Any:
    """`f(*how, **given)` by each device; arrays come as specs say."""
    specs = dict(in_specs)
    given = {
        name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in given.items()
    }
    explicit = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind is AxisType.Explicit
    }
    return jax.shard_map(
        lambda given: f(*how, **given),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=out_specs,
        axis_names=explicit,
    )(given)


def check_order(x: Any, axis: int) -> None:
    """ValueError where tokens along `axis` are known to lie in another order than their own."""
    if positions_of(x, axis) is not None:
        raise ValueError(
            "A recurrence takes tokens in their own order, and context_parallel says that they lie "
            'in another. Call it under layout="contiguous", or on tokens that unplace puts back.'
        )


def _is_cut(x: Any) -> bool:
    """Whether the type of an array says that it is cut."""
    return AxisType.Explicit in mesh_of(x).axis_types and any(map(names_in, spec_of(x)))


def _letters(axes: str, batch: int, rank: int | None = None) -> tuple[str, ...]:
    """A name for each axis: of the batch axes their numbers, of which an array may lack the first.

    >>> _letters("*tn", 2), _letters("*t", 2, 2)
    (('0', '1', 't', 'n'), ('1', 't'))
    """
    found = [x for axis in axes for x in (map(str, range(batch)) if axis == BATCH else axis)]
    return tuple(found if rank is None else found[max(len(found) - rank, 0) :])


def _cut(given: dict, letters: dict, apart: str, batch: int) -> dict[str, Any]:
    """The mesh axes of each axis, on which all arrays have to agree that are cut there."""
    entries: dict[str, Any] = {LENGTH: None}
    listed = ", ".join(f"{name} {spec_of(x)}" for name, x in given.items())
    for name, x in given.items():
        for letter, entry in zip(letters[name], spec_of(x), strict=True):
            if not names_in(entry):
                continue
            if letter not in (*map(str, range(batch)), LENGTH, *apart):
                raise ValueError(
                    f"{name} is sharded along its width, over {entry!r}. Shard rows or heads. "
                    f"Given: {listed}."
                )
            if entries.setdefault(letter, entry) not in (None, entry):
                raise ValueError(f"Arrays must be sharded alike along each axis; got {listed}.")
            entries[letter] = entry
    return entries


def _spec(cut: dict[str, Any], letters: tuple, shape: tuple, mesh: Any) -> PartitionSpec:
    """How an array comes; one of length 1 along an axis answers for all entries."""
    return PartitionSpec(
        *(cut.get(x) if n > 1 else None for x, n in zip(letters, shape, strict=True))
    )
