"""The laws of scores, by closed forms in numpy: every place, every block, every refusal."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, attend, scores
from flax_attn._internal.types import Sizes
from flax_attn.parity import judge
from flax_attn.places import Places, Positions
from parity_tests.core.drawing import normal

B, N, T, S = 2, 3, 4, 7
SIZES = Sizes((B,), N, T, S)
SLOPES = np.asarray([0.5, 0.2, 0.9])
LOGITS, BIAS = 3 * normal(0, B, N, T, S), normal(1, N, T, S)


def distance(offset):
    return np.abs(np.arange(T)[:, None] + offset - np.arange(S))


def t5(offset, buckets=6, max_distance=5, bidirectional=True):
    """A T5Bias, and its table read for every pair; buckets by the published formula in floats."""
    table = normal(2, buckets, N)
    how = {"buckets": buckets, "max_distance": max_distance, "bidirectional": bidirectional}
    behind = np.arange(T)[:, None] + (S - T if offset == "end" else offset) - np.arange(S)
    rows = buckets // 2 if bidirectional else buckets
    far, single = (abs(behind) if bidirectional else np.maximum(behind, 0)), rows // 2
    ramp = np.log(np.maximum(far, 1) / single) / np.log(max_distance / single) * (rows - single)
    found = np.where(far < single, far, np.minimum(single + (ramp + 1e-9).astype(int), rows - 1))
    found = found + (rows * (behind < 0) if bidirectional else 0)
    want = LOGITS + table[found].transpose(2, 0, 1)
    return (lambda: scores.T5Bias(table, **how, offset=offset)), want


def slanted(x, b, n, q, k):
    return x + (10 * b + 3 * n - q + 2 * k).astype(x.dtype)


def per_head(params, x, b, n, q, k):
    return x * params[n] + (q - 2 * k + b).astype(x.dtype)


B_, N_, Q_, K_ = SIZES.grid()
SLANT = 10 * B_ + 3 * N_ - Q_ + 2 * K_
HEADS = SLOPES[:, None, None]
CUT = slice(1, None), slice(None), slice(1, 3), slice(2, None)
SCORES = {
    "identity": (lambda: scores.IDENTITY, LOGITS),
    "softcap": (lambda: scores.Softcap(2.0), 2 * np.tanh(LOGITS / 2)),
    "wide cap": (lambda: scores.Softcap(50), 50 * np.tanh(LOGITS / 50)),
    "alibi": (lambda: scores.Alibi(SLOPES), LOGITS - HEADS * distance(0)),
    "alibi shifted": (lambda: scores.Alibi(SLOPES, 2), LOGITS - HEADS * distance(2)),
    "alibi end": (lambda: scores.Alibi(SLOPES, "end"), LOGITS - HEADS * distance(S - T)),
    "t5": t5(0),
    "t5 shifted": t5(-3, 8, 20),
    "t5 end, one direction": t5("end", 5, 6, bidirectional=False),
    "additive": (lambda: scores.Additive(BIAS), LOGITS + BIAS),
    "additive row": (lambda: scores.Additive(BIAS[:, :1]), LOGITS + BIAS[:, :1]),
    "modify": (lambda: scores.ScoreFn(slanted), LOGITS + SLANT),
    "modify by": (
        lambda: scores.ScoreFn(per_head, SLOPES),
        LOGITS * HEADS + Q_ - 2 * K_ + B_,
    ),
    "cap, then bias": (
        lambda: scores.Softcap(2.0) >> scores.Additive(BIAS),
        2 * np.tanh(LOGITS / 2) + BIAS,
    ),
    "bias, then cap": (
        lambda: scores.Additive(BIAS) >> scores.Softcap(2.0),
        2 * np.tanh((LOGITS + BIAS) / 2),
    ),
    "slant, then cap, then bias": (
        lambda: scores.ScoreFn(slanted) >> scores.Softcap(9.0) >> scores.Alibi(SLOPES),
        9 * np.tanh((LOGITS + SLANT) / 9) - HEADS * distance(0),
    ),
}


@jax.jit
def asked(score, logits):
    """A bound score of all logits by its grid and by their places, and of a block by its places."""
    block = score(logits[CUT], B_[1:], N_, Q_[:, :, 1:3], K_[..., 2:])
    return score.grid(logits, SIZES), score(logits, *SIZES.iotas()), block


def test_every_score_is_its_formula_whole_and_in_blocks():
    with jax.enable_x64(True):
        for name, (make, want) in SCORES.items():
            bound = make().bind(SIZES)
            assert isinstance(bound, scores.Score)
            grid, _, block = asked(bound, LOGITS)
            assert grid.dtype == jnp.float64 and judge.same_function(grid, want).ok, name
            assert judge.same_function(block, want[CUT]).ok, name


def test_scores_keep_the_dtype_of_narrow_logits():
    logits = jnp.asarray(LOGITS, jnp.bfloat16)
    for name, (make, _) in SCORES.items():
        if name != "modify by":  # whose function decides
            bound = make().bind(SIZES)
            whole = jax.eval_shape(lambda x: bound.grid(x, SIZES), logits)  # noqa: B023
            block = jax.eval_shape(lambda x: bound(x, *SIZES.grid()), logits)  # noqa: B023
            assert whole.dtype == block.dtype == jnp.bfloat16


def test_softcap_bounds_the_scores():
    capped = scores.Softcap(2.0)(jnp.asarray([-1e4, 0.0, 1e4]), 0, 0, 0, 0)
    assert capped.tolist() == [-2.0, 0.0, 2.0]
    assert scores.Softcap(0.5)(jnp.asarray(1e4), 0, 0, 0, 0) == 0.5
    narrow = scores.Softcap(jnp.asarray(2.0, "float32"))(jnp.asarray(1e4, jnp.bfloat16), 0, 0, 0, 0)
    assert narrow == 2.0 and narrow.dtype == jnp.bfloat16
    traced = jax.eval_shape(lambda cap: scores.Softcap(cap)(jnp.ones(3), 0, 0, 0, 0), 2.0)
    assert traced.shape == (3,)


def listener():
    """A score that remembers what it was asked for."""

    class Asked(scores.Score):
        def __init__(self):
            self.asked = []

        def __call__(self, *given):
            self.asked.append(given)
            return "called"

        def bind(self, sizes):
            self.asked.append(sizes)
            return self

        def grid(self, *given):
            self.asked.append(given)
            return "whole"

    return Asked()


def test_a_chain_applies_its_scores_in_order():
    one, two = listener(), listener()
    chain = one >> two
    assert chain == scores.Chain(one, two) and (chain.first, chain.then) == (one, two)
    assert chain.bind("sizes") == chain and one.asked == two.asked == ["sizes"]
    assert chain("logits", 5, 6, 7, 8) == "called" and chain.grid("logits", "sizes") == "whole"
    assert one.asked[1:] == [("logits", 5, 6, 7, 8), ("logits", "sizes")]
    assert two.asked[1:] == [("called", 5, 6, 7, 8), ("whole", "sizes")]


def test_the_base_score_raises_and_binds_to_itself():
    with pytest.raises(NotImplementedError):
        scores.Score()(LOGITS, 0, 0, 0, 0)
    for score in (scores.Score(), scores.Softcap(2.0), scores.ScoreFn(slanted), scores.IDENTITY):
        assert score.bind(SIZES) is score
    assert scores.Identity()(LOGITS, 0, 0, 0, 0) is LOGITS


def test_scores_are_frozen_trees_equal_by_value():
    made = {
        lambda: scores.Identity(): 0,
        lambda: scores.Softcap(2.0): 0,
        lambda: scores.Softcap(np.asarray(2.0)): 1,
        lambda: scores.Alibi(SLOPES): 1,
        lambda: scores.Alibi(SLOPES, "end"): 1,
        lambda: scores.T5Bias(BIAS[0]): 1,
        lambda: scores.T5Bias(BIAS[0], bidirectional=False): 1,
        lambda: scores.Additive(BIAS): 1,
        lambda: scores.ScoreFn(slanted): 0,
        lambda: scores.ScoreFn(per_head, {"a": SLOPES, "b": BIAS}): 2,
        lambda: scores.Softcap(2.0) >> scores.Alibi(SLOPES): 1,
        lambda: scores.Alibi(SLOPES) >> scores.Softcap(2.0): 1,
    }
    assert len({make() for make in made}) == len(made)
    for make, arrays in made.items():
        assert make() == make() and hash(make()) == hash(make())
        assert len(jax.tree.leaves(make())) == arrays
        with pytest.raises(AttributeError, match="cannot assign"):
            make().offset = 1
    assert scores.IDENTITY == scores.Identity()
    assert scores.Alibi(SLOPES) == scores.Alibi(SLOPES, 0) == scores.Alibi(SLOPES)
    assert scores.ScoreFn(slanted) == scores.ScoreFn(slanted, None) == scores.ScoreFn(slanted)


def test_binding_checks_shapes_and_takes_batch_axes_as_one():
    sizes = Sizes((2, B), N, T, S)
    assert scores.Alibi(SLOPES, "end").bind(sizes).offset == S - T
    assert scores.Alibi(SLOPES, -2).bind(sizes).offset == -2
    assert isinstance(scores.Alibi(SLOPES).bind(sizes).slopes, jax.Array)
    assert scores.Alibi([0.5, 0.2, 0.9]).bind(sizes).slopes.shape == (N,)
    bias = normal(6, B, 1, 1, S)
    got = scores.Additive(bias).bind(sizes).array
    assert judge.exact(got, np.tile(bias.astype(got.dtype), (2, 1, 1, 1))).ok


def test_a_function_keeps_shape_and_dtype():
    logits = jnp.asarray(LOGITS, jnp.float32)
    words = (
        "^ScoreFn's function must keep the logits' shape and dtype, "
        r"\(2, 3, 4, 7\) float32; it returned "
    )
    for change, given in (
        (lambda x, *_: x[None], r"\(2, 3, 4, 7, 1\) float32\.$"),
        (lambda x, *_: x.astype(jnp.float16), r"\(2, 3, 4, 7\) float16\.$"),
        (lambda x, *_: x[None].astype(jnp.float16), r"\(2, 3, 4, 7, 1\) float16\.$"),
    ):
        with pytest.raises(ValueError, match=words + given):
            scores.ScoreFn(change)(logits, *SIZES.grid())


def test_falsy_params_are_params():
    assert scores.ScoreFn(lambda p, x, *_: x + p, 0)(jnp.asarray(3), 0, 0, 0, 0) == 3


REFUSED = [
    (
        lambda: scores.Softcap(0.0),
        ValueError,
        r"^Softcap\.cap must be finite and above zero; got 0.0",
    ),
    (lambda: scores.Softcap(-2), ValueError, "above zero; got -2"),
    (lambda: scores.Softcap(math.inf), ValueError, "above zero; got inf"),
    (lambda: scores.Softcap(math.nan), ValueError, "above zero; got nan"),
    (lambda: scores.Softcap("30"), TypeError, r"^Softcap\.cap must be a number; got '30'"),
    (lambda: scores.Softcap(np.ones(S)), ValueError, r"^Softcap\.cap must be one number"),
    (lambda: scores.Alibi(SLOPES, "start"), ValueError, r"^Alibi\.offset.*got 'start'"),
    (lambda: scores.Alibi(SLOPES, 0.5), ValueError, r"^Alibi\.offset.*got 0.5"),
    (lambda: scores.T5Bias(np.ones((32, 3), int)), TypeError, r"^T5Bias\.table.*got int64"),
    (lambda: scores.T5Bias(BIAS[0], buckets=3), ValueError, "4 buckets or more.*got buckets=3"),
    (lambda: scores.T5Bias(BIAS[0], max_distance=8), ValueError, "got.*max_distance=8"),
    (lambda: scores.T5Bias(BIAS[0], offset=0.5), ValueError, r"^T5Bias\.offset.*got 0.5"),
    (
        lambda: scores.T5Bias(np.ones((32, 4))).bind(SIZES),
        ValueError,
        r"^T5Bias needs a row.*\(32, 3\); got shape \(32, 4\)",
    ),
    (lambda: scores.T5Bias(np.ones((4, 3))).bind(SIZES), ValueError, r"got shape \(4, 3\)"),
    (lambda: scores.Additive(np.ones(S, bool)), TypeError, "^Additive needs a floating.*got bool"),
    (lambda: scores.Additive(np.ones(S, int)), TypeError, "got int64.*goes to mask="),
    (lambda: scores.ScoreFn(3.0), TypeError, r"^ScoreFn needs a function fn\(.*; got float"),
    (lambda: scores.Softcap(2.0) >> BIAS, TypeError, "^A score is chained.*ndarray.*Additive"),
    (lambda: scores.Alibi(np.ones(4)).bind(SIZES), ValueError, r"^Alibi needs.*\(3,\).*\(4,\)"),
    (lambda: scores.Alibi(np.ones((3, 1))).bind(SIZES), ValueError, r"\(3,\).*\(3, 1\)"),
    (
        lambda: scores.Additive(np.ones((T, S + 1))).bind(SIZES),
        ValueError,
        r"^An additive score must broadcast to.*\(2, 3, 4, 7\).*\(4, 8\)",
    ),
]


def test_wrong_shapes_are_named_in_the_error():
    for make, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            make()


def by_place(x, b, n, q, k):
    return x * (1 + n).astype(x.dtype) + (100 * b + 7 * q - 3 * k).astype(x.dtype)


def test_scores_at_positions_read_them_in_place_of_slots():
    """Each entry its own, zeros where they are absent; arrays along slots stay with the slots."""
    q = np.asarray([[4, 9, -1, 2], [0, 5, 6, 30]], np.int32)
    k = np.asarray([[3, 1, -1, 8, 2, 0, 7], [5, -1, 4, 4, 9, 2, 1]], np.int32)
    b, n = np.arange(B).reshape(B, 1, 1, 1), np.arange(N).reshape(1, N, 1, 1)
    fn = scores.ScoreFn(by_place)
    for present in (False, True):
        at = Positions(q, k, all_present=present)
        p, s = (x if present else np.maximum(x, 0) for x in (q, k))
        p, s = p[:, None, :, None], s[:, None, None]
        capped, added = 2 * np.tanh(LOGITS / 2), 100 * b + 7 * p - 3 * s
        want = LOGITS * (1 + n) + added
        far = SLOPES[:, None, None] * np.abs(p - s)
        for score, known in (
            (fn, want),
            (scores.Alibi(SLOPES), LOGITS - far),
            (scores.Softcap(2.0) >> fn, capped * (1 + n) + added),
            (scores.Additive(BIAS), LOGITS + BIAS),
            (fn >> scores.Additive(BIAS), want + BIAS),
        ):
            with jax.enable_x64(True):
                for got in asked(score.at_positions(at).bind(SIZES), LOGITS)[:2]:
                    assert judge.same_function(got, np.broadcast_to(known, got.shape)).ok, score


def test_each_score_declares_what_it_reads():
    bias = scores.T5Bias(normal(2, 32, N))
    read = {
        "nothing": (scores.IDENTITY, scores.Softcap(1.0)),
        "distance": (scores.Alibi(SLOPES), bias),
        "order": (scores.ScoreFn(slanted), scores.Score()),
    }
    for what, those in read.items():
        assert [score.reads for score in those] == [what] * 2
    assert (bias.buckets, bias.max_distance, bias.bidirectional, bias.offset) == (32, 128, True, 0)
    assert scores.T5Bias(normal(2, 32, N), offset=[1, 2]).offset.tolist() == [1, 2]
    assert scores.IDENTITY.at_positions(Positions()) is scores.IDENTITY
    with pytest.raises(ValueError, match="reads"):
        scores.ScoreFn(slanted, reads="everything")
    for call in (
        lambda: scores.ScoreFn(slanted, None, None, "order"),
        lambda: scores.T5Bias(normal(2, 32, N), 0),
        lambda: scores.Alibi(SLOPES, 1, 2),
    ):
        with pytest.raises(TypeError, match="by position"):
            call()
    for score in (scores.Alibi(SLOPES, "end"), scores.T5Bias(normal(2, 32, N), offset="end")):
        with pytest.raises(ValueError, match="end"):
            score.at_positions(Positions())


def test_scores_read_slots_where_no_positions_are_given():
    bias, known = t5(0)
    with jax.enable_x64(True):
        at = bias().at_positions(Positions()).bind(SIZES)
        assert judge.same_function(asked(at, LOGITS)[0], known).ok


def test_each_entry_has_an_offset_of_its_own():
    made = [t5(offset) for offset in (1, 3)]
    with jax.enable_x64(True):
        bias = replace(made[0][0](), offset=np.asarray([1, 3])).bind(SIZES)
        want = np.stack([made[i][1][i] for i in range(B)])
        for got in asked(bias, LOGITS)[:2]:
            assert judge.same_function(got, want).ok


def test_a_shard_keeps_what_is_read_and_where():
    """Entry 5 and heads 2, 7 and 4 of the whole; positions are the shard's own."""
    places = Places(np.asarray([5, 3]), np.asarray([2, 7, 4])).bind(SIZES)
    moved = scores.ScoreFn(by_place, reads="position").at(places)
    assert moved.reads == "position"
    q, k = np.asarray([[4, 9, 1, 2]], np.int32), np.arange(S, dtype=np.int32)[None] + 3
    b, n = np.asarray([5, 3]).reshape(B, 1, 1, 1), np.asarray([2, 7, 4]).reshape(1, N, 1, 1)
    want = LOGITS * (1 + n) + 100 * b + 7 * q[:, None, :, None] - 3 * k[:, None, None]
    with jax.enable_x64(True):
        at = scores.ScoreFn(by_place).at_positions(Positions(q, k)).at(places).bind(SIZES)
        assert judge.same_function(asked(at, LOGITS)[0], want).ok
    with pytest.raises(ValueError, match="a row for each bucket"):
        scores.T5Bias(normal(2, 32, N + 1)).at_positions(Positions(q, k)).bind(SIZES)
    for offset in (np.ones(3, np.int32), [1, 2, 3]):
        with pytest.raises(ValueError, match=r"T5Bias\.offset"):
            scores.T5Bias(normal(2, 32, N), offset=offset).bind(SIZES)


@pytest.mark.parametrize("backend", ["blockwise", "autodiff", "pallas"])
def test_the_gradient_of_a_slope_of_16_bits_is_rounded_once(backend):
    """Not block by block, and not the weights before it: 256 distances would make that large."""
    drawn = [normal(4 + i, 1, 256, 1, 8) for i in range(4)]
    q, k, v, do, slope = (x.astype(np.float16) for x in (*drawn, np.asarray([-0.05])))

    def gradient(backend, *given):
        def loss(slope, q, k, v, do):
            y = attend(q, k, v, mask=CAUSAL, score=scores.Alibi(slope), backend=backend)
            return jnp.sum(y * do, dtype=jnp.float32)

        return np.asarray(jax.jit(jax.grad(loss))(*map(jnp.asarray, given)))

    want = gradient("reference", *(x.astype(np.float32) for x in (slope, q, k, v, do)))
    assert gradient(backend, slope, q, k, v, do) == want.astype(np.float16)
