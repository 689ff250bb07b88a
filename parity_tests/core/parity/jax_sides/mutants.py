"""Functions with one operation changed, by a seed: a mistake, or the same in another way.

A mutant traces the function anew in whatever dtype it is called, evaluates the program operation
by operation, and changes the result of one of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

Change = Callable[[Any, Sequence[Any], Any, np.random.Generator], Any]
MOVES = 1e-6  # of all outputs or gradients: less is no fault


class Mutant(NamedTuple):
    """A function with the operation `at` changed.

    `seed` draws what the change needs: an axis, a place.
    """

    function: Callable[..., Any]
    at: int
    change: str
    seed: int

    def __call__(self, *args: Any) -> Any:
        program, shapes = jax.make_jaxpr(self.function, return_shape=True)(*args)
        change = {**MISTAKES, **REWRITES}[self.change]

        def visited(number: int, equation: Any, values: Sequence[Any], out: Any) -> Any:
            if number != self.at:
                return out
            return change(equation, values, out, np.random.default_rng(self.seed))

        out = _evaluated(program, jax.tree.leaves(args), visited, iter(range(10**6)))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _evaluated(program: ClosedJaxpr, arrays: Sequence[Any], visited: Any, numbers: Any) -> list:
    """The results of a program; each float of an operation passes through `visited`."""
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(program.jaxpr.invars, arrays, strict=True))

    def value(x: Any) -> Any:
        return jnp.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else known[x]

    for equation in program.jaxpr.eqns:
        values = list(map(value, equation.invars))
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if equation.primitive.name in ("jit", "custom_jvp_call") and isinstance(inner, ClosedJaxpr):
            outs = _evaluated(inner, values, visited, numbers)
        else:
            params = equation.primitive.get_bind_params(equation.params)
            made = equation.primitive.bind(*values, **params)
            outs = list(made) if equation.primitive.multiple_results else [made]
            if _is_float(outs[0]):
                outs[0] = visited(next(numbers), equation, values, outs[0])
        known |= dict(zip(equation.outvars, outs, strict=True))
    return list(map(value, program.jaxpr.outvars))


def operations(function: Callable[..., Any], given: Sequence[Any]) -> int:
    """How many operations a function has whose result is a float."""
    count = iter(range(10**6))
    program = jax.make_jaxpr(function)(*given)
    _evaluated(program, jax.tree.leaves(list(given)), lambda n, e, v, out: out, count)
    return next(count)


def _axis(out: Any, drawn: np.random.Generator) -> int | None:
    long = [i for i, n in enumerate(out.shape) if n > 1]
    return int(drawn.choice(long)) if long else None


def _along(change: Callable[[Any, int], Any]) -> Change:
    def changed(equation: Any, values: Any, out: Any, drawn: np.random.Generator) -> Any:
        axis = _axis(out, drawn)
        return out if axis is None else change(out, axis)

    return changed


def _without_slice(out: Any, axis: int) -> Any:
    first = lax.broadcasted_iota(jnp.int32, out.shape, axis) == 0
    return jnp.where(first, jnp.zeros_like(out), out)


def _on(names: str, change: Callable[..., Any]) -> Change:
    """A change of operations of these names; others stay."""

    def changed(equation: Any, values: Any, out: Any, drawn: Any) -> Any:
        name = equation.primitive.name
        return change(*values) if name in names.split() else out

    return changed


MISTAKES: dict[str, Change] = {
    "scaled": lambda equation, values, out, drawn: out * 1.0003,
    "shifted": lambda equation, values, out, drawn: out + 0.0007,
    "rolled": _along(lambda out, axis: jnp.roll(out, 1, axis)),
    "flipped": _along(jnp.flip),
    "a slice left out": _along(_without_slice),
    "in bfloat16": lambda equation, values, out, drawn: out.astype(jnp.bfloat16).astype(out.dtype),
    "detached": lambda equation, values, out, drawn: lax.stop_gradient(out),
    "half detached": lambda equation, values, out, drawn: (out + lax.stop_gradient(out)) / 2,
    "zeros": lambda equation, values, out, drawn: 0 * out,
    "exchanged": _on("sub div", lambda x, y: y - x),
    "another operation": _on("tanh logistic exp", jnp.sin),
}


def _wide(equation: Any, values: Any, out: Any, drawn: Any) -> Any:
    """The operation in float32, as kernels do it."""
    if equation.primitive.name not in ("add", "sub", "mul", "exp", "tanh", "logistic"):
        return out
    single = [x.astype(jnp.float32) for x in values]
    return equation.primitive.bind(*single, **equation.params).astype(out.dtype)


def _in_halves(equation: Any, values: Any, out: Any, drawn: Any) -> Any:
    if equation.primitive.name != "reduce_sum":
        return out
    (x,), axes = values, equation.params["axes"]
    middle = x.shape[axes[0]] // 2
    parts = jnp.split(x, [middle], axes[0])
    return parts[0].sum(axes) + parts[1].sum(axes)


REWRITES: dict[str, Change] = {
    "in float32": _wide,
    "a sum in halves": _in_halves,
    "operands exchanged": _on("add", lambda x, y: y + x),
    "times the reciprocal": _on("div", lambda x, y: x * (1 / y)),
    "plus the negative": _on("sub", lambda x, y: x + -y),
    "one over the exponential": _on("exp", lambda x: 1 / jnp.exp(-x)),
    "a third three times": lambda equation, values, out, drawn: (out / 3) * 3,
    "there and back": _along(lambda out, axis: jnp.flip(jnp.flip(out, axis), axis)),
    "by its logistic": _on("tanh", lambda x: 2 * jax.nn.sigmoid(2 * x) - 1),
    "recomputed": lambda equation, values, out, drawn: jax.checkpoint(lambda x: x * 1.0)(out),
}


def drawn_mutants(
    subjects: Sequence[tuple[Callable[..., Any], Sequence[Any]]], kinds: Sequence[str], seed: int
) -> Iterator[tuple[Mutant, Sequence[Any]]]:
    """Yields mutants of these subjects without end, each with the inputs of its function."""
    drawn = np.random.default_rng(seed)
    counts = [operations(function, given) for function, given in subjects]
    while True:
        i = int(drawn.integers(len(subjects)))
        function, given = subjects[i]
        at, kind = int(drawn.integers(counts[i])), str(drawn.choice(kinds))
        yield Mutant(function, at, kind, int(drawn.integers(2**31))), given


def moves(mutant: Mutant, given: Sequence[Any]) -> bool:
    """Whether a mutant's outputs or gradients are others in float64."""
    with jax.enable_x64(True):
        wants, founds = (_all(function, given) for function in (mutant.function, mutant))
    pairs = zip(wants, founds, strict=True)
    return any(_distance(found, want) > MOVES for want, found in pairs)


def _all(function: Callable[..., Any], given: Sequence[Any]) -> list[np.ndarray]:
    arrays = [jnp.asarray(x) for x in given]
    floats = [i for i, x in enumerate(arrays) if _is_float(x)]

    def of(*changed: Any) -> Any:
        filled = dict(zip(floats, changed, strict=True))
        return function(*(filled.get(i, x) for i, x in enumerate(arrays)))

    @jax.jit  # operation by operation it compiles each of them
    def both(*taken: Any) -> Any:
        out, back = jax.vjp(of, *taken)
        like = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)), out)
        return out, back(jax.tree.map(lambda x, y: x.reshape(y.shape), like, out))

    found = both(*(arrays[i] for i in floats))
    return [np.asarray(x) for x in jax.tree.leaves(found)]


def _distance(found: np.ndarray, want: np.ndarray) -> float:
    if not np.isfinite(found).all():
        return np.inf
    return float(np.linalg.norm(found - want) / max(np.linalg.norm(want), 1e-30))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
