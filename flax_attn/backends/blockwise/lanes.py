"""Parallel loops on several cores of a CPU.

XLA runs operations concurrently if they neither depend on each other nor share buffers. Two loops
do not depend on each other, but XLA's buffer assignment lets them share temporary buffers, which
serialises them; only loop carries have buffers of their own. So these loops carry every
intermediate of an iteration: products, row maxima, slices. The next iteration reads none of them
and overwrites each in place. A thread moves on to the next loop only when its loop waits for
another thread, so each iteration begins with a little work that two threads share.

This affects speed only: the results are those of one loop. If an iteration has an intermediate that
is not carried, the loops run one after the other.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# Operations whose results XLA stores in a buffer instead of fusing them into their consumers; of
# `REDUCTIONS` also the operands.
REDUCTIONS = {"dot_general", "reduce_max", "reduce_sum", "concatenate"}
EXPENSIVE = {"exp", "tanh", "div", "rem"}
SAME_MEMORY = {"reshape", "squeeze", "expand_dims"}


def scan(step: Callable[[Any, jax.Array], Any], carry: Any, count: int, lanes: int) -> Any:
    """`jax.lax.scan` of `step(carry, i)` for i < `count`, split into `lanes` parallel loops.

    Each loop starts from the carry, which must be zeros; their final carries are summed.
    """
    # The step is traced once, and its equations are replayed inside each loop.
    program, shapes = jax.make_jaxpr(step, return_shape=True)(carry, jnp.int32(0))
    outs = _interleave_loops(program, count, lanes)(program.consts, jax.tree.leaves(carry))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _interleave_loops(program: ClosedJaxpr, count: int, lanes: int) -> Callable[..., list]:
    """`run(consts, carry)`: the results of all iterations of a program, divided among loops.

    A `while` loop whose end is computed in the loop has no reverse-mode derivative, so one plain
    scan is differentiated instead.
    """

    @jax.custom_jvp
    def run(consts: list, carry: list) -> list:
        # Contiguous ranges of iterations, so that the stacked outputs are concatenated in order.
        bounds = [count * lane // lanes for lane in range(lanes + 1)]
        mine = ClosedJaxpr(program.jaxpr, consts)
        loops = [_Loop(mine, *pair) for pair in pairwise(bounds)]
        starts = [loop.start(carry) for loop in loops]
        ends = [loop.run(start) for loop, start in zip(loops, starts, strict=True)]
        # Unread carries would be removed as dead code: select on a value that depends on them.
        never = _opaque_false([end.unread for end in ends])
        parts = zip(*(end.carry for end in ends), strict=True)
        outs = [jnp.sum(jnp.stack(xs), axis=0) for xs in parts]
        outs += [jnp.concatenate(xs) for xs in zip(*(end.ys for end in ends), strict=True)]
        return [jnp.where(never, jnp.zeros((), x.dtype), x) for x in outs]

    def one_loop(consts: list, carry: list) -> list:
        def iteration(carry: list, i: jax.Array) -> tuple[list, list]:
            outs = jaxpr_as_fun(ClosedJaxpr(program.jaxpr, consts))(*carry, i)
            return outs[: len(carry)], outs[len(carry) :]

        carry, ys = jax.lax.scan(iteration, carry, jnp.arange(count, dtype=jnp.int32))
        return [*carry, *ys]

    run.defjvp(partial(jax.jvp, one_loop))
    return run


def _opaque_false(arrays: Any) -> jax.Array:
    """False, computed from `arrays` in a way that XLA cannot fold to a constant."""
    parts = [x.ravel()[0].astype(jnp.float32) for x in jax.tree.leaves(arrays)]
    return jnp.sum(jnp.stack(parts)) ** 2 < -1


class _State(NamedTuple):
    """Loop carry: iteration, whether to continue, results, and unread intermediates."""

    i: jax.Array
    goes_on: jax.Array
    carry: list
    ys: list
    unread: tuple[jax.Array, list]


class _Loop(NamedTuple):
    """Iterations `first` to `end` of a program `(carry, index) -> (carry, outputs)`."""

    program: ClosedJaxpr
    first: int
    end: int

    def start(self, carry: list) -> _State:
        ys = self.program.out_avals[len(carry) :]
        ys = [jnp.zeros((self.end - self.first, *y.shape), y.dtype) for y in ys]
        # Each loop fills it with another number: equal constants would share one buffer.
        shared = jnp.full((2, 4096), 1.0 + self.first)
        state = _State(jnp.int32(self.first), jnp.bool_(True), carry, ys, (shared, []))
        # Which intermediates there are is known only by running an iteration abstractly.
        stored = jax.eval_shape(lambda: self.iteration(state).unread[1])
        return state._replace(unread=(shared, [jnp.zeros(x.shape, x.dtype) for x in stored]))

    def run(self, start: _State) -> _State:
        return jax.lax.while_loop(lambda state: state.goes_on, self.iteration, start)

    def iteration(self, state: _State) -> _State:
        way = _Tracer()
        # A copy of the index, so that the carried one can be overwritten in place.
        i = way.opaque_index(state.i)
        outs = way.run(self.program, [*state.carry, i])
        carry, new = outs[: len(state.carry)], outs[len(state.carry) :]
        at = i - self.first
        ys = [_put(y, x, at) for y, x in zip(state.ys, new, strict=True)]
        shared = state.unread[0]
        for _ in range(16):  # enough arithmetic for XLA to divide it among threads
            shared = shared * 0.5 + 0.25
        return _State(i + 1, i + 1 < self.end, carry, ys, (shared, way.stored))


def _put(y: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    starts = (at, *(jnp.int32(0) for _ in x.shape))
    return jax.lax.dynamic_update_slice(y, x[None], starts, allow_negative_indices=False)


class _Tracer:
    """Evaluates a jaxpr and collects its intermediates in `stored`, each buffer once."""

    def __init__(self):
        self.stored: list[jax.Array] = []
        self.made: dict[int, jax.Array] = {}
        self.memory: dict[int, int] = {}
        self.visited: set[int] = set()

    def run(self, program: ClosedJaxpr, args: list) -> list:
        jaxpr = program.jaxpr
        inputs = zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True)
        values = dict(inputs)

        def read(x: Any) -> Any:
            return x.val if isinstance(x, Literal) else values[x]

        for equation in jaxpr.eqns:
            outs = self.one(equation, [read(x) for x in equation.invars])
            values.update(zip(equation.outvars, outs, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def one(self, equation: Any, ins: list) -> list:
        name = equation.primitive.name
        if name == "jit":
            return self.run(equation.params["jaxpr"], ins)
        if name == "custom_jvp_call":  # its rule is not needed: `run` has one of its own
            return self.run(equation.params["call_jaxpr"], ins)
        params = equation.primitive.get_bind_params(equation.params)
        outs = equation.primitive.bind(*ins, **params)
        outs = list(outs) if equation.primitive.multiple_results else [outs]
        # Keeping the arrays alive keeps their ids unique.
        self.made |= {id(x): x for x in outs}
        if name in SAME_MEMORY:
            self.memory[id(outs[0])] = self.memory.get(id(ins[0]), id(ins[0]))
        if name in REDUCTIONS:
            self.keep(ins)
        if name in REDUCTIONS | EXPENSIVE:
            self.keep(outs)
        return outs

    def opaque_index(self, i: jax.Array) -> jax.Array:
        """The index recomputed as `i // 3 * 3 + i % 3`, which XLA does not simplify to `i`."""
        parts = jax.lax.div(i, jnp.int32(3)), jax.lax.rem(i, jnp.int32(3))
        whole = parts[0] * 3 + parts[1]
        made = [*parts, whole]
        self.made |= {id(x): x for x in made}
        self.keep(made)
        return whole

    def keep(self, arrays: list) -> None:
        for x in arrays:
            memory = self.memory.get(id(x), id(x))
            if id(x) in self.made and memory not in self.visited:
                self.visited.add(memory)
                self.stored.append(x)
