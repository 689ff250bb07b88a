"""Serialization of frozen pytrees for `jax.export`: as JSON text, never as a pickle.

A file of `jax.export` contains the pytree structure of arguments and results. For a frozen object
that is its class, the fields that hold arrays, and the plain values of the others:

    {"format": 1, "arrays": ["keys", "values"], "values": {"window": 4, "store": null}}
"""

import contextlib
import dataclasses
import json
from importlib import import_module
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import export

FORMAT = 1
_AS_JSON = (type(None), bool, int, str)


def register(cls: type) -> None:
    """Registers a class made by `frozen` for serialization by `jax.export`.

    The file identifies the class by module and name. A class that is defined again, as by
    `importlib.reload`, replaces the registered one.
    """
    name = _name(cls)
    _unregister(name)
    with contextlib.suppress(ValueError):  # if the name could not be unregistered
        export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=lambda aux: written_structure(cls, aux),
            deserialize_auxdata=lambda text: read_structure(cls, text),
        )


def _unregister(name: str) -> None:
    """Removes a name from jax's registry, for which there is no public API."""
    with contextlib.suppress(ImportError):
        table = import_module("jax._src.export._export")
        getattr(table, "deserialization_registry", {}).pop(name, None)


def written_structure(cls: type, aux: tuple) -> bytes:
    """The static fields of an object of a frozen class, as JSON.

    Raises:
      TypeError: for a function, or another value that JSON cannot represent.
    """
    arrays, plain = aux
    values = {name: _encoded(cls, name, value) for name, value in plain}
    return json.dumps({"format": FORMAT, "arrays": list(arrays), "values": values}).encode()


def read_structure(cls: type, text: bytes) -> tuple:
    """The inverse of `written_structure`.

    Raises:
      ValueError: for another format, or fields that differ from the class's.
    """
    file = json.loads(text)
    if file.get("format") != FORMAT:
        raise ValueError(
            f"The file holds a {cls.__name__} in format {file.get('format')}, and this version of "
            f"flax_attn reads format {FORMAT}: export it again with this version."
        )
    arrays, values = file["arrays"], file["values"]
    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != {*arrays, *values}:
        raise ValueError(
            f"The file holds a {cls.__name__} with the fields {sorted([*arrays, *values])}, and "
            f"this version of flax_attn has {sorted(fields)}: export it again with this version."
        )
    return tuple(arrays), tuple((name, _decoded(value)) for name, value in values.items())


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encoded(cls: type, name: str, value: Any) -> Any:
    """A plain value as JSON; floats, tuples and numpy scalars as tagged dicts."""
    if type(value) in _AS_JSON:
        return value
    if type(value) is float:
        return {"float": repr(value)}
    if type(value) is complex:
        return {"complex": repr(value)}
    if type(value) is tuple:
        return {"tuple": [_encoded(cls, name, part) for part in value]}
    if isinstance(value, np.generic) and type(value.item()) in (bool, int, float, complex):
        return {"numpy": [str(value.dtype), _encoded(cls, name, value.item())]}
    raise TypeError(
        f"{cls.__name__}.{name} is {value!r}, a {type(value).__name__} that jax.export cannot "
        f"write to a file: make the {cls.__name__} inside the exported function."
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, of),) = value.items()
    if kind == "tuple":
        return tuple(map(_decoded, of))
    if kind == "numpy":
        return jnp.dtype(of[0]).type(_decoded(of[1]))
    return {"float": float, "complex": complex}[kind](of)
