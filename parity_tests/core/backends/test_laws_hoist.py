"""The laws of hoisted user functions: same values, and hashed by what they close over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from flax_attn._internal.types import Sizes
from flax_attn.backends.hoist import Run, Traced, TracedScore, has_functions, hoist
from flax_attn.masks import CAUSAL, FULL, Dense, Lengths, MaskFn, Window
from flax_attn.parity import judge
from flax_attn.places import Places
from flax_attn.rules import Rules
from flax_attn.scores import IDENTITY, Additive, Alibi, Chain, ScoreFn, Softcap

from .law_cases import normal

B, N, T, S = 3, 4, 5, 6
SIZES = Sizes((B,), N, T, S)
GRID = SIZES.grid()
TABLE = np.random.RandomState(0).rand(B, N, T, S) < 0.5
WEIGHTS = normal(1, B, N, T, S).astype("float32")
# One block: heads 1 and 2, queries 1 to 3, keys 2 to 5 of entry 2.
BLOCK = (
    np.full((1, 1, 1), 2),
    np.arange(1, 3).reshape(-1, 1, 1),
    np.arange(1, 4).reshape(1, -1, 1),
    np.arange(2, 6).reshape(1, 1, -1),
)
PART = 2, slice(1, 3), slice(1, 4), slice(2, 6)
PLACES = Places(b=jnp.asarray([2, 0, 1]), n=jnp.asarray([3, 1, 0, 2]))


def answer(rule, index, *logits):
    """What a mask or a score says of these places, by one program."""
    return np.asarray(jax.jit(lambda rule, *logits: rule(*logits, *index))(rule, *logits))


def table():
    held = jnp.asarray(TABLE)
    return MaskFn(lambda b, n, q, k: held[b, n, q, k])


def weighted():
    held = jnp.asarray(WEIGHTS)
    return ScoreFn(lambda x, b, n, q, k: 2 * x + held[b, n, q, k])


def by_params(params, x, b, n, q, k):
    return x * params["gain"] + params["all"][b, n, q, k]


PARAMS = {"gain": jnp.float32(1.5), "all": jnp.asarray(WEIGHTS)}
INDEX = np.arange(B * N * T * S).reshape(B, N, T, S)
THIRD = MaskFn(lambda b, n, q, k: position(b, n, q, k) % 3 == 0)


def position(b, n, q, k):
    """The element of an array B N T S, in order."""
    return ((b * N + n) * T + q) * S + k


def test_a_hoisted_mask_function_gives_the_same_mask():
    mask = hoist(table(), "float32")
    assert isinstance(mask, Traced) and mask.is_static is False
    assert type(mask.consts) is tuple
    whole = answer(mask, GRID)
    assert whole.dtype == bool and judge.exact(whole, TABLE).ok
    for index in (BLOCK, tuple(map(jnp.asarray, BLOCK))):
        assert judge.exact(answer(mask, index), TABLE[PART]).ok
    assert len(jax.tree.leaves(mask)) == 1
    third = hoist(THIRD, "float32")
    assert judge.exact(answer(third, GRID), INDEX % 3 == 0).ok
    assert judge.exact(answer(third, BLOCK), INDEX[PART] % 3 == 0).ok
    # Not all of the open axes need be there.
    assert judge.exact(answer(third, (0, *BLOCK[1:])), INDEX[0, 1:3, 1:4, 2:6] % 3 == 0).ok
    shifted = hoist(MaskFn(lambda b, n, q, k: q + 0.5 >= k), "float32")  # mixed as numpy mixes
    assert judge.exact(answer(shifted, GRID)[0, 0], np.arange(T)[:, None] >= np.arange(S)).ok
    assert whole.shape == (B, N, T, S)


def test_positions_of_each_entry_are_those_of_its_own():
    """Queries and keys of a cache stand elsewhere in every batch entry."""
    b, n, _, _ = GRID
    logits = normal(3, B, N, T, S).astype("float32")
    draw = np.random.RandomState(4).randint
    q, k = draw(0, 40, (B, 1, T, 1)), draw(0, 40, (B, 1, 1, S))
    for at in ((b, n, q, k), (b, n, q[:1], k), (b, n, q, k[:1]), (b, n, q[:1], k[:1])):
        seen = hoist(MaskFn(lambda b, n, q, k: (3 * q + k + n + b) % 5 < 2), "float32")
        want = np.broadcast_to((3 * at[2] + at[3] + n + b) % 5 < 2, (B, N, T, S))
        assert judge.exact(answer(seen, at), want).ok
        score = ScoreFn(lambda x, b, n, q, k: x + (3 * q + k + n + b).astype(x.dtype))
        got = answer(hoist(score, "float32"), at, logits)
        assert judge.exact(got, logits + (3 * at[2] + at[3] + n + b).astype("float32")).ok


def test_a_hoisted_score_function_gives_the_same_scores():
    logits = normal(2, B, N, T, S).astype("float32")
    for score, want in (
        (weighted(), 2 * logits + WEIGHTS),
        (ScoreFn(by_params, PARAMS), logits * np.float32(1.5) + WEIGHTS),
        (
            ScoreFn(lambda x, b, n, q, k: x + position(b, n, q, k).astype(x.dtype)),
            logits + INDEX.astype("float32"),
        ),
    ):
        pure = hoist(score, "float32")
        assert isinstance(pure, TracedScore)
        for index, block, truth in (
            (GRID, logits, want),
            (BLOCK, logits[PART], want[PART]),
            (tuple(map(jnp.asarray, BLOCK)), logits[PART], want[PART]),
        ):
            got = answer(pure, index, block)
            assert got.dtype == jnp.float32
            assert judge.exact(got, truth).ok
    assert ScoreFn(lambda p, *xs: xs[0] + p, jnp.float32(0)) != pure
    falsy = hoist(ScoreFn(lambda p, x, *_: x + 1 + p, 0), "float32")  # no params are falsy ones
    assert falsy(jnp.ones((1, 1, 1), jnp.float32), *(x[:1, :1, :1] for x in BLOCK)) == 2


def test_functions_are_traced_in_the_dtype_of_a_logit():
    kinds = []

    def fn(x, b, n, q, k):
        kinds.append((x.dtype, x.shape, *(i.dtype for i in (b, n, q, k)), b.shape))
        return x

    for kind in ("float32", "bfloat16"):
        hoist(ScoreFn(fn), kind)
        hoist(MaskFn(lambda b, n, q, k: fn(b, b, n, q, k) > 0), kind)
    int32 = jnp.dtype("int32")
    assert [kind[0] for kind in kinds] == [jnp.float32, int32, jnp.bfloat16, int32]
    assert all(kind[1:] == ((), *[int32] * 4, ()) for kind in kinds)


def test_a_function_keeps_shape_and_dtype_and_a_mask_function_is_boolean():
    with pytest.raises(ValueError, match="must keep the logits' shape and dtype"):
        hoist(ScoreFn(lambda x, *_: x.astype(jnp.bfloat16)), "float32")
    with pytest.raises(TypeError, match="boolean"):
        hoist(MaskFn(lambda b, n, q, k: q - k), "float32")


def test_what_holds_no_function_stays_the_very_same():
    for rules in (
        FULL,
        CAUSAL & Window(1, 0),
        Softcap(2.0) >> Alibi(np.ones(N)),
        Rules(Dense(TABLE), Additive(WEIGHTS), 0.5, np.ones(N)),
        Rules(),
        None,
    ):
        assert hoist(rules, "float32") is rules and not has_functions(rules)


def test_functions_are_found_wherever_they_stand():
    fn, score = table(), weighted()
    for mask in (fn & CAUSAL, CAUSAL | fn, ~fn, ~(~fn & ~CAUSAL)):
        rules = Rules(mask, Softcap(2.0), 0.5)
        pure = hoist(rules, "float32")
        assert has_functions(pure) and has_functions(pure.mask) and not has_functions(pure.score)
        assert pure.scale == 0.5 and pure.score is rules.score and type(pure.mask) is type(mask)
        assert judge.exact(answer(pure.mask, GRID), answer(mask, GRID)).ok
    for chained in (Softcap(2.0) >> score, score >> Softcap(2.0), score >> score):
        pure = hoist(Rules(score=chained), "float32")
        assert has_functions(pure) and isinstance(pure.score, Chain) and pure.mask is FULL
        logits = WEIGHTS[:, :, ::-1]
        assert judge.exact(answer(pure.score, GRID, logits), answer(chained, GRID, logits)).ok
    assert has_functions(hoist(Rules(fn, score), "float32"))
    assert not has_functions(Rules(fn, score)) and not has_functions(IDENTITY)
    lengths = Lengths(np.ones(B, int))
    found = hoist(fn & lengths, "float32")
    assert found.b is lengths and isinstance(found.a, Traced)


def test_what_is_pure_stays_as_it_is():
    pure = hoist(Rules(table() & CAUSAL, weighted() >> Softcap(2.0)), "float32")
    again = hoist(pure, "float32")
    assert again is pure


def test_functions_are_told_apart_by_what_they_are_and_what_was_traced():
    held = [jnp.asarray(TABLE)]

    def fn(b, n, q, k):
        return held[0][b, n, q, k]

    def other(b, n, q, k):
        return held[0][b, n, q, k]

    one, two, three = (hoist(MaskFn(f), "float32") for f in (fn, fn, other))
    assert one.run == two.run and hash(one.run) == hash(two.run)
    assert one == two and hash(one) == hash(two)
    assert one.run != three.run and one != three and one.run != fn
    held[0] = ~held[0]
    changed = hoist(MaskFn(fn), "float32")
    assert changed.run == one.run and changed != one  # another leaf of the same structure
    assert judge.exact(answer(changed, GRID), ~TABLE).ok
    assert judge.exact(answer(one, GRID), TABLE).ok
    held[0] = held[0][:, :, :, :1]
    grown = hoist(MaskFn(fn), "float32")
    assert grown.run != one.run and grown.run.fn is fn
    assert len({one.run, two.run, three.run, changed.run, grown.run}) == 3
    traced = []

    @jax.jit
    def use(mask):
        traced.append(mask)
        return mask(0, 0, 0, 0)

    for mask in (one, two, changed, three):
        use(mask)
    assert len(traced) == 2


def test_scores_are_told_apart_by_what_they_are_and_what_was_traced():
    held = [jnp.asarray(TABLE)[:, :, :, :1]]

    def score(x, b, n, q, k):
        return x + held[0].astype(x.dtype)[b, n, q, 0]

    first, same = (hoist(ScoreFn(score), "float32") for _ in range(2))
    assert first.run == same.run and hash(first.run) == hash(same.run) and first == same
    assert first.run != score and first.run != hoist(ScoreFn(weighted().fn), "float32").run
    held[0] = held[0][:, :, :2]
    assert hoist(ScoreFn(score), "float32").run != first.run


def constants(table, make=jnp.asarray):
    """A run of one function whose jitted part closes over what is held at the time."""
    held["table"] = table, make
    return Run(looked_up, MaskFn(looked_up), *[jnp.zeros((), jnp.int32)] * 4)


held = {}


def drawn_from(key):
    return jax.random.normal(key, (3,))


def looked_up(b, n, q, k):
    def look(x):
        table, make = held["table"]
        return make(table)[x] > 0

    return jax.jit(lambda x: jax.jit(lambda x: look(x))(x) | look(x - 1))(q)


def test_runs_are_told_apart_by_what_their_jitted_parts_close_over():
    """The text of a program does not show these constants."""
    first, nan = np.asarray([0.0, 1.0, 2.0]), np.asarray([0.0, np.nan, 2.0])
    assert constants(first) == constants(first.copy()) and constants(nan) == constants(nan.copy())
    for other in (nan, -first, first + 1, np.asarray([0.0, 1.0, 3.0])):  # -0.0 is not 0.0
        assert constants(first) != constants(other) and constants(other) != constants(first)
        assert constants(first).text == constants(other).text
    keys = [jax.random.key(seed) for seed in (0, 0, 1)]
    one, same, other = (constants(key, drawn_from) for key in keys)
    assert one == same and one != other
    assert hash(constants(first)) == hash(constants(first.copy()))
    assert constants(first) != looked_up


def looked_up_in_a_branch(b, n, q, k):
    table, make = held["table"]
    branches = [jax.jit(lambda x: make(table)[x] > 0), lambda x: x > 1]
    return jax.lax.switch(jnp.clip(n, 0, 1), branches, q)


def test_runs_are_told_apart_by_what_branches_close_over():
    def made(table):
        held["table"] = jnp.asarray(table), jnp.asarray
        fn = looked_up_in_a_branch
        return Run(fn, MaskFn(fn), *[jnp.zeros((), jnp.int32)] * 4)

    one, same, other = (made(x) for x in ([0.0, 1.0], [0.0, 1.0], [0.0, 2.0]))
    assert one == same and one != other


def test_what_a_jitted_part_takes_of_a_trace_is_handed_in():
    def run(table):
        made = constants(table)
        assert len(made.consts) == 1 and made.inside == ()
        return made(made.consts, *[jnp.asarray(1, jnp.int32)] * 4)

    assert [bool(jax.jit(run)(jnp.asarray(x))) for x in ([0.0, 0.0], [0.0, 1.0])] == [False, True]


def test_a_run_takes_its_arrays_from_outside():
    held = jnp.asarray([1.0, 2.0])
    run = Run(
        test_a_run_takes_its_arrays_from_outside,
        lambda a, b: a + b["x"] * held.sum(),
        1.0,
        {"x": 2.0},
    )
    assert len(run.consts) == 1 and run.consts[0].tolist() == [1.0, 2.0]
    assert run(run.consts, 1.0, {"x": 2.0}) == 7 and run((5 * held,), 1.0, 2.0) == 31
    assert run.text == str(run.jaxpr)


def test_gradients_reach_what_a_function_closes_over():
    logits = jnp.asarray(normal(3, B, N, T, S), "float32")

    def loss(held, params):
        def fn(params, x, b, n, q, k):
            return params[n] * x * held[b, n, q, k]

        pure = hoist(ScoreFn(fn, params), "float32")
        leaves, structure = jax.tree.flatten(pure)
        assert len(leaves) == 2
        return structure.unflatten(leaves)(logits, *GRID).sum()

    slopes = jnp.asarray([0.5, 2.0, -1.0, 3.0])
    by_held, by_slopes = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(WEIGHTS), slopes)
    logits = np.asarray(logits)
    assert judge.exact(by_held, logits * np.asarray(slopes)[:, None, None]).ok
    assert judge.allclose(by_slopes, (logits * WEIGHTS).sum((0, 2, 3)))


def test_functions_receive_indices_of_the_whole_array():
    at = np.asarray(PLACES.b), np.asarray(PLACES.n)
    want = TABLE[at[0]][:, at[1]]
    fn = table()
    mask, later = hoist(fn.at(PLACES), "float32"), hoist(fn, "float32").at(PLACES)
    assert isinstance(later, Traced) and later.run == mask.run
    assert hoist(table(), "float32").places is None
    for pure in (mask, later):
        assert pure.places is PLACES
        assert judge.exact(answer(pure, GRID), want).ok
        assert judge.exact(answer(pure, BLOCK), want[PART]).ok
    score = hoist(weighted().at(PLACES), "float32")
    assert score.places is PLACES
    logits = np.zeros((B, N, T, S), np.float32)
    assert judge.exact(answer(score, GRID, logits), WEIGHTS[at[0]][:, at[1]]).ok
    both = hoist(weighted(), "float32").at(PLACES)
    assert judge.exact(answer(both, BLOCK, logits[PART]), WEIGHTS[at[0]][:, at[1]][PART]).ok


def test_functions_of_shards():
    """Inside a shard_map, where indices and logits vary and arrays that all share do not."""

    def run(logits, held):
        axes = jax.typeof(logits).manual_axis_type.varying

        def bent(x, b, n, q, k):
            assert jax.typeof(x).manual_axis_type.varying == axes
            assert jax.typeof(q).manual_axis_type.varying == axes
            return x + held[b, n, q, k]

        pure = hoist(Rules(THIRD, ScoreFn(bent)), "float32", axes)
        index = [jnp.asarray(x) for x in GRID]
        index[2] = index[2] + held.astype(int).min() * 0  # of a block whose start is traced
        return jnp.where(pure.mask(*index), pure.score(logits, *index), 0)

    got = in_shards(run, jnp.asarray(WEIGHTS[::-1]), jnp.asarray(WEIGHTS))
    assert judge.exact(got, np.where(INDEX % 3 == 0, WEIGHTS + WEIGHTS[::-1], 0)).ok


def in_shards(run, *arrays):
    """`run` on one device, inside a shard_map that checks its axes."""
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(*arrays)


def test_what_shards_share_may_not_be_closed_over_inside_one():
    held = jnp.asarray(WEIGHTS)

    def run(logits, closed):
        axes = jax.typeof(logits).manual_axis_type.varying
        fn = (lambda x, b, n, q, k: x + held[b, n, q, k]) if closed else lambda x, b, n, q, k: x
        return hoist(ScoreFn(fn), "float32", axes)(logits, *(jnp.asarray(x) for x in GRID))

    assert judge.exact(in_shards(lambda x: run(x, closed=False), held), WEIGHTS).ok
    with pytest.raises(NotImplementedError, match=r"ScoreFn\(fn, params\).*check_vma=False"):
        in_shards(lambda x: run(x, closed=True), held)
