"""Loops side by side, on several cores of a CPU.

XLA runs at once what neither needs nor overwrites the other's results. Two loops would do neither,
but it plans memory as if one followed the other, so that both compute on the same few pages; only
what a loop carries from turn to turn is its own. So these loops carry all that a turn computes on
its way: products, rows of maxima, slices. The next turn reads none of it and writes the same again
into the same place. A thread goes on to the next loop only when the one it runs waits for another
thread, so each turn begins with a little work that two threads share.

All of this is about time alone: what the loops compute is what one would. Where a turn computes
something that is not carried, they run one after the other.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

# What XLA computes into memory of its own, rather than within what reads it; of the first kind also
# what they read.
REDUCTIONS = {"dot_general", "reduce_max", "reduce_sum", "concatenate"}
EXPENSIVE = {"exp", "tanh", "div", "rem"}
SAME_MEMORY = {"reshape", "squeeze", "expand_dims"}


def scan(step: Callable[[Any, jax.Array], Any], carry: Any, count: int, lanes: int) -> Any:
    """`carry, y = step(carry, i)` for i below `count`, in so many loops: carry and ys, stacked.

    Each loop starts from the carry, which is zeros, and the sum of theirs is given.
    """
    program, shapes = jax.make_jaxpr(step, return_shape=True)(carry, jnp.int32(0))
    outs = _interleave_loops(program, count, lanes)(program.consts, jax.tree.leaves(carry))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)


def _interleave_loops(program: ClosedJaxpr, count: int, lanes: int) -> Callable[..., list]:
    """`run(consts, carry)`: the results of all turns of a program, which its loops share.

    What is differentiated is one loop in their place: these carry what they need not, end by a
    value that they compute, and so have no derivative in reverse.
    """

    @jax.custom_jvp
    def run(consts: list, carry: list) -> list:
        bounds = [count * lane // lanes for lane in range(lanes + 1)]
        mine = ClosedJaxpr(program.jaxpr, consts)
        loops = [_Loop(mine, *pair) for pair in pairwise(bounds)]
        starts = [loop.start(carry) for loop in loops]
        ends = [loop.run(start) for loop, start in zip(loops, starts, strict=True)]
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
    """False, of which XLA cannot know that: it would leave out what nobody reads."""
    parts = [x.ravel()[0].astype(jnp.float32) for x in jax.tree.leaves(arrays)]
    return jnp.sum(jnp.stack(parts)) ** 2 < -1


class _State(NamedTuple):
    """What a loop carries: its turn, whether there is one, results, and what nobody reads."""

    i: jax.Array
    goes_on: jax.Array
    carry: list
    ys: list
    unread: tuple[jax.Array, list]


class _Loop(NamedTuple):
    """The turns from `first` to `end` of a program of a carry and a turn's number."""

    program: ClosedJaxpr
    first: int
    end: int

    def start(self, carry: list) -> _State:
        ys = self.program.out_avals[len(carry) :]
        ys = [jnp.zeros((self.end - self.first, *y.shape), y.dtype) for y in ys]
        # Two that are alike would be one array, and copied.
        shared = jnp.full((2, 4096), 1.0 + self.first)
        state = _State(jnp.int32(self.first), jnp.bool_(True), carry, ys, (shared, []))
        stored = jax.eval_shape(lambda: self.iteration(state).unread[1])
        return state._replace(unread=(shared, [jnp.zeros(x.shape, x.dtype) for x in stored]))

    def run(self, start: _State) -> _State:
        return jax.lax.while_loop(lambda state: state.goes_on, self.iteration, start)

    def iteration(self, state: _State) -> _State:
        way = _Tracer()
        # Computed again from its parts, so that the next number may be written over this one.
        i = way.opaque_index(state.i)
        outs = way.run(self.program, [*state.carry, i])
        carry, new = outs[: len(state.carry)], outs[len(state.carry) :]
        at = i - self.first
        ys = [_put(y, x, at) for y, x in zip(state.ys, new, strict=True)]
        shared = state.unread[0]
        for _ in range(16):  # much to compute on little, or XLA would not share it
            shared = shared * 0.5 + 0.25
        return _State(i + 1, i + 1 < self.end, carry, ys, (shared, way.stored))


def _put(y: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    starts = (at, *(jnp.int32(0) for _ in x.shape))
    return jax.lax.dynamic_update_slice(y, x[None], starts, allow_negative_indices=False)


class _Tracer:
    """Programs run, and what they compute on the way: `stored`, each memory once."""

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
        if name == "custom_jvp_call":  # these loops are not differentiated
            return self.run(equation.params["call_jaxpr"], ins)
        params = equation.primitive.get_bind_params(equation.params)
        outs = equation.primitive.bind(*ins, **params)
        outs = list(outs) if equation.primitive.multiple_results else [outs]
        self.made |= {id(x): x for x in outs}
        if name in SAME_MEMORY:
            self.memory[id(outs[0])] = self.memory.get(id(ins[0]), id(ins[0]))
        if name in REDUCTIONS:
            self.keep(ins)
        if name in REDUCTIONS | EXPENSIVE:
            self.keep(outs)
        return outs

    def opaque_index(self, i: jax.Array) -> jax.Array:
        """A number from 0 on, computed from its parts, so that nothing else reads it."""
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
