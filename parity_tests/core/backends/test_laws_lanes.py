"""The laws of parallel loops: they equal one loop and carry all stored intermediates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn.backends.blockwise import lanes
from flax_attn.parity import judge

from .law_cases import eager64

ROWS = np.random.RandomState(0).randn(7, 2, 3)
TABLE = np.random.RandomState(1).randn(3, 4)


@jax.custom_jvp
def powers(x):
    return jnp.exp(x) * 1.0


powers.defjvp(lambda primals, tangents: (powers(*primals), powers(*primals) * tangents[0]))


def step(rows: Any, table: Any, carry: Any, i: Any) -> tuple[Any, Any]:
    """All that an iteration of attention has: products, maxima, jit, a rule, sums and outputs."""
    rows, table = jnp.asarray(rows), jnp.asarray(table)
    x = jax.lax.dynamic_index_in_dim(rows, i, keepdims=False)  # 2 3
    largest = jnp.max(x, axis=1, keepdims=True)
    weights = powers(x - largest)
    y = jax.jit(jnp.tanh)((weights @ table).reshape(8)).reshape(2, 4)
    return {"sum": carry["sum"] + y, "count": carry["count"] + i.astype(jnp.float32)}, {
        "row": y[0],
        "last": x[1],
    }


def start() -> dict[str, jax.Array]:
    return {"sum": jnp.zeros((2, 4)), "count": jnp.float32(0)}


def by_one(rows: Any, table: Any, count: int) -> Any:
    carry, ys = start(), []
    for i in range(count):
        carry, y = step(rows, table, carry, jnp.int32(i))
        ys.append(y)
    return carry, jax.tree.map(lambda *parts: jnp.stack(parts), *ys)


def by_loops(rows: Any, table: Any, count: int, loops: int) -> Any:
    return lanes.scan(lambda carry, i: step(rows, table, carry, i), start(), count, loops)


@eager64
def test_any_number_of_loops_gives_what_one_gives():
    for count, loops in ((1, 1), (5, 2), (7, 3), (4, 4)):
        got = jax.jit(by_loops, static_argnums=(2, 3))(ROWS, TABLE, count, loops)
        want = jax.jit(by_one, static_argnums=2)(ROWS, TABLE, count)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert x.dtype == y.dtype and judge.allclose(np.asarray(x), np.asarray(y))


@eager64
def test_a_derivative_is_that_of_one_loop():
    def total(by: Any, *how: int) -> Any:
        def loss(rows: jax.Array, table: jax.Array) -> jax.Array:
            carry, ys = by(rows, table, 5, *how)
            return jnp.sum(carry["sum"] ** 2) + jnp.sum(ys["row"] * ys["last"][:, :1])

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(ROWS, TABLE)

    for got, want in zip(total(by_loops, 2), total(by_one), strict=True):
        assert judge.allclose(np.asarray(got), np.asarray(want)) and jnp.any(want != 0)


def traced(function: Any, *args: Any) -> tuple[lanes._Tracer, list]:
    tracer = lanes._Tracer()
    args = tuple(map(jnp.asarray, args))
    with jax.disable_jit(False):
        program = jax.make_jaxpr(function)(*args)
    return tracer, tracer.run(program, list(args))


@eager64
def test_what_xla_stores_is_kept_once():
    """Products, sums, maxima and what they read, and expensive functions; a reshape is no copy."""
    x = ROWS[0]

    def kept(function: Any, *args: Any) -> list[tuple[int, ...]]:
        return [stored.shape for stored in traced(function, *args)[0].stored]

    assert kept(lambda x: x + 1.0, x) == []
    assert kept(jnp.exp, x) == kept(jnp.tanh, x) == kept(lambda x: x / 3.0, x) == [(2, 3)]
    assert kept(lambda x: jax.lax.rem(x, x), x) == [(2, 3)]
    assert kept(lambda x: x @ TABLE, x) == [(2, 4)]  # what is handed in is stored already
    assert kept(lambda x: (x + 1.0) @ TABLE, x) == [(2, 3), (2, 4)]
    assert kept(lambda x: jnp.max(x + 1.0, axis=1), x) == [(2, 3), (2,)]
    assert kept(lambda x: jnp.sum(x * 2.0, axis=1), x) == [(2, 3), (2,)]
    assert kept(lambda x: jnp.concatenate([x * 2.0, x]), x) == [(2, 3), (4, 3)]
    assert kept(lambda x: jnp.sum(jnp.exp(x), axis=1), x) == [(2, 3), (2,)]
    assert kept(lambda x: jnp.sum(jnp.exp(x).reshape(6), axis=0), x) == [(2, 3), ()]
    for same in (lambda y: y.reshape(3, 2), lambda y: y[None], lambda y: y[:, :1][:, 0]):
        shapes = kept(lambda x, same=same: jnp.max(same(jnp.exp(x)), axis=0), x)
        assert shapes[0] == (2, 3) and len(shapes) <= 3
    assert kept(jax.jit(jnp.exp), x) == kept(powers, x) == [(2, 3)]
    assert kept(lambda x: jax.jit(powers)(x) + 1.0, x) == [(2, 3)]


@eager64
def test_a_program_is_replayed_as_it_was_traced():
    tracer, outs = traced(lambda x, y: (jnp.exp(x) @ TABLE, y, jnp.sort(y), 3.0), *ROWS[:2])
    wanted = (np.exp(ROWS[0]) @ TABLE, ROWS[1], np.sort(ROWS[1]), 3.0)
    for got, want in zip(outs, wanted, strict=True):
        assert judge.allclose(np.asarray(got), np.asarray(want))
    assert [x.shape for x in tracer.stored] == [(2, 3), (2, 4)]
    tops = traced(lambda x: jax.lax.top_k(x, 2), ROWS[0])[1]
    assert [x.shape for x in tops] == [(2, 2), (2, 2)]


@eager64
def test_the_loop_index_of_an_iteration_is_stored_per_iteration():
    for i in range(7):
        tracer = lanes._Tracer()
        assert tracer.opaque_index(jnp.int32(i)) == i
        assert [int(x) for x in tracer.stored] == [i // 3, i % 3, i]


@eager64
def test_every_intermediate_is_carried_to_the_next_iteration():
    """A loop's carry has all that an iteration stores, in the same order, shapes and dtypes."""
    program = jax.make_jaxpr(lambda s, i: step(ROWS, TABLE, s, i))(start(), jnp.int32(0))
    loop = lanes._Loop(program, 2, 5)
    begin, iteration = jax.jit(loop.start)(jax.tree.leaves(start())), jax.jit(loop.iteration)
    after = iteration(begin)
    assert jax.tree.map(jnp.shape, begin) == jax.tree.map(jnp.shape, after)
    assert jax.tree.map(jnp.result_type, begin) == jax.tree.map(jnp.result_type, after)
    shapes = [x.shape for x in after.unread[1]]
    assert shapes.count((2, 4)) >= 1 and shapes.count((2, 3)) >= 2 and (2,) in shapes
    assert (int(begin.i), int(after.i)) == (2, 3) and bool(after.goes_on)
    assert not bool(iteration(iteration(after)).goes_on)
    other = lanes._Loop(program, 3, 5).start(jax.tree.leaves(start()))
    assert not np.array_equal(begin.unread[0], other.unread[0])
    assert not np.array_equal(begin.unread[0], after.unread[0])


@eager64
def test_values_that_nobody_reads_count_as_read_and_change_nothing():
    for number in (0.0, 3.0, -1e30):
        assert not bool(lanes._opaque_false([jnp.full(4, number), jnp.int32(0)]))
    program = jax.make_jaxpr(lambda x: lanes._opaque_false([x]))(jnp.ones(3))
    assert {x.primitive.name for x in program.jaxpr.eqns} & {"reduce_sum"}
