"""Users' functions made pure: the arrays that they close over become leaves of the rules.

A `custom_vjp` may not close over traced arrays, neither differentiated ones nor those of a trace
that is over when the backward pass is made. So every function in the rules is traced once, on one
logit and four indices, and runs on a block by mapping over its rows and columns.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import singledispatch
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from ..._types import frozen
from ...masks import Fn, Mask
from ...scores import Modify

INDEX = jax.ShapeDtypeStruct((), jnp.int32)


class Run:
    """A traced function of one element; told apart by what was traced, so that it compiles once.

    The same function may close over other things the next time, so its trace counts as well.
    """

    def __init__(self, fn: Callable[..., jax.Array], trace: Callable, *element: Any):
        self.fn = fn
        # Indices are numpy arrays in the reference, which may be mixed with anything.
        with jax.numpy_dtype_promotion("standard"):
            closed = jax.make_jaxpr(lambda *xs: trace(*xs))(*element)
        self.jaxpr, self.consts = closed.jaxpr, tuple(closed.consts)
        self.text = str(self.jaxpr)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Run) and self.fn == other.fn and self.text == other.text

    def __hash__(self) -> int:
        return hash((self.fn, self.text))

    def __call__(self, consts: tuple, *element: Any) -> jax.Array:
        (out,) = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, consts))(*jax.tree.leaves(element))
        return out


@frozen
class Traced(Mask):
    """A mask function, traced."""

    run: Callable[..., jax.Array]
    consts: tuple

    def __call__(self, b, n, q, k):
        over = _over_block(lambda b, n, q, k: self.run(self.consts, b, n, q, k))
        return over(b.reshape(()), n.reshape(-1), q.reshape(-1), k.reshape(-1))


def hoist(rules: Any, logit: Any) -> Any:
    """Bound rules whose functions close over no array; `logit` is the dtype of a logit."""
    return _pure(rules, jax.ShapeDtypeStruct((), logit))


@singledispatch
def _pure(node: Any, logit: jax.ShapeDtypeStruct) -> Any:
    if not is_dataclass(node):
        return node
    parts = {field.name: getattr(node, field.name) for field in fields(node)}
    pure = {name: _pure(part, logit) for name, part in parts.items()}
    changed = {name: part for name, part in pure.items() if part is not parts[name]}
    return replace(node, **changed) if changed else node  # pyright: ignore[reportArgumentType]


@_pure.register
def _(node: Fn, logit):
    run = Run(node.mask_mod, node, INDEX, INDEX, INDEX, INDEX)
    return Traced(run, run.consts)


@_pure.register
def _(node: Modify, logit):
    params = () if node.params is None else node.params

    def one(params, x, b, n, q, k):
        return Modify(node.fn, None if node.params is None else params)(x, b, n, q, k)

    run = Run(node.fn, one, params, logit, INDEX, INDEX, INDEX, INDEX)
    return Modify(_OnBlock(run), (params, run.consts))


class _OnBlock:
    """A score function, traced, as `modify` calls it: on a block's logits and open indices."""

    def __init__(self, run: Run):
        self.run = run

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _OnBlock) and self.run == other.run

    def __hash__(self) -> int:
        return hash(self.run)

    def __call__(self, params: Any, x: jax.Array, b: Any, n: Any, q: Any, k: Any) -> jax.Array:
        own, consts = params
        over = _over_block(lambda b, n, q, k, x: self.run(consts, own, x, b, n, q, k), x)
        return over(b.reshape(()), n.reshape(-1), q.reshape(-1), k.reshape(-1))


def _over_block(one: Callable[..., jax.Array], *logits: jax.Array) -> Callable[..., jax.Array]:
    """`one` on every (n, q, k) of a block, and on its logits if there are any."""

    def over(b, n, q, k):
        f = one
        for axis in (3, 2, 1):
            at = tuple(0 if i == axis else None for i in range(4)) + (0,) * len(logits)
            f = jax.vmap(f, at)
        return f(b, n, q, k, *logits)

    return over
