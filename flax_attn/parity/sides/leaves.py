"""Flattens module arguments and outputs in any container, and rebuilds them."""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from numbers import Number
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.known_layers import a

Parts = list[tuple[str, Any]]


def parts(value: Any) -> Parts | None:
    """Returns a container's children with their name suffixes; None for a leaf.

    Containers are Mappings, lists, tuples, ranges, deques, dataclasses, namespaces, nnx variables,
    and every pytree registered with JAX or torch. Modules are not containers.

    >>> parts({"k": 1, "v": (2, 3)})
    [('.k', 1), ('.v', (2, 3))]
    """
    if value is None or isinstance(value, type | str | np.ndarray | nnx.Module):
        return None
    if isinstance(value, nnx.Variable):
        return [("", value.get_value())]
    if isinstance(value, Mapping):
        return [(f".{key}", part) for key, part in value.items()]
    if isinstance(value, list | tuple | deque | range):
        return [(f"[{i}]", part) for i, part in enumerate(value)]
    if is_dataclass(value):
        return [(f".{field.name}", _read(value, field.name)) for field in fields(value)]
    if isinstance(value, SimpleNamespace | nnx.Pytree):
        return [(f".{key}", x) for key, x in vars(value).items() if not key.startswith("_pytree__")]
    children = _jax_parts(value)
    return _torch_parts(value) if children is None else children


def _read(value: Any, name: str) -> Any:
    """Returns a field; None if it is missing or reading it raises an error."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _jax_parts(value: Any) -> Parts | None:
    """Returns the children of a pytree registered with JAX, named by its keys."""
    flattened = jax.tree_util.default_registry.flatten_one_level_with_keys(value)
    if flattened is None:
        return None
    keys = [getattr(key, "name", None) or key for key, _ in flattened[0]]
    names = [f".{key}" if isinstance(key, str) else _bracket(key) for key in keys]
    return [(name, part) for name, (_, part) in zip(names, flattened[0], strict=True)]


def _bracket(key: Any) -> str:
    for field in ("idx", "key"):
        if hasattr(key, field):
            value = getattr(key, field)
            return f"[{value}]" if isinstance(value, int) else f".{value}"
    return str(key)


def _torch_parts(value: Any) -> Parts | None:
    """Returns the children of a pytree registered with torch, named by index."""
    # Torch must not be imported here: without it no value can be one of its pytrees.
    if "torch" not in sys.modules:
        return None
    from torch.utils import _pytree

    node = getattr(_pytree, "SUPPORTED_NODES", {}).get(type(value))
    if node is None:
        return None
    return [(f"[{i}]", part) for i, part in enumerate(node.flatten_fn(value)[0])]


def leaves(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Yields every leaf with its name, including None and strings.

    >>> dict(leaves({"k": 1, "v": (2, None)}, "cache"))
    {'cache.k': 1, 'cache.v[0]': 2, 'cache.v[1]': None}
    """
    pieces = parts(value)
    if pieces is None:
        yield name, value
        return
    for suffix, part in pieces:
        yield from leaves(part, name + suffix)


def rebuilt(value: Any, change: Callable[[str, Any], Any], name: str) -> Any:
    """Replaces every leaf by `change(name, leaf)`; containers without a change are kept."""
    pieces = parts(value)
    if pieces is None:
        return change(name, value)
    made = [rebuilt(part, change, name + suffix) for suffix, part in pieces]
    # The caller may rely on the object itself, for example on a cache that is updated in place.
    if all(new is old for new, (_, old) in zip(made, pieces, strict=True)):
        return value
    return _rebuild_container(value, made)


def _rebuild_container(value: Any, made: list[Any]) -> Any:
    """Returns a container of the same type with other children; nnx variables are kept."""
    if isinstance(value, nnx.Variable):
        return value
    if isinstance(value, Mapping):
        named = dict(zip(value, made, strict=True))
        return named if type(value) is dict else _with_items(value, named)
    if isinstance(value, list | tuple | deque):
        # The constructor of a named tuple takes its fields one by one.
        return getattr(type(value), "_make", type(value))(made)
    if is_dataclass(value) or isinstance(value, SimpleNamespace | nnx.Pytree):
        # Copied without `__init__`, and set past the `__setattr__` of frozen dataclasses.
        other: Any = copy.copy(value)
        for (suffix, _), part in zip(parts(value) or [], made, strict=True):
            object.__setattr__(other, suffix[1:], part)
        return other
    if _jax_parts(value) is not None:
        # One level only: the children are already rebuilt, whatever they contain.
        outline = jax.tree.structure(value, is_leaf=lambda x: x is not value)
        return jax.tree.unflatten(outline, made)
    from torch.utils import _pytree

    node = _pytree.SUPPORTED_NODES[type(value)]
    return node.unflatten_fn(made, node.flatten_fn(value)[1])


def _with_items(value: Mapping, named: dict) -> Any:
    if not hasattr(value, "__setitem__"):
        make: Any = type(value)
        return make(named)
    other: Any = copy.copy(value)
    for key, part in named.items():
        other[key] = part
    return other


class OutputLeaves(NamedTuple):
    """Leaves of a module's output, by kind and name.

    Attributes:
      arrays: arrays of the module's own library.
      numbers: Python numbers and numpy arrays, as numpy arrays.
      others: `repr` of leaves compared as text.
      unknown: leaves that cannot be compared.
    """

    arrays: dict[str, Any]
    numbers: dict[str, np.ndarray]
    others: dict[str, str]
    unknown: dict[str, Any]


def split_leaves(value: Any, is_array: Callable[[Any], bool], name: str = "output") -> OutputLeaves:
    """Sorts the leaves of a module's output by kind, under unique names."""
    outputs, counts = OutputLeaves({}, {}, {}, {}), {}
    for path, leaf in leaves(value, name):
        path = counted(counts, path)
        counts[path] = None
        if is_array(leaf):
            outputs.arrays[path] = leaf
        elif (number := as_number(leaf)) is not None:
            outputs.numbers[path] = number
        elif leaf is None or isinstance(leaf, str | int):
            outputs.others[path] = repr(leaf)
        elif isinstance(leaf, np.ndarray) and leaf.dtype.kind in "US":
            outputs.others[path] = repr(leaf.tolist())
        else:
            outputs.unknown[path] = leaf
    return outputs


def as_number(leaf: Any) -> np.ndarray | None:
    """Converts a Python number or numeric numpy array to a numpy array; None for other leaves."""
    if not isinstance(leaf, Number | np.ndarray | np.generic):
        return None
    array = np.asarray(leaf)
    return None if array.dtype.kind in "OUS" else array


def refuse_unknown(unknown: Mapping[str, Any], side: str) -> None:
    """Raises a ParityError for the first leaf that cannot be compared."""
    for name, leaf in unknown.items():
        call = f"{side.lower()}_call=lambda m, *xs: "
        advice = f"return the arrays it holds, {call}..."
        if isinstance(leaf, Iterator):
            advice = f"make it a tuple, {call}tuple(m(*xs))"
        raise ParityError(
            f"{side} returns {a(type(leaf))} at {name}, which cannot be taken apart and compared: "
            f"{advice}."
        )


def name_of_leaf(path: str, outputs: OutputLeaves) -> Callable[[str], str]:
    """Returns a function that renames leaves: a single array gets the submodule's path."""
    several = len(outputs.arrays) + len(outputs.numbers) != 1
    return lambda name: name if several else path


def counted(taps: Mapping[str, Any], name: str) -> str:
    """Returns `name`, or `name#2` and so on if it is already in `taps`."""
    count, unique = 1, name
    while unique in taps:
        count += 1
        unique = f"{name}#{count}"
    return unique
