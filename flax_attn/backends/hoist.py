"""Closure conversion of users' functions: arrays that they close over become leaves of the rules.

A `custom_vjp` must not close over traced arrays: neither differentiated ones nor those of a trace
that has ended when the backward pass runs. So every function in the rules is traced once, for one
logit and four indices, and evaluated on a block by vmap over its rows and columns.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, singledispatch
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._internal.arrays import as_varying, on_elements, unify_varying
from .._internal.types import frozen
from ..masks import Mask, MaskFn
from ..places import Places, in_whole
from ..scores import Additive, Score, ScoreFn

NO_MESH = jax.sharding.AbstractMesh((), ())


class Run:
    """A traced function of one element, compared by its trace, so that it compiles once.

    The same function may close over other values at the next call, so its identity is not enough.
    """

    def __init__(self, fn: Callable[..., jax.Array], trace: Callable, *element: Any):
        self.fn = fn
        self.axes = jax.typeof(jax.tree.leaves(element)[-1]).manual_axis_type.varying
        # A jaxpr is bound to the mesh in which it was traced; a later shard_map has another one.
        mesh = nullcontext() if self.axes else jax.sharding.use_abstract_mesh(NO_MESH)
        # In the reference backend indices are numpy arrays, which promote with any dtype.
        with jax.numpy_dtype_promotion("standard"), mesh:
            closed = jax.make_jaxpr(lambda *xs: trace(*xs))(*element)
        self.jaxpr, self.consts = closed.jaxpr, tuple(closed.consts)
        if any(self.axes - jax.typeof(x).manual_axis_type.varying for x in self.consts):
            raise NotImplementedError(
                "attention in blocks cannot take a function that closes over arrays inside a "
                "jax.shard_map that checks its axes. Hand them in as ScoreFn(fn, params), give the "
                'shard_map check_vma=False, or ask for backend="reference".'
            )
        self.text = str(self.jaxpr)
        self.inside = tuple(_constants_inside(self.jaxpr))

    def __eq__(self, other: Any) -> bool:
        mine = self.fn, self.text, self.inside
        return isinstance(other, Run) and mine == (other.fn, other.text, other.inside)

    def __hash__(self) -> int:
        return hash((self.fn, self.text))

    def __call__(self, consts: tuple, *element: Any) -> jax.Array:
        (out,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, consts))(*jax.tree.leaves(element))
        return out


def _constants_inside(jaxpr: Any) -> Iterator[bytes]:
    """Constants that jitted functions inside a program close over; its text does not show them.

    Traced values are not among them: they become constants of the whole program.
    """
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from map(_bits, inner.consts)
                yield from _constants_inside(inner.jaxpr)


def _bits(x: Any) -> bytes:
    """A constant's bytes: NaN compares equal to itself."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(x) if is_key else x).tobytes()


@frozen
class Traced(Mask):
    """A traced mask function."""

    run: Callable[..., jax.Array]
    consts: tuple
    places: Places | None = None

    @cached_property
    def is_static(self):
        return False

    def at(self, places):
        return Traced(self.run, self.consts, places)

    def __call__(self, b, n, q, k):
        index = (*in_whole(self.places, b, n), q, k)
        return _over_block(self.run, self.consts, index)


@frozen
class TracedScore(Score):
    """A traced score function and its parameters."""

    run: Callable[..., jax.Array]
    params: Any
    consts: tuple
    places: Places | None = None

    AXES: ClassVar = {}

    def at(self, places):
        return TracedScore(self.run, self.params, self.consts, places)

    def __call__(self, logits, b, n, q, k):
        index = (*in_whole(self.places, b, n), q, k)
        return _over_block(self.run, self.consts, index, self.params, logits)


def hoist(rules: Any, logit: Any, axes: frozenset = frozenset()) -> Any:
    """Rules whose functions close over no arrays; `logit` is the dtype of the logits.

    `axes` are the manual axes of an enclosing `jax.shard_map`, over which indices and logits vary.
    """
    return _as_pure_function(rules, as_varying(jnp.zeros((), logit), axes))


def with_wide_arrays(score: Any, kind: Any) -> Any:
    """The score with floating arrays as wide as the logits, which `kind` is the dtype of.

    The gradient of an array that many blocks read is a sum over them, of which each part would be
    rounded. An `Additive` keeps its dtype: each block has elements of its own.
    """

    leaves, structure = jax.tree.flatten(score, is_leaf=lambda x: isinstance(x, Additive))
    wider = [x.astype(kind) if _is_narrower(x, kind) else x for x in leaves]
    same = all(x is y for x, y in zip(leaves, wider, strict=True))
    return score if same else structure.unflatten(wider)


def _is_narrower(x: Any, kind: Any) -> bool:
    """Whether it is a floating array of fewer bytes an element."""
    is_floating = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return is_floating and x.dtype.itemsize < kind.itemsize


def has_functions(rules: Any) -> bool:
    """Whether hoisted rules contain a user's function."""
    if isinstance(rules, Traced | TracedScore):
        return True
    return is_dataclass(rules) and any(has_functions(getattr(rules, f.name)) for f in fields(rules))


def _index(logit: jax.Array) -> list[jax.Array]:
    return [logit.astype(jnp.int32)] * 4


@singledispatch
def _as_pure_function(node: Any, logit: jax.Array) -> Any:
    if not is_dataclass(node):
        return node
    if isinstance(node, Score) and jax.tree.leaves(node):
        node = with_wide_arrays(node, logit.dtype)
    parts = {field.name: getattr(node, field.name) for field in fields(node)}
    pure = {name: _as_pure_function(part, logit) for name, part in parts.items()}
    changed = {name: part for name, part in pure.items() if part is not parts[name]}
    return replace(node, **changed) if changed else node  # pyright: ignore[reportArgumentType]


@_as_pure_function.register
def _(node: MaskFn, logit):
    run = Run(node.fn, MaskFn(node.fn), *_index(logit))
    return Traced(run, run.consts, node.places)


@_as_pure_function.register
def _(node: ScoreFn, logit):
    def one(params, x, b, n, q, k):
        return ScoreFn(node.fn, params)(x, b, n, q, k)

    params = with_wide_arrays(node.params, logit.dtype)
    run = Run(node.fn, one, params, logit, *_index(logit))
    return TracedScore(run, params, run.consts, node.places)


def _over_block(run: Any, consts: tuple, index: tuple, *arrays: Any) -> jax.Array:
    """`run` on every element of a block; `arrays` are a score's parameters and logits, or none."""
    index = tuple(jnp.asarray(x) for x in index)
    consts, arrays, index = jax.tree.map(
        lambda x: as_varying(x, run.axes), unify_varying((consts, arrays, index))
    )
    return on_elements(lambda *xs: run(consts, *arrays[:1], *xs), index, *arrays[1:])
