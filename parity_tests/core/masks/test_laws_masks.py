"""The laws of masks, by loops: every place, every range, every refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import CAUSAL, Causal, Chunked, Lengths, Prefix, Window, attend, masks
from flax_attn._internal.arrays import INT32_MAX
from flax_attn._internal.types import Sizes
from flax_attn.masks import Rows
from flax_attn.masks.ranges import as_known_band, visible_range

from ..backends.law_cases import one_program

B, N = 2, 3
SHAPES = [(4, 7), (6, 6), (7, 4)]
KV, QL = np.asarray([3, 6]), np.asarray([5, 2])


def numbers(seed, *shape, below):
    return np.random.RandomState(seed).randint(0, below, shape)


def chequered(b, n, q, k):
    return (b + 2 * n + 3 * q + 5 * k) % 7 < 3


def leaves(T, S):
    """Masks, each with what it says of one place by plain Python."""
    end, ids = S - T, (numbers(1, B, T, below=3), numbers(2, B, S, below=3))
    dense = numbers(3, N, T, S, below=2) > 0
    found = {
        "full": (masks.Full(), lambda b, n, q, k: True),
        "end": (masks.Causal("end"), lambda b, n, q, k: k <= q + end),
        "window end": (masks.Window(2, 1, "end"), lambda b, n, q, k: -2 <= k - q - end <= 1),
        "prefixes": (masks.Prefix(KV), lambda b, n, q, k: k < KV[b]),
        "lengths": (masks.Lengths(KV), lambda b, n, q, k: k < KV[b]),
        "both": (masks.Lengths(KV, q=QL), lambda b, n, q, k: k < KV[b] and q < QL[b]),
        "segments": (
            masks.Segments(q_ids=ids[0], kv_ids=ids[1]),
            lambda b, n, q, k: ids[0][b, q] == ids[1][b, k],
        ),
        "dense": (masks.Dense(dense), lambda b, n, q, k: dense[n, q, k]),
        "fn": (masks.MaskFn(chequered), chequered),
    }
    for c in (-3, -1, 0, 1, 2, 5):
        found[f"causal {c}"] = masks.Causal(c), lambda b, n, q, k, c=c: k <= q + c
    for w in ((0, 0), (2, 1), (1, 2, -1), (0, 3, 2), (3, 0, -5), (0, 0, 9)):
        left, right, offset = (*w, 0)[:3]
        says = lambda b, n, q, k, w=(left, right, offset): -w[0] <= k - q - w[2] <= w[1]  # noqa: E731
        found[f"window {w}"] = masks.Window(*w), says
    found["left"] = masks.Window(1, None, -1), lambda b, n, q, k: q - 1 - 1 <= k
    found["right"] = masks.Window(None, 2), lambda b, n, q, k: k <= q + 2
    found["open"] = masks.Window(None, None), lambda b, n, q, k: True
    for c in (1, 2, 3, 9):
        found[f"chunked {c}"] = masks.Chunked(c), lambda b, n, q, k, c=c: q // c == k // c
    for c in (0, 1, 4, 9):
        found[f"prefix {c}"] = masks.Prefix(c), lambda b, n, q, k, c=c: k < c
    return found


def table(says, T, S):
    places = np.ndindex(B, N, T, S)
    return np.asarray([bool(says(*place)) for place in places]).reshape(B, N, T, S)


def combined(T, S):
    """All leaves, and some of their unions, intersections and complements."""
    found = leaves(T, S)
    for one, two in [
        ("end", "window (2, 1)"),
        ("prefix 4", "causal 0"),
        ("chunked 3", "lengths"),
        ("left", "right"),
        ("dense", "prefixes"),
        ("fn", "causal 1"),
    ]:
        (a, first), (b, second) = found[one], found[two]
        found[f"{one} & {two}"] = a & b, lambda *x, f=first, s=second: f(*x) and s(*x)
        found[f"{one} | {two}"] = a | b, lambda *x, f=first, s=second: f(*x) or s(*x)
        found[f"~{one}"] = ~a, lambda *x, f=first: not f(*x)
        found[f"~({one} & {two})"] = ~(a & b), lambda *x, f=first, s=second: not (f(*x) and s(*x))
    return found


STATIC = ("full", "end", "causal", "window", "left", "right", "open", "chunked", "prefix ")


def is_static(name):
    parts = name.replace("~", "").strip("()").replace(" & ", " | ").split(" | ")
    return all(part.startswith(STATIC) for part in parts)


def test_every_mask_agrees_with_loops():
    T, S = SHAPES[0]
    sizes = Sizes((B,), N, T, S)

    def asked(bound):
        assert isinstance(bound, masks.Mask) and isinstance(bound.grid(sizes), jax.Array)
        return bound.grid(sizes), bound(*sizes.grid())

    cases = combined(T, S)
    found = one_program(asked, [mask.bind(sizes) for mask, _ in cases.values()])
    for (name, (_, says)), tables in zip(cases.items(), found, strict=True):
        want = table(says, T, S)
        for seen in tables:
            assert seen.dtype == bool and (np.broadcast_to(seen, want.shape) == want).all(), name


def test_static_masks_are_one_table_and_the_others_none():
    for T, S in [*SHAPES, (1, 1), (0, 3), (3, 0)]:
        sizes = Sizes((B,), N, T, S)
        for name, (mask, says) in combined(T, S).items():
            known = mask.static(sizes)
            assert mask.is_static is is_static(name), name
            assert (known is not None) == is_static(name), name
            if known is not None:
                assert isinstance(known, np.ndarray) and known.shape == (T, S)
                assert (known == table(says, T, S)[0, 0]).all(), name


def test_static_is_never_what_depends_on_the_entry_or_on_a_function():
    static = masks.Causal()
    for mask in (
        masks.Lengths(3),
        masks.Lengths(3, q=2),
        masks.MaskFn(chequered),
        masks.Prefix(KV),
    ):
        for whole in (mask, ~mask, mask & static, static & mask, mask | static, ~(static | mask)):
            assert whole.is_static is False
            assert whole.static(Sizes((), 1, 2, 3)) is None


def listener():
    """A mask that sees all and remembers what it was asked for."""

    class Asked(masks.Mask):
        def __init__(self):
            self.asked = []

        def __call__(self, *place):
            self.asked.append(place)
            return np.ones((2, 2), bool)

        def bind(self, sizes):
            self.asked.append(sizes)
            return self

        def grid(self, sizes):
            self.asked.append(sizes)
            return jnp.ones((2, 2), bool)

    return Asked()


def test_combinations_pass_all_calls_on_to_both_masks():
    for make in (masks.And, masks.Or):
        one, two = listener(), listener()
        whole = make(one, two)
        assert type(whole.bind("sizes")) is make
        whole(5, 6, 7, 8)
        whole.grid("sizes")
        assert one.asked == two.asked == ["sizes", (5, 6, 7, 8), "sizes"]
    one = listener()
    assert masks.Not(one).bind("sizes") == masks.Not(one)
    assert not masks.Not(one)(5, 6, 7, 8).any() and not masks.Not(one).grid("sizes").any()
    assert one.asked == ["sizes", (5, 6, 7, 8), "sizes"]


def test_operators_keep_their_order_and_take_boolean_arrays_on_either_side():
    a, b, array = masks.Causal(), masks.Window(1, 0), np.ones((2, 3), bool)
    assert a & b == masks.And(a, b) != masks.And(b, a)
    assert a | b == masks.Or(a, b) != masks.Or(b, a)
    assert ~a == masks.Not(a)
    for given in (array, jnp.asarray(array)):
        dense = masks.Dense(given)
        assert a & given == masks.And(a, dense) and a | given == masks.Or(a, dense)
        assert given & a == masks.And(a, dense) and given | a == masks.Or(a, dense)
    assert masks.as_mask(a) is a and masks.as_mask(array) == masks.Dense(array)
    with pytest.raises(TypeError, match="A mask must be a flax_attn mask or a boolean array"):
        masks.as_mask(1.0)


def test_masks_are_frozen_trees_equal_by_value():
    made = {
        lambda: masks.Full(): 0,
        lambda: masks.Causal(): 0,
        lambda: masks.Window(2, None): 0,
        lambda: masks.Chunked(3): 0,
        lambda: masks.Prefix(4): 0,
        lambda: masks.Prefix(np.asarray([1, 2])): 1,
        lambda: masks.Lengths(np.asarray([1, 2])): 1,
        lambda: masks.Lengths(np.asarray([1, 2]), q=np.asarray([3, 4])): 2,
        lambda: masks.Segments(np.ones((2, 3), int)): 1,
        lambda: masks.Dense(np.ones((2, 3), bool)): 1,
        lambda: masks.MaskFn(chequered): 0,
        lambda: masks.Causal() & np.ones((2, 3), bool): 1,
        lambda: masks.Causal() | masks.Full(): 0,
        lambda: ~masks.Dense(np.ones((2, 3), bool)): 1,
    }
    kept = [make() for make in made]
    assert len(set(kept)) == len(made)
    for make, arrays in made.items():
        assert make() == make() and hash(make()) == hash(make())
        assert len(jax.tree.leaves(make())) == arrays
        assert len({jax.eval_shape(make), jax.eval_shape(make)}) == 1
        with pytest.raises(AttributeError, match="cannot assign"):
            make().offset = 1
    assert (masks.FULL, masks.CAUSAL) == (masks.Full(), masks.Causal(0))
    assert masks.Causal() == masks.Causal(0) and masks.Window(1, 2) == masks.Window(1, 2, 0)
    assert masks.Lengths(KV).q is None and masks.Segments(KV).kv_ids is None


def test_binding_gives_numbers_and_one_row_for_each_entry():
    sizes = Sizes((3, 2), N, 4, 7)
    assert masks.Causal("end").bind(sizes) == masks.Causal(3)
    assert masks.Window(1, None, "end").bind(sizes) == masks.Window(1, None, 3)
    assert masks.Causal(-2).bind(sizes) == masks.Causal(-2)
    for make, left in ((masks.And, masks.Causal("end")), (masks.Or, masks.Window(1, None, "end"))):
        assert make(left, masks.FULL).bind(sizes) == make(left.bind(sizes), masks.FULL)
    for static in (masks.Full(), masks.Chunked(2), masks.Prefix(5)):
        assert static.bind(sizes) == static
    fn = masks.MaskFn(chequered)
    assert fn.bind(sizes) is fn
    ids = numbers(0, 3, 1, 4, below=9), numbers(1, 2, 7, below=9)
    bound = masks.Segments(q_ids=ids[0], kv_ids=ids[1]).bind(sizes)
    assert (np.asarray(bound.q_ids) == np.repeat(ids[0].reshape(3, 4), 2, axis=0)).all()
    assert (np.asarray(bound.kv_ids) == np.tile(ids[1], (3, 1))).all()
    lengths = masks.Lengths(numbers(2, 3, 2, below=7), q=5).bind(sizes)
    assert (np.asarray(lengths.kv) == numbers(2, 3, 2, below=7).reshape(6)).all()
    assert np.asarray(lengths.q).tolist() == [5] * 6
    assert np.asarray(masks.Prefix(KV).bind(sizes).length).tolist() == [3, 6] * 3
    assert masks.Dense(np.ones((3, 1, 1, 4, 7), bool)).bind(sizes).array.shape == (6, 1, 4, 7)


def test_one_set_of_segments_is_for_queries_and_keys():
    sizes, ids = Sizes((B,), N, 5, 5), numbers(0, B, 5, below=3)
    assert masks.Segments(ids).bind(sizes) == masks.Segments(q_ids=ids, kv_ids=ids).bind(sizes)


def test_arrays_may_be_looked_up_unbound_and_by_traced_indices():
    entries = jnp.arange(2)
    looked = {
        masks.Lengths(KV, q=QL): [[3, 4], [False, False]],
        masks.Lengths(KV): [[3, 4], [False, True]],
        masks.Segments(np.asarray([[0, 1], [1, 1]])): [[0, 1], [False, True]],
        masks.Dense(np.asarray([[[[0, 1]]], [[[1, 1]]]], bool)): [[0, 0], [False, True]],
    }
    for mask, ((q, k), want) in looked.items():
        asked = jax.jit(jax.vmap(lambda b, mask=mask, q=q, k=k: mask(b, 0, q, k)))
        assert asked(entries).tolist() == want
    grid = masks.Dense(np.ones((1, 1, 2, 3), bool)).grid(Sizes((), 1, 2, 3))
    assert isinstance(grid, jax.Array)


def test_the_base_mask_raises_and_has_the_full_range():
    with pytest.raises(NotImplementedError):
        masks.Mask()(0, 0, 0, 0)
    assert masks.Mask().key_range(0, 0, (0, 1), Sizes((), 1, 2, 3)) == (0, 3)


def test_a_mask_function_must_return_booleans():
    assert masks.MaskFn(lambda b, n, q, k: True)(0, 0, 0, 0) is True
    with pytest.raises(TypeError, match="boolean"):
        masks.MaskFn(lambda b, n, q, k: 1)(0, 0, 0, 0)
    with pytest.raises(TypeError, match=r"boolean array.*float"):
        masks.MaskFn(lambda b, n, q, k: jnp.zeros(3))(0, 0, 0, 0)


REFUSED = [
    (lambda: masks.Causal(1.5), ValueError, r'^Causal\.offset.*or "end"; got 1.5'),
    (lambda: masks.Causal("start"), ValueError, "got 'start'"),
    (lambda: masks.Window(-1, 0), ValueError, r"^Window\.left must be a count.*None; got -1"),
    (lambda: masks.Window(-1, -2), ValueError, r"^Window\.left"),
    (lambda: masks.Window(0, -2), ValueError, r"^Window\.right must be a count.*got -2"),
    (lambda: masks.Window(0, 1.0), ValueError, r"^Window\.right must be a count.*got 1.0"),
    (lambda: masks.Window(True, 0), ValueError, r"^Window\.left must be a count.*got True"),
    (lambda: masks.Window(1, 0, None), ValueError, r"^Window\.offset must be an integer"),
    (lambda: masks.Chunked(0), ValueError, r"^Chunked\.size must be a.*1 or more; got 0"),
    (lambda: masks.Chunked(2.0), ValueError, r"^Chunked\.size must.*got 2.0"),
    (lambda: masks.Prefix(1.0), TypeError, r"^Prefix\.length must hold integers; got float"),
    (lambda: masks.Lengths(1.0), TypeError, r"^Lengths\.kv must hold integers"),
    (lambda: masks.Lengths(1, q=2.0), TypeError, r"^Lengths\.q must hold integers"),
    (lambda: masks.Segments(1.0), TypeError, r"^Segments\.ids must hold integers"),
    (lambda: masks.Segments(q_ids=1.0, kv_ids=1), TypeError, r"^Segments\.q_ids must hold int"),
    (lambda: masks.Segments(), TypeError, "^Segments takes one array.*; got no ids"),
    (lambda: masks.Segments(q_ids=1), TypeError, "^Segments takes one array.*; got q_ids"),
    (lambda: masks.Segments(1, kv_ids=1), TypeError, "^Segments takes .*; got ids and kv_ids"),
    (
        lambda: masks.Segments(q_ids=1, kv_ids=2.0),
        TypeError,
        r"^Segments\.kv_ids must hold integers",
    ),
    (lambda: masks.Dense(np.ones((2, 3))), TypeError, "boolean array"),
]
UNBOUND = [
    (lambda: masks.Prefix(np.ones(3, int)), r"^Prefix\.length must broadcast to \(2,\)"),
    (lambda: masks.Lengths(np.ones(3, int)), r"^Lengths\.kv must broadcast to \(2,\)"),
    (lambda: masks.Lengths(1, q=np.ones(3, int)), r"^Lengths\.q must broadcast to \(2,\)"),
    (
        lambda: masks.Segments(q_ids=np.ones(3, int), kv_ids=1),
        r"^Segments\.q_ids must broadcast to \(2, 4\)",
    ),
    (
        lambda: masks.Segments(q_ids=1, kv_ids=np.ones(3, int)),
        r"^Segments\.kv_ids must broadcast to \(2, 7\)",
    ),
    (lambda: masks.Dense(np.ones(5, bool)), "^A mask must broadcast to"),
]


def test_wrong_shapes_are_named_in_the_error():
    for make, kind, words in REFUSED:
        with pytest.raises(kind, match=words):
            make()
    for make, words in UNBOUND:
        mask = make()
        with pytest.raises(ValueError, match=words):
            mask.bind(Sizes((2,), N, 4, 7))


def test_far_offsets_and_counts_may_cancel():
    sizes, far = Sizes((), 1, 5, 7), 2**40
    beside = np.arange(7) - np.arange(5)[:, None]  # k - q
    for mask, says in [
        (masks.Window(far + 2, 1, far), beside >= -2),
        (masks.Window(3, far + 1, -far), beside <= 1),
        (masks.Window(far, None, far + 1), beside >= 1),
        (masks.Window(None, far, -far - 1), beside <= -1),
        (masks.Window(far, far), beside < 9),
        (masks.Window(far, 2), beside <= 2),
        (masks.Window(2, far), beside >= -2),
        (masks.Window(3, 3, far), beside > 9),
        (masks.Causal(far), beside < 9),
        (masks.Causal(-far), beside > 9),
        (masks.Prefix(far), beside < 9),
        (masks.Prefix(-far), beside > 9),
    ]:
        bound = mask.bind(sizes)
        assert (bound.static(sizes) == says).all(), mask
        band = as_known_band(bound)
        assert all(n is None or abs(n) <= INT32_MAX for n in (band.lo, band.hi)), mask


def test_ranges_skip_what_they_can():
    sizes = Sizes((), 1, 100, 100)
    assert Window(4, 0).key_range(0, 0, (50, 60), sizes) == (46, 60)
    assert visible_range(CAUSAL & Chunked(10), 0, Rows(20, 5), sizes) == (20, 25)
    assert visible_range(Window(2, 0) | Prefix(3), 0, Rows(50, 10), sizes) == (0, 60)
    assert CAUSAL.bind(sizes).key_range(0, 0, (0, 10), sizes) == (0, 10)


@pytest.mark.nightly
def test_equal_masks_do_not_trace_twice():
    traces = []

    @jax.jit
    def f(q, mask):
        traces.append(mask)
        return attend(q, q, q, mask=mask)

    q = jnp.ones((5, 1, 4))
    for offset in (0, 0, 1):
        for length in (3, 4):
            f(q, Causal(offset) & Lengths(np.asarray(length)))
    assert len(traces) == 2
