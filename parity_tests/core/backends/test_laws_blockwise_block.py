"""The laws of one block of logits: each part is a slice of the whole."""

import jax
import jax.numpy as jnp
import numpy as np

from flax_attn._internal.types import Sizes
from flax_attn.backends.blockwise.block import (
    Block,
    add,
    dropout_keep,
    is_per_block,
    leaves_of,
    local,
    modify_logits,
    visible,
    visible_once,
    zero_masked_keys,
)
from flax_attn.dropout import Dropout, DropoutMask
from flax_attn.masks import CAUSAL, FULL, Dense, Lengths, Window
from flax_attn.parity import judge
from flax_attn.scores import IDENTITY, Additive, Alibi, ScoreFn, Softcap

from .law_cases import drawn_masks, eager64, normal, one_program

B, N, T, S = 3, 4, 6, 8
SIZES = Sizes((B,), N, T, S)
AT = Block(1, 2, 1, 3, 2, 3, 4)
PLACE = {name: jnp.asarray(getattr(AT, name)) for name in "bnqk"}
TRACED = AT._replace(**PLACE)
WHOLE = (slice(1, 2), slice(2, 4), slice(1, 4), slice(3, 7))
SHAPES = [(B, N, T, S), (1, N, T, S), (B, 1, T, S), (B, N, 1, S), (B, N, T, 1), (1, 1, 1, 1)]


def part(array, at=WHOLE):
    """The block's part of an array `B|1 N|1 T|1 S|1`, as G|1 rows|1 cols|1."""
    return np.asarray(array)[
        tuple(x if n > 1 else slice(None) for x, n in zip(at, array.shape, strict=True))
    ][0]


def whole(array):
    return np.broadcast_to(part(array), (2, 3, 4))


def at_both(run, *given):
    """`run` of what is given and of the block, whose place is known and then traced."""
    both = jax.jit(lambda at, *given: [run(*given, AT), run(*given, AT._replace(**at))])
    return jax.device_get(both(PLACE, *given))


def primitives(f, *given):
    return str(jax.make_jaxpr(f)(*given))


def test_indices_of_a_block_are_those_of_the_whole():
    for b, n, q, k in at_both(Block.indices):
        assert b.tolist() == [[[1]]] and n.tolist() == [[[2]], [[3]]]
        assert q.tolist() == [[[1], [2], [3]]] and k.tolist() == [[[3, 4, 5, 6]]]
        assert {x.dtype for x in (b, n, q, k)} == {jnp.dtype("int32")}
    with jax.enable_x64(True):
        wide = AT._replace(q=jnp.asarray(1, "int64"))
        made = jax.eval_shape(lambda: (wide.indices(), wide.corner(np.ones((B, N, T, S)))[0]))
        assert {x.dtype for x in jax.tree.leaves(made)} == {jnp.dtype("int32")}
    assert Block(1, 2, 1, 3, 2, 3, 4).fresh is None


def test_parts_of_arrays_are_their_slices():
    for shape in SHAPES:
        array = normal(0, *shape).astype("float32")
        starts, counts = AT.corner(array)
        want = [s if n > 1 else 0 for s, n in zip((1, 2, 1, 3), shape, strict=True)]
        assert list(map(int, starts)) == want
        assert counts == [c if n > 1 else 1 for c, n in zip((1, 2, 3, 4), shape, strict=True)]
        for found in at_both(lambda x, at: at.take_block(x), array):
            assert judge.exact(found, part(array)).ok


def test_an_axis_of_length_two_is_indexed_and_not_broadcast():
    array, at = np.arange(16).reshape(2, 2, 2, 2), Block(1, 1, 1, 1, 1, 1, 1)
    assert list(map(int, at.corner(array)[0])) == [1] * 4
    assert at.take_block(array).tolist() == [[[15]]]


def test_a_block_sees_what_the_whole_mask_shows_there():
    def shown(mask, q):
        at = Block(1, 0, q, 3, 2, 3, 4)
        return visible_once(mask, at), visible(mask, at)

    masks, tables, _ = zip(*drawn_masks(5, (6, 8), seed=100), strict=True)
    for table, (once, seen) in zip(tables, one_program(shown, masks, [2] * 5), strict=True):
        want = table[1, 0:2, 2:5, 3:7]
        assert once.dtype == bool and judge.exact(once, want).ok
        assert judge.exact(np.broadcast_to(seen, want.shape), want).ok
        assert table.shape[3] == 8


def test_arrays_are_never_gathered():
    for shape in SHAPES:
        array = np.random.RandomState(1).rand(*shape) < 0.5
        mask = Dense(array).bind(SIZES)
        cases = [
            (mask, whole(array)),
            (~mask, ~whole(array)),
            (mask & CAUSAL, whole(array) & (np.arange(3, 7) <= np.arange(1, 4)[:, None])),
            (CAUSAL & mask, whole(array) & (np.arange(3, 7) <= np.arange(1, 4)[:, None])),
            (mask | Window(0, 0), whole(array) | np.eye(3, 4, -2, bool)),
            (Window(0, 0) | mask, whole(array) | np.eye(3, 4, -2, bool)),
        ]
        found = one_program(lambda mask: visible_once(mask, AT), [mask for mask, _ in cases])
        for (changed, want), got in zip(cases, found, strict=True):
            assert judge.exact(got, want).ok
            assert "gather" not in primitives(lambda m=changed: visible_once(m, TRACED))
    keep = DropoutMask(array, 0.5).bind(SIZES)
    assert "gather" not in primitives(lambda: dropout_keep(keep, TRACED))
    bias = Additive(normal(2, N, T, S)).bind(SIZES)
    logits = jnp.zeros((2, 3, 4))
    for score in (bias, Softcap(2.0) >> bias, bias >> Softcap(2.0)):
        changed = primitives(lambda s=score: modify_logits(local(s, TRACED), logits, TRACED))
        assert "gather" not in changed


def test_keys_that_a_block_before_has_had_are_left_out():
    def left(mask, fresh):
        return visible_once(mask, AT._replace(fresh=fresh))

    known, traced = jax.jit(left, static_argnums=1), jax.jit(left)
    for fresh, count in ((3, 0), (5, 2), (6, 3)):
        for found in jax.device_get([known(FULL, fresh), traced(FULL, fresh)]):
            assert found.shape == (2, 3, 4) and found.dtype == bool
            assert not found[..., :count].any() and found[..., count:].all()
    lengths = Lengths(np.asarray([9, 6, 0])).bind(SIZES)
    assert known(lengths, 5).tolist() == [[[False] * 2 + [True, False]] * 3] * 2
    assert known(FULL, None).tolist() == [[[True] * 4] * 3] * 2


def test_keys_masked_for_the_whole_block_are_zero():
    for G in (1, 2):
        shown = np.zeros((G, 3, 4), bool)
        shown[0, 1, 0] = shown[G - 1, 2, 2] = shown[:, 0, 2] = True
        x = np.asarray([[1.0, 2.0], [np.nan, np.inf], [3.0, 4.0], [-np.inf, 5.0]], "float32")
        found, narrow = one_program(zero_masked_keys, [x, x.astype(jnp.bfloat16)], [shown] * 2)
        assert found.tolist() == [[1, 2], [0, 0], [3, 4], [0, 0]] and found.dtype == jnp.float32
        assert narrow.dtype == jnp.bfloat16 and narrow[3].tolist() == [0, 0]
        assert narrow[2].tolist() == [3, 4]
    with jax.enable_x64(True):
        (wide,) = one_program(zero_masked_keys, [x.astype("float64")], [shown])
        assert wide.dtype == jnp.float64 and judge.exact(wide.astype("float32"), found).ok
    assert "reduce_or" not in primitives(zero_masked_keys, x, shown)


def test_the_same_elements_are_dropped_as_in_the_whole():
    for shape in SHAPES:
        mask = np.random.RandomState(3).rand(*shape) < 0.5
        for found in at_both(dropout_keep, DropoutMask(mask, 0.5).bind(SIZES)):
            assert found.dtype == bool and judge.exact(found, whole(mask)).ok
    dropout = Dropout(0.5, jax.random.key(2))
    grid = jax.jit(lambda dropout: dropout.grid(SIZES))(dropout)
    for found in at_both(dropout_keep, dropout):
        assert judge.exact(found, part(grid)).ok
    assert at_both(dropout_keep, Dropout(1.0, jax.random.key(2)))[0].shape == (2, 3, 4)


def bent(params, x, b, n, q, k):
    return x * params["gain"] + params["shift"][n] * (q - 2 * k + 5 * b).astype(x.dtype)


BIAS, SLOPES = normal(4, N, T, S), np.arange(1.0, N + 1)
PARAMS = {"gain": np.asarray(1.5), "shift": SLOPES / 3, "whole": np.arange(3)}
SCORES = {
    "none": (lambda: IDENTITY, []),
    "cap": (lambda: Softcap(jnp.asarray(2.0)), [False]),
    "number": (lambda: Softcap(2.0), []),
    "bias": (lambda: Additive(BIAS), [True]),
    "key bias": (lambda: Additive(BIAS[:1, :1]), [True]),
    "alibi": (lambda: Alibi(SLOPES), [False]),
    "offsets": (lambda: Alibi(SLOPES, np.asarray([0, 2, 5])), [False]),
    "function": (lambda: ScoreFn(bent, PARAMS), [False, False]),
    "bias, cap": (lambda: Additive(BIAS) >> Softcap(jnp.asarray(2.0)), [True, False]),
    "cap, bias": (lambda: Softcap(jnp.asarray(2.0)) >> Additive(BIAS), [False, True]),
    "three": (
        lambda: Alibi(SLOPES) >> (Additive(BIAS) >> Softcap(3.0)) >> Additive(BIAS[:, :1]),
        [False, True, True],
    ),
}


@eager64
def test_scores_of_a_block_are_those_of_the_whole():
    def run(score, logits, block, at):
        return score.grid(logits, SIZES), modify_logits(local(score, at), block, at)

    logits = normal(5, B, N, T, S)
    for name, (make, cuts) in SCORES.items():
        score = make().bind(SIZES)
        for want, got in at_both(run, score, logits, part(logits)):
            assert got.dtype == jnp.float64 and judge.same_function(got, part(want)).ok, name
        assert is_per_block(score) == cuts, name
        leaves, put = leaves_of(score)
        assert len(leaves) == len(cuts) and put(leaves) == score
        assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
        other = put([np.asarray(x) + 1 for x in leaves])
        for a, b in zip(leaves_of(other)[0], leaves, strict=True):
            assert judge.exact(a, np.asarray(b) + 1).ok
        ints = [x for x in jax.tree.leaves(other) if jnp.issubdtype(x.dtype, jnp.integer)]
        assert len(jax.tree.leaves(other)) == len(leaves) + len(ints)
        # what is cut is as small as the block
        mine = jax.eval_shape(lambda score: leaves_of(local(score, AT))[0], score)
        for cut, x, is_part in zip(mine, leaves, cuts, strict=True):
            assert cut.size == (part(x).size if is_part else x.size), name
    bias = Additive(BIAS.astype("float32")).bind(SIZES)
    assert at_both(run, bias, logits, part(logits))[0][1].dtype == jnp.float64


@eager64
def test_gradients_of_parts_are_added_where_they_belong():
    def run(total, share, at):
        return add(total, share, True, at), add(total, share.astype("float32"), True, at)

    for shape in SHAPES:
        total = normal(6, *shape)
        share = normal(7, *part(total).shape)
        want = total.copy()
        want[tuple(x if n > 1 else slice(None) for x, n in zip(WHOLE, shape, strict=True))] += share
        for got, narrow in at_both(run, total, share):
            assert judge.same_function(got, want).ok
            assert narrow.dtype == jnp.float64 and narrow.shape == shape
    slopes, more = normal(8, N), normal(9, N)
    got = add(jnp.asarray(slopes), jnp.asarray(more, "float32"), False, AT)
    assert got.dtype == jnp.float64
    assert judge.same_function(got, slopes + more.astype("float32")).ok
