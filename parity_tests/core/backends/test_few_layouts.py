"""Few queries beside many keys and values, in whichever layout these lie: what a program copies."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from flax_attn import CAUSAL, FULL, Lengths, Memory, Window, attend, attend_memory
from flax_attn.parity import judge
from parity_tests.tables import with_nightly

pytestmark = pytest.mark.nightly

S, N, H, WIDTH = 6000, 6, 16, 8
MASKS = {
    "all": (FULL, {}),
    "lengths": (Lengths(jnp.asarray([4900, 40])), {}),
    "the last": (Window(100, 0, "end"), {}),
    "positions": (CAUSAL, {"q_positions": jnp.asarray([[700], [5400]])}),
}


def drawn(batch, dtype):
    """Queries `*B T N H`, keys `*B S N H` and values `*B S N h`."""
    shapes = (2, N, H), (S, N, H), (S, N, WIDTH)
    keys = map(jax.random.key, range(3))
    return [jax.random.normal(x, (*batch, *n), dtype) for x, n in zip(keys, shapes, strict=True)]


def turned(x):
    return jnp.swapaxes(x, -3, -2)


def from_torch(q, k, v, **rules):
    """The program itself turns keys and values, which lie as torch and caches have them."""
    return attend(q, turned(k), turned(v), **rules)


def copies(program, x):
    """Whether a compiled program needs memory for a whole array like x besides its arguments."""
    return program.memory_analysis().temp_size_in_bytes >= 4 * x.size


WAYS = list(itertools.product(MASKS, (attend, from_torch), [(2,), (1, 2)]))
AT_COMMIT = [way for way in WAYS if way[2] == (2,) or way[0] == "lengths"]


@pytest.mark.parametrize(("name", "call", "batch"), with_nightly(WAYS, commit=AT_COMMIT))
def test_no_layout_is_copied(name, call, batch):
    mask, rules = MASKS[name]
    q, k, v = drawn(batch, jnp.float32)
    given = (q, k, v) if call is attend else (q, turned(k), turned(v))
    program = jax.jit(lambda q, k, v: call(q, k, v, mask=mask, **rules)).lower(*given).compile()
    assert not copies(program, v)
    want = attend(q, k, v, mask=mask, **rules, backend="reference")
    with jax.enable_x64(True):  # how far `want` itself is off depends on the processor
        wide = [x.astype(jnp.float64) for x in (q, k, v)]
        truth = attend(*wide, mask=mask, **rules, backend="reference")
        given64 = wide if call is attend else (wide[0], *map(turned, wide[1:]))
        assert judge.same_function(call(*given64, mask=mask, **rules), truth).ok
    assert judge.no_worse(program(*given), want, truth, "float32").ok


@pytest.mark.parametrize(("dtype", "limit"), [(jnp.float32, 1e-6), (jnp.bfloat16, 1e-3)])
def test_a_memory_is_read_as_it_lies(dtype, limit):
    q, k, v = drawn((2,), dtype)
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (2, S))
    program = jax.jit(attend_memory).lower(q, Memory(turned(k), turned(v), positions)).compile()
    assert not copies(program, v)
    got = program(q, Memory(turned(k), turned(v), positions))
    want = attend(*(x.astype(jnp.float32) for x in (q, k, v)), backend="reference")
    off = jnp.abs(got.astype(jnp.float32) - want).max()
    assert off < limit


def test_gradients_of_turned_keys_are_those_of_others():
    q, k, v = drawn((2,), jnp.float32)

    def of(call, *given):
        o, back = jax.vjp(call, *given)
        return back(jax.random.normal(jax.random.key(9), o.shape))

    dq, dk, dv = jax.jit(lambda *xs: of(attend, *xs))(q, k, v)
    got = jax.jit(lambda *xs: of(from_torch, *xs))(q, turned(k), turned(v))
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (2, S))
    by_memory = jax.jit(
        lambda q, k, v: of(lambda *xs: attend_memory(xs[0], Memory(*xs[1:], positions)), q, k, v)
    )(q, turned(k), turned(v))
    for mine in (got, by_memory):
        for one, want in zip(mine, (dq, turned(dk), turned(dv)), strict=True):
            assert judge.allclose(one, want)
