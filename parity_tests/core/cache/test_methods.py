"""Overflow, compiled programs, caches in modules and scans, and memories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, Memory, Window, attend_cached, attend_memory
from parity_tests.core.drawing import float64 as float64

from .cuts import K, T, empty, jitted, joined, same, stepped, tokens, whole
from .test_laws_sequences import formula

pytestmark = pytest.mark.usefixtures("float64")
WINDOW = CAUSAL & Window(3, 0)


def part(x, start, stop):
    return {name: y[:, start:stop] for name, y in x.items()}


def test_an_emptied_row_shows_nothing_of_before_where_no_mask_hides_it():
    x = tokens(length=14)
    _, cache = stepped(part(x, 0, 9), empty(), (9,), mask=None)
    o, _ = stepped(part(x, 9, 11), cache.reset(np.asarray([False, True, False])), (2,), mask=None)
    assert same(o[1], whole(part(x, 9, 11))[1])
    assert same(o[::2], whole(part(x, 0, 11))[::2, 9:])


def test_overflow_under_jit_overwrites_nothing_and_is_nan_from_then_on():
    x = tokens(length=14)
    valid = np.ones((3, 14), bool)
    valid[0, :6] = False
    step = jitted()
    o, before = stepped(part(x, 0, 9), empty(length=12), (9,), jnp.asarray(valid[:, :9]), step)
    assert np.isfinite(o).all()
    o, cache = stepped(part(x, 9, 14), before, (4, 1), step=step)
    assert np.isfinite(o[0]).all() and np.isnan(o[1:]).all()
    assert cache.overflowed.tolist() == [False, True, True]
    for name in ("keys", "values", "positions", "length"):
        assert np.array_equal(getattr(cache, name)[1:], getattr(before, name)[1:]), name
    with pytest.raises(ValueError, match=r"holds 12 tokens a row; rows \[1, 2\]"):
        cache.check()
    assert cache.reset(np.asarray([False, True, True])).check() is not None
    o, cache = stepped(part(x, 0, 1), cache.truncate(1), (1,), step=step)
    assert np.isnan(o[1:]).all()  # taking back mends no row that lost tokens


@pytest.mark.nightly
def test_a_prefill_and_any_number_of_steps_trace_twice():
    x, traces = tokens(), []

    @jax.jit
    def step(q, k, v, cache):
        traces.append(q.shape[1])
        return attend_cached(q, k, v, cache, mask=WINDOW)

    _, cache = step(*part(x, 0, 14).values(), empty(window=4))
    for at in range(14, T):
        _, cache = step(*part(x, at, at + 1).values(), cache)
    assert traces == [14, 1]


@pytest.mark.parametrize("made", [{}, {"window": 1400}], ids=["static", "ring"])
def test_a_compiled_step_writes_in_place_and_copies_nothing_of_the_caches_size(made):
    cache, x = empty((2,), 2048, **made), tokens((2,), length=1)
    mask = CAUSAL & Window(1399, 0)
    step = jax.jit(lambda q, k, v, c: attend_cached(q, k, v, c, mask=mask), donate_argnums=3)
    text = step.lower(*x.values(), cache).compile().as_text()
    aliased = text.split("input_output_alias={")[1].split("entry_computation_layout")[0]
    assert aliased.count("must-alias") + aliased.count("may-alias") >= len(jax.tree.leaves(cache))
    S = cache.slots
    for shape in (f"f64[2,{K},{S},", f"f64[2,{S},{K},", f"f64[{2 * K},{S},"):
        for line in text.splitlines():
            made_here = line.split(" = ")[-1].strip()
            if made_here.startswith(shape):
                op = made_here.split("} ")[-1].split("(")[0] if "} " in made_here else made_here
                assert not op.startswith(("copy", "transpose", "convert", "select")), line


@pytest.mark.nightly
def test_a_cache_works_as_module_data_and_as_a_variable():
    x = tokens(length=5)
    at_once = whole(x, mask=CAUSAL)

    class Decoder(nnx.Module):
        def __init__(self):
            self.as_data = nnx.data(empty())
            self.as_variable = nnx.Variable(empty())

        def __call__(self, q, k, v):
            one, self.as_data = attend_cached(q, k, v, self.as_data)
            two, cache = attend_cached(q, k, v, self.as_variable.get_value())
            self.as_variable.set_value(cache)
            return one, two

    decoder, step = Decoder(), nnx.jit(lambda decoder, *x: decoder(*x))
    for at in range(5):
        one, two = step(decoder, *part(x, at, at + 1).values())
        assert same(one, at_once[:, at : at + 1]) and same(two, one)
    assert decoder.as_data.length.tolist() == [5, 5, 5]


@pytest.mark.nightly
def test_a_stack_of_layers_in_a_scan():
    layers = 2
    at_once = [whole(tokens(seed=i, length=5), mask=CAUSAL) for i in range(layers)]
    xs = jax.tree.map(lambda *y: np.stack(y), *(tokens(seed=i, length=5) for i in range(layers)))
    stack = empty(layers=layers)
    assert stack.keys.shape[0] == layers

    @jax.jit
    def step(stack, xs):
        def layer(_, both):
            x, cache = both
            return None, attend_cached(x["q"], x["k"], x["v"], cache)

        return jax.lax.scan(layer, None, (xs, stack))[1]

    for at in range(5):
        o, stack = step(stack, jax.tree.map(lambda y, at=at: y[:, :, at : at + 1], xs))
        for i in range(layers):
            assert same(o[i], at_once[i][:, at : at + 1])
    assert stack.length.tolist() == [[5] * 3] * layers


def test_a_memory_is_read_by_every_step():
    x = tokens(length=14)
    valid = np.random.default_rng(3).random((3, 14)) > 0.3
    k, v = (np.where(valid[..., None, None], x[name], np.nan) for name in "kv")
    memory, read = jax.jit(Memory.of)(k, v, valid), jax.jit(attend_memory)
    o = joined([read(x["q"][:, at : at + 7], memory) for at in (0, 7)])
    stored = [list(zip(k[row, valid[row]], v[row, valid[row]], strict=True)) for row in range(3)]
    wanted = [[formula(q, stored[r], 0, lambda q, k: k >= q) for q in x["q"][r]] for r in range(3)]
    assert same(o, wanted)

    @jax.jit
    def changed(memory):
        emptied = memory.reset(np.asarray([True, False, False])).check()
        return memory.take(np.asarray([1, 1, 0])), emptied, emptied.insert(0, memory.take([0]))

    taken, emptied, put = changed(memory)
    assert same(read(x["q"][[1, 1, 0], :7], taken), np.asarray(wanted)[[1, 1, 0], :7])
    assert not np.asarray(read(x["q"][:, :7], emptied))[0].any()
    assert same(read(x["q"][:, :7], put), np.asarray(wanted)[:, :7])
