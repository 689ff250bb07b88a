"""Axis names of all signatures, and `frozen` pytrees, the base of masks, scores and rules.

B batch, T query length, S key length, N query heads, K key/value heads, G = N // K, H head width,
h value width, D model width, L latent width. Arrays have the layout `B T N H`; `*B` is any number
of batch axes, none included. One-name shapes are written with a leading space.
"""

import dataclasses
import math
import sys
from functools import cache
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .checks import checked_arguments
from .exported import register

C = TypeVar("C", bound=type)
FROZEN: set[type] = set()  # the classes that `frozen` made; a subclass is another class
_PLAIN = (type(None), bool, int, float, complex, str, np.generic)


class Sizes(NamedTuple):
    """The sizes of one attention: its batch axes, query heads, query length and key length."""

    batch: tuple[int, ...]
    N: int
    T: int
    S: int

    @property
    def B(self) -> int:
        """Number of batch entries, over all batch axes."""
        return math.prod(self.batch)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the attention weights, `*B N T S`."""
        return (*self.batch, self.N, self.T, self.S)

    def grid(self) -> tuple[Any, ...]:
        """Index arrays b, n, q, k in numpy, which broadcast to B N T S."""
        return tuple(x.astype(np.int32) for x in np.ogrid[: self.B, : self.N, : self.T, : self.S])

    def iotas(self) -> tuple[jax.Array, ...]:
        """`grid` as jax iotas, since XLA would constant-fold expressions of numpy arrays."""
        counts = (self.B, self.N, self.T, self.S)
        shapes = [tuple(n if j == i else 1 for j in range(4)) for i, n in enumerate(counts)]
        iota = jax.lax.broadcasted_iota
        return tuple(iota(np.int32, shape, i) for i, shape in enumerate(shapes))


def wide(dtype: Any) -> Any:
    """`promote_types(dtype, float32)` for floating dtypes, also under strict promotion."""
    return jnp.dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


@dataclass_transform(frozen_default=True)
def frozen(cls: C) -> C:
    """Class decorator: a frozen dataclass that is a pytree and hashes by value.

    Arrays (and pytrees of them) are leaves; plain Python values, tuples of them and functions are
    structure, so a jitted function that takes such an object is traced once per structure, not once
    per object. `jax.export` can serialize them, unless a field is a function.

    Args:
      cls: a class whose fields are annotated, such as a subclass of `Mask` or `Score`.

    Raises:
      TypeError: on construction with an `nnx.Variable`, which nnx would not train there.

    >>> @frozen
    ... class Scaled:
    ...     by: jax.Array
    >>> Scaled(jnp.ones(2)) == Scaled(jnp.ones(2)), jax.tree.leaves(Scaled(3.0))
    (True, [])
    """
    checks = getattr(cls, "__post_init__", None)
    setattr(cls, "__post_init__", lambda self: _checked(self, checks))  # noqa: B010
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    setattr(cls, "__init__", checked_arguments(cls.__init__))  # noqa: B010
    if "__repr__" not in vars(cls):
        setattr(cls, "__repr__", _one_line)  # noqa: B010
    setattr(cls, "__eq__", _same_value)  # noqa: B010
    FROZEN.add(cls)
    setattr(cls, "__hash__", _hash)  # noqa: B010
    setattr(cls, "__getstate__", _state)  # noqa: B010
    if "flax.nnx" in sys.modules:
        _show_in_tables(cls)
    jax.tree_util.register_pytree_with_keys(
        cls, _flatten, lambda aux, leaves: _unflatten(cls, aux, leaves)
    )
    register(cls)
    return cls


FEW = 8  # numbers of an array that a text shows


class _Shown(str):
    """A text that is its own repr."""

    __repr__ = str.__str__


def _one_line(self: Any) -> str:
    """`Alibi(slopes=[0.5 0.25], offset=0)`; of a larger array its dtype and shape."""
    fields = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
    shown = (f"{name}={jax.tree.map(_shown, value)!r}" for name, value in fields)
    return f"{type(self).__name__}({', '.join(shown)})"


def _shown(x: Any) -> Any:
    """A leaf as a text in one line."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return x
    if isinstance(x, jax.ShapeDtypeStruct | Tracer) or x.size > FEW or not _is_readable(x):
        return _Shown(f"{x.dtype}[{','.join(map(str, x.shape))}]")
    return _Shown(np.array2string(np.asarray(x), max_line_width=1000).replace("\n", ""))


def _is_readable(x: Any) -> bool:
    """Whether an array holds numbers that this process has, no random keys."""
    is_here = getattr(x, "is_fully_addressable", True)
    return is_here and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


@cache
def variable_types(nnx: Any) -> tuple[type, ...]:
    """`nnx.Variable`, or nothing where `sys.modules.get("flax.nnx")`, which is passed, is None.

    >>> variable_types(None)  # attention needs no flax
    ()
    """
    if nnx is None:
        return ()
    from flax.nnx import Variable  # which waits, if another thread is importing it

    for cls in FROZEN:  # those that were made before flax.nnx was imported among them
        _show_in_tables(cls)
    return (Variable,)


def _show_in_tables(cls: type) -> None:
    """Registers the class with `nnx.tabulate`, which has no public API for it."""
    from flax.nnx import summary

    dumper = getattr(summary, "NoneDumper", None)
    if dumper is not None:  # other versions of flax need no registration
        dumper.add_representer(cls, lambda dumper, self: dumper.represent_str(repr(self)))


def _checked(self: Any, checks: Any) -> None:
    variables = variable_types(sys.modules.get("flax.nnx"))
    for name, value in vars(self).items():
        was_checked = type(value) in FROZEN and "_children" not in vars(value)
        if was_checked or isinstance(value, _PLAIN):
            continue
        parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, variables))
        kinds = [type(part).__name__ for part in parts if isinstance(part, variables)]
        if kinds:
            who = type(self).__name__
            raise TypeError(
                f"{who}.{name} holds an nnx.{kinds[0]}, which would never be trained inside a "
                f"frozen object. Keep it on the layer and make the {who} inside the call, from "
                f"its value: self.{name}[...]."
            )
    if checks is not None:
        checks(self)


def _same_value(self: Any, other: Any) -> bool:
    if type(self) is not type(other):
        return False
    (arrays, plain), (others, others_plain) = _flatten(self), _flatten(other)
    if not arrays and not others:
        return plain == others_plain
    return _value(self) == _value(other)


def _hash(self: Any) -> int:
    known = vars(self).get("_hash")
    if known is None:
        arrays, plain = _flatten(self)
        known = hash(_value(self) if arrays else (type(self), plain))
        object.__setattr__(self, "_hash", known)
    return known


def _state(self: Any) -> dict[str, Any]:
    """The pickled state, without the hash, which differs between processes."""
    return {name: value for name, value in vars(self).items() if name != "_hash"}


def leaf_axes(node: Any) -> list[str]:
    """For each leaf, the axes of the attention weights that it has, aligned at its last axis.

    A class declares them in `AXES`: "b" for all batch axes, "n" for the heads, "q" for the queries,
    "k" for the keys and "." for another axis, such as the rows of a table. Leaves not named there
    have none of these axes.
    """
    if type(node) not in FROZEN:
        return [""] * len(jax.tree.leaves(node))
    declared, axes = getattr(node, "AXES", {}), []
    for key, value in _flatten(node)[0]:
        count = len(jax.tree.leaves(value))
        axes += [declared[key.name]] * count if key.name in declared else leaf_axes(value)
    return axes


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, tuple):  # such as sizes
        return all(map(_is_plain_value, value))
    return isinstance(value, _PLAIN) or (callable(value) and not dataclasses.is_dataclass(value))


def _flatten(self: Any) -> tuple[list[tuple[Any, Any]], tuple]:
    # nnx.tabulate flattens what it prints, and so finds classes made before flax was imported.
    variable_types(sys.modules.get("flax.nnx"))
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    names = vars(self).get("_children")  # set on unflattened objects, whose leaves may be anything
    if names is None:
        names = tuple(name for name, value in fields.items() if not _is_plain_value(value))
    plain = tuple((name, value) for name, value in fields.items() if name not in names)
    return [(jax.tree_util.GetAttrKey(name), fields[name]) for name in names], (names, plain)


def _unflatten(cls: type, aux: tuple, leaves: Any) -> Any:
    names, plain = aux
    self = object.__new__(cls)
    for name, value in (*zip(names, leaves, strict=True), *plain):
        object.__setattr__(self, name, value)
    object.__setattr__(self, "_children", names)
    return self


def _value(self: Any) -> tuple:
    leaves, structure = jax.tree.flatten(self)
    return structure, tuple(_bits(leaf) for leaf in leaves)


def _bits(leaf: Any) -> tuple:
    kind = getattr(leaf, "dtype", None)
    if kind is not None and jnp.issubdtype(kind, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):  # whose bytes would be its address
        return (leaf,)
    array = np.asarray(leaf)
    return array.shape, str(kind or array.dtype), array.tobytes()
