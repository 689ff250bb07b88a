"""Users' functions made pure: the arrays that they close over become leaves of the rules.

A `custom_vjp` may not close over traced arrays, neither differentiated ones nor those of a trace
that is over when the backward pass is made. So every function in the rules is traced once, on one
logit and four indices, and runs on a block by mapping over its rows and columns.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from .._internal.arrays import as_varying, unify_varying
from .._internal.types import frozen
from ..masks import Mask, MaskFn
from ..places import Places, in_whole
from ..scores import ScoreFn

NO_MESH = jax.sharding.AbstractMesh((), ())


class Run:
    """A traced function of one element; told apart by what was traced, so that it compiles once.

    The same function may close over other things the next time, so its trace counts as well.
    """

    def __init__(self, fn: Callable[..., jax.Array], trace: Callable, *element: Any):
        self.fn = fn
        self.axes = jax.typeof(jax.tree.leaves(element)[-1]).manual_axis_type.varying
        # A program keeps the mesh in which it was traced; a shard_map made later has another.
        mesh = nullcontext() if self.axes else jax.sharding.use_abstract_mesh(NO_MESH)
        # Indices are numpy arrays in the reference, which may be mixed with anything.
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
    """What jitted functions inside a program close over, of which its text says nothing.

    What is traced is no constant there: it becomes one of the whole program.
    """
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if isinstance(inner, ClosedJaxpr):
                yield from map(_bits, inner.consts)
                yield from _constants_inside(inner.jaxpr)


def _bits(x: Any) -> bytes:
    """A constant by its bits, which may be compared where there is NaN."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return (jax.random.key_data(x) if is_key else x).tobytes()


@frozen
class Traced(Mask):
    """A mask function, traced."""

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


def hoist(rules: Any, logit: Any, axes: frozenset = frozenset()) -> Any:
    """Rules whose functions close over no array; `logit` is the dtype of a logit.

    `axes` are those of a `jax.shard_map` around, over which indices and logits vary.
    """
    return _as_pure_function(rules, as_varying(jnp.zeros((), logit), axes))


def has_functions(rules: Any) -> bool:
    """Whether hoisted rules hold a function of the user's."""
    if isinstance(rules, Traced | _BlockScore):
        return True
    return is_dataclass(rules) and any(has_functions(getattr(rules, f.name)) for f in fields(rules))


def _index(logit: jax.Array) -> list[jax.Array]:
    return [logit.astype(jnp.int32)] * 4


@singledispatch
def _as_pure_function(node: Any, logit: jax.Array) -> Any:
    if not is_dataclass(node):
        return node
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
    if isinstance(node.fn, _BlockScore):
        return node

    def one(params, x, b, n, q, k):
        return ScoreFn(node.fn, params)(x, b, n, q, k)

    run = Run(node.fn, one, node.params, logit, *_index(logit))
    return ScoreFn(_BlockScore(run), (node.params, run.consts), node.places)


class _BlockScore:
    """A score function, traced, as `ScoreFn` calls it: on a block's logits and open indices."""

    def __init__(self, run: Run):
        self.run = run

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _BlockScore) and self.run == other.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __call__(self, params: Any, x: jax.Array, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        block_params, consts = params
        return _over_block(self.run, consts, (b, n, q, k), block_params, x)


def _over_block(run: Any, consts: tuple, index: tuple, *arrays: Any) -> jax.Array:
    """`run` on every (n, q, k) of a block, or (b, n, q, k) of all.

    The index arrays are open, each long along its own axis alone, but for positions, which may also
    be long along the batch entries. `arrays` are the parameters of a score and its logits; a mask
    has neither.
    """
    axes = (3, 2, 1, 0) if jnp.ndim(index[3]) == 4 else (3, 2, 1)
    index = tuple(jnp.asarray(x) for x in index)
    expand_per_entry = [i > 1 and 0 in axes and x.shape[0] != 1 for i, x in enumerate(index)]
    flat = [
        x.reshape((x.shape[0], -1) if deep else -1 if i in axes else ())
        for i, (x, deep) in enumerate(zip(index, expand_per_entry, strict=True))
    ]
    consts, arrays, flat = jax.tree.map(
        lambda x: as_varying(x, run.axes), unify_varying((consts, arrays, flat))
    )

    def one(index: list, *logits: jax.Array) -> jax.Array:
        return run(consts, *arrays[:1], *logits, *index)

    for axis in axes:
        along = [0 if i == axis or (axis == 0 and expand_per_entry[i]) else None for i in range(4)]
        one = jax.vmap(one, (along, *(0,) * len(arrays[1:])))
    return one(flat, *arrays[1:])
