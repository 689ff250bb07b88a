"""Taking back, reordering, emptying and filling rows; overflow; what is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_attn import CAUSAL, Memory, Prefix, Window, attend_cached, attend_memory
from parity_tests.core.drawing import float64 as float64
from parity_tests.tables import with_nightly

from .cuts import K, T, empty, jitted, joined, paged, same, stepped, tokens, whole

pytestmark = pytest.mark.usefixtures("float64")
WINDOW = CAUSAL & Window(3, 0)
# A cache with nine tokens can give some back, and go on.
CACHES = {
    "static": (lambda: empty(), {"mask": CAUSAL}),
    "ring": (lambda: empty(window=4, spare=5), {"mask": WINDOW}),
    "first kept": (
        lambda: empty(window=4, spare=5, keep_first=2),
        {"mask": CAUSAL & (Window(3, 0) | Prefix(2))},
    ),
    "paged": (paged, {"mask": CAUSAL}),
}
kinds = pytest.mark.parametrize("kind", with_nightly(CACHES, commit=2))


def part(x, start, stop):
    return {name: y[:, start:stop] for name, y in x.items()}


@pytest.mark.nightly
@kinds
@pytest.mark.parametrize("back", with_nightly([9, 7, 4], commit=4))
def test_tokens_are_taken_back_and_others_follow(kind, back):
    make, how = CACHES[kind]
    x, other = tokens(length=14), tokens(seed=7, length=14)
    step = jitted(**how)
    _, cache = stepped(part(x, 0, 9), make(), (9,), step=step)
    cache = cache.truncate(back)
    assert cache.length.tolist() == [back] * 3
    o, cache = stepped(part(other, 0, 5), cache, (1, 1, 1, 2), step=step)
    both = {name: joined([x[name][:, :back], other[name][:, :5]]) for name in x}
    assert same(o, whole(both, **how)[:, back:])


@pytest.mark.nightly
@kinds
def test_rows_are_taken_back_to_lengths_of_their_own(kind):
    make, how = CACHES[kind]
    x = tokens(length=14)
    _, cache = stepped(part(x, 0, 9), make(), (9,), **how)
    cache = cache.truncate(jnp.asarray([9, 6, 20]))
    assert cache.length.tolist() == [9, 6, 9]
    o, _ = stepped(part(x, 9, 10), cache, (1,), **how)
    short = {name: joined([y[1:2, :6], y[1:2, 9:10]]) for name, y in x.items()}
    assert same(o[1], whole(short, **how)[0, -1:])
    assert same(o[::2], whole(part(x, 0, 10), **how)[::2, -1:])


@pytest.mark.nightly
def test_a_ring_gives_back_no_more_than_it_has_spare():
    x = tokens(length=14)
    _, cache = stepped(x, empty(window=4, spare=2), (14,), mask=WINDOW)
    assert cache.truncate(12).length.tolist() == [12] * 3
    with pytest.raises(ValueError, match=r"spare=2.*row 1 would lose more"):
        cache.truncate(jnp.asarray([12, 11, 14]))
    over = jax.jit(lambda c: c.truncate(11))(cache)
    assert over.overflowed.tolist() == [True] * 3
    with pytest.raises(ValueError, match=r"rows \[0, 1, 2\]"):
        over.check()
    twice = cache.truncate(12)
    with pytest.raises(ValueError, match="spare=2"):
        twice.truncate(11)


def test_many_tokens_at_once_do_not_see_what_was_taken_back():
    make, how = CACHES["ring"]
    x, other = tokens(length=14), tokens(seed=7, length=8)  # more than spare, so read before
    _, cache = stepped(part(x, 0, 9), make(), (9,), **how)
    o, _ = stepped(other, cache.truncate(7), (8,), **how)
    both = {name: joined([x[name][:, :7], other[name]]) for name in x}
    assert same(o, whole(both, **how)[:, 7:])


@pytest.mark.nightly
@kinds
def test_rows_are_reordered_and_copied(kind):
    make, how = CACHES[kind]
    x, rows = tokens(length=14), np.asarray([2, 0, 0])
    _, cache = stepped(part(x, 0, 9), make(), (9,), **how)
    o, _ = stepped(part(x, 9, 14), cache.take(rows), (1, 4), **how)
    mixed = {name: joined([y[rows][:, :9], y[:, 9:]]) for name, y in x.items()}
    assert same(o, whole(mixed, **how)[:, 9:])


@pytest.mark.nightly(but=["static"])
@kinds
def test_an_emptied_row_begins_anew_whatever_it_held(kind):
    make, how = CACHES[kind]
    x = tokens(length=14)
    bad = {**x, "k": x["k"].copy(), "v": x["v"].copy()}
    bad["k"][1], bad["v"][1] = np.nan, np.inf
    _, cache = stepped(part(bad, 0, 9), make(), (9,), **how)
    cache = cache.reset(np.asarray([False, True, False]))
    assert cache.length.tolist() == [9, 0, 9]
    o, _ = stepped(part(x, 9, 14), cache, (4, 1), **how)
    assert same(o[1], whole(part(x, 9, 14), **how)[1])
    assert same(o[::2], whole(x, **how)[::2, 9:])


def test_an_emptied_row_shows_nothing_of_before_where_no_mask_hides_it():
    x = tokens(length=14)
    _, cache = stepped(part(x, 0, 9), empty(), (9,), mask=None)
    o, _ = stepped(part(x, 9, 11), cache.reset(np.asarray([False, True, False])), (2,), mask=None)
    assert same(o[1], whole(part(x, 9, 11))[1])
    assert same(o[::2], whole(part(x, 0, 11))[::2, 9:])


@pytest.mark.nightly
@kinds
def test_a_prefilled_row_is_put_in(kind):
    make, how = CACHES[kind]
    x, other = tokens(length=14), tokens((1,), seed=9, length=14)
    _, cache = stepped(part(x, 0, 9), make(), (9,), **how)
    one = empty if kind == "paged" else lambda batch, **_: jax.tree.map(lambda y: y[:1], make())
    _, one = stepped(part(other, 0, 5), one((1,)), (5,), **how)
    put = jax.jit(lambda cache, row, one: cache.insert(row, one))
    cache = put(cache, jnp.asarray(1), one)
    assert cache.length.tolist() == [9, 5, 9]
    o, _ = stepped(part(x, 9, 10), cache, (1,), **how)
    mine = {name: joined([other[name][:, :5], x[name][1:2, 9:10]]) for name in x}
    assert same(o[1], whole(mine, **how)[0, -1:])
    assert same(o[::2], whole(part(x, 0, 10), **how)[::2, -1:])


@pytest.mark.nightly
def test_overflow_is_told_before_anything_is_written():
    x = tokens(length=14)
    valid = np.ones((3, 14), bool)
    valid[0, :6] = False
    _, cache = stepped(part(x, 0, 9), empty(length=12), (9,), jnp.asarray(valid[:, :9]))
    with pytest.raises(ValueError, match=r"holds 12 tokens a row; row 1 would need 14"):
        attend_cached(*part(x, 9, 14).values(), cache)
    assert cache.length.tolist() == [3, 9, 9]


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
def test_overflow_in_a_scan():
    x = tokens(length=14)

    def step(cache, parts):
        o, cache = stepped({n: y[:, None] for n, y in parts.items()}, cache, (1,))
        return cache, o[:, 0]

    over = {name: np.moveaxis(y, 1, 0) for name, y in x.items()}
    cache, o = jax.jit(lambda cache, over: jax.lax.scan(step, cache, over))(empty(length=11), over)
    assert same(np.moveaxis(o, 0, 1)[:, :11], whole(x, mask=CAUSAL)[:, :11])
    assert np.isnan(o[11:]).all() and cache.overflowed.all()
    assert same(cache.keys, np.swapaxes(x["k"][:, :11], 1, 2))


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
def test_as_data_of_a_module_and_as_a_variable():
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
    memory, read = Memory.of(k, v, valid), jax.jit(attend_memory)
    o = joined([read(x["q"][:, at : at + 7], memory) for at in (0, 7)])
    alone = [{"q": x["q"][r], "k": k[r][valid[r]], "v": v[r][valid[r]]} for r in range(3)]
    at_once = np.stack([whole(row) for row in alone])
    assert same(o, at_once)
    rows = np.asarray([1, 1, 0])
    assert same(read(x["q"][rows], memory.take(rows)), at_once[rows])
    empty_row = memory.reset(jnp.asarray([True, False, False])).check()
    assert not read(x["q"], empty_row)[0].any()
    put = empty_row.insert(0, jax.tree.map(lambda y: y[:1], memory))
    assert same(read(x["q"], put), at_once)
