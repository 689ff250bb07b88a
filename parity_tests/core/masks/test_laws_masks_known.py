"""The laws of numbers returned by a user's mask: each kind is accepted or refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import Band, Mask, attend, frozen
from flax_attn._internal.types import Sizes
from flax_attn.backends import cudnn, local
from flax_attn.backends.blockwise.plan import make_plan
from flax_attn.masks import CAUSAL, Causal, Lengths, Rows, Window
from flax_attn.masks.ranges import (
    as_known_band,
    block_starts,
    fully_visible_range,
    reach_of,
    runs_of,
    segments_of,
    visible_range,
)
from flax_attn.parity import judge
from flax_attn.places import Places
from flax_attn.rules import Rules
from parity_tests.requests.users_masks import Near

SIZES = Sizes((2,), 3, 5, 7)


@frozen
class Halves(Near):
    """The same in numpy's own kinds of number."""

    def _larger(self, a, b):
        return np.int64(max(a, b))

    def _smaller(self, a, b):
        return np.asarray(min(a, b), np.int16)


KINDS = [Near(3, 2), Near(3, 2, "numpy"), Near(3, 2, "jax"), Halves(3, 2)]


def test_every_kind_of_number_is_read_as_pythons():
    ours = Window(3, 2)
    for mask in KINDS:
        for rows in (Rows(0, 5), Rows(1, 2), Rows(4, 1)):
            for get in (visible_range, fully_visible_range):
                answer = get(mask, 0, rows, SIZES)
                assert answer == get(ours, 0, rows, SIZES)
                assert all(type(n) is int for n in answer)
        for whole in (mask, mask & mask):
            band, back = as_known_band(whole), reach_of(whole)
            assert band == Band(-3, 2) and back == 4
            assert all(type(n) is int for n in (*band[:2], back))


def test_every_kind_of_number_is_read_while_a_program_is_traced():
    for mask in KINDS:

        def traced(x, mask=mask):
            asked = (
                visible_range(mask, 0, Rows(1, 2), SIZES),
                fully_visible_range(mask, 0, Rows(1, 2), SIZES),
            )
            known = (*asked, as_known_band(mask), reach_of(mask & CAUSAL))
            assert known == ((0, 5), (0, 4), Band(-3, 2), 4)
            assert local.no_row_is_empty(Rules(mask, scale=1.0), SIZES)
            return x

        jax.jit(traced)(1.0)


def test_blocks_of_a_traced_place_have_the_numbers_of_known_ones():
    """This also holds for a mask in numpy, which cannot be evaluated at traced indices."""
    sizes = SIZES._replace(T=11, S=13)
    for mask in (*KINDS, ~KINDS[1], KINDS[1] | Near(0, 7, "numpy"), KINDS[1] & Near(9, 0, "jax")):
        for size in (1, 2, 4, 11):
            starts = block_starts(11, size)
            assert starts[-1] == 11 - size and starts == sorted(set(starts))
            for get in (visible_range, fully_visible_range):

                def of_block(start, get=get, mask=mask, size=size):
                    ends = get(mask, 0, Rows(start, size, 11), sizes)
                    return jnp.asarray(ends[0], jnp.int32), jnp.asarray(ends[1], jnp.int32)

                lo, hi = jax.vmap(of_block)(jnp.asarray(starts, jnp.int32))
                known = [get(mask, 0, Rows(start, size), sizes) for start in starts]
                assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == known, (mask, size)


def test_an_end_that_all_blocks_share_is_a_number():
    """So that no loop is compiled for what is known to be empty."""
    for mask in (CAUSAL, Near(9, 0, "numpy")):

        def asked(start, mask=mask):
            lo, hi = visible_range(mask, 0, Rows(start, 2, 5), SIZES)
            assert type(lo) is int and lo == 0 and not isinstance(hi, int)
            return hi

        assert jax.jit(asked)(jnp.int32(2)) == 4


def test_attention_in_blocks_is_the_same_by_every_kind_of_number():
    """Few queries, blocks that are written out, and loops; alone, joined and inverted."""
    call = jax.jit(lambda q, k, by, mask: attend(q, k, k, mask=mask, backend=by), static_argnums=2)
    for T, S in ((2, 700), (150, 150), (1500, 1500)):
        q, k = (np.random.RandomState(i).standard_normal((n, 1, 4)) for i, n in enumerate((T, S)))
        q, k, lengths = q.astype("float32"), k.astype("float32"), Lengths(S - 3)
        for hides in (False, True) if T < 1000 else (True,):
            ours, *others = (
                call(q, k, "blockwise", ~mask & lengths if hides else mask)
                for mask in (Window(3, 2), *KINDS[1:3])
            )
            assert all(np.array_equal(o, ours) for o in others)
        assert judge.allclose(ours, call(q, k, "reference", ~Window(3, 2) & lengths))


def test_kernels_read_the_same_bands():
    ours = Rules(Window(7, 0), scale=1.0)
    for mask in (Near(7, 0, "numpy"), Near(7, 0, "jax"), Halves(7, 0)):
        rules, sizes = Rules(mask, scale=1.0), Sizes((1,), 2, 64, 64)
        assert cudnn._of_rules(rules, 64, 64) is None is cudnn._of_rules(ours, 64, 64)
        assert make_plan(sizes, 2, rules, "gpu") == make_plan(sizes, 2, ours, "gpu")


def answering(method: str, answer: Any, static: bool = True) -> Mask:
    @frozen
    class Odd(Mask):
        is_static = static

        def __call__(self, b, n, q, k):
            return k >= 0

    setattr(Odd, method, lambda self, *args: answer)
    return Odd()


REFUSED = [
    ("key_range", (0.0, 7.0), r"two whole numbers, the first key and the end of the last"),
    ("key_range", (0, 3, 7), r"two whole numbers.*; it returned \(0, 3, 7\)"),
    ("key_range", None, "two whole numbers.*; it returned None"),
    ("key_range", (True, 7), "two whole numbers"),
    ("seen_range", (0, np.arange(3)), "two whole numbers"),
    ("seen_range", ("0", 7), "two whole numbers"),
    ("as_band", (None, 0), "a flax_attn.Band or None; it returned"),
    ("as_band", Band(lo=-1.5), "whole numbers that are static.*it returned -1.5"),
    ("as_band", Band(kv=2.0), "kv and rows as integers; it returned 2.0"),
    ("as_runs", (0.5, None), "the first keys and the ends, as arrays of integers"),
    ("as_runs", 3, "the first keys and the ends"),
    ("as_segments", (0.5, 1), "the ids of queries and those of keys"),
    ("as_segments", np.arange(3), "the ids of queries and those of keys"),
    ("reach", 2.5, "whole numbers that are static"),
]
ASK = {
    "key_range": lambda mask: visible_range(mask, 0, Rows(0, 2), SIZES),
    "seen_range": lambda mask: fully_visible_range(mask, 0, Rows(0, 2), SIZES),
    "as_band": as_known_band,
    "as_runs": lambda mask: runs_of(mask, np.arange(5)[None]),
    "as_segments": segments_of,
    "reach": reach_of,
}


def test_a_malformed_range_names_its_class_and_method():
    for method, answer, words in REFUSED:
        for static in (True, False):
            mask = answering(method, answer, static)
            whole = (mask,) if method == "as_segments" else (mask, mask & CAUSAL, CAUSAL & mask)
            for each in whole:
                with pytest.raises(TypeError, match=rf"^Odd\.{method} must return {words}"):
                    ASK[method](each)


def test_what_is_known_only_in_the_program_is_named():
    @frozen
    class Late(Mask):
        length: Any

        def __call__(self, b, n, q, k):
            return k < self.length

        def key_range(self, b, n, q, sizes):
            return 0, np.minimum(q[1], sizes.S)

        def as_band(self):
            return Band(hi=self.length)

    late = Late(jnp.asarray(3))
    words = r"^Late\.key_range uses a value as static .* jnp\.maximum for np\.maximum"
    with pytest.raises(TypeError, match=words):
        jax.jit(lambda start: visible_range(late & CAUSAL, 0, Rows(start, 2, 5), SIZES))(1)
    with pytest.raises(
        TypeError, match=r"^Late\.as_band must return whole numbers that are static"
    ):
        jax.jit(lambda n: as_known_band(Late(n)) is None)(3)
    x = jnp.ones((1500, 1, 4))
    with pytest.raises(TypeError, match=r"^Late\.key_range"):
        attend(x, x, x, mask=late, backend="blockwise")


def test_offsets_of_entries_and_traced_ones_are_runs():
    queries = np.arange(5, dtype=np.int32)[None]
    offsets = np.asarray([2, -1])
    for mask in (Causal(offsets), Window(1, 2, offsets), Window(None, 1, offsets) & CAUSAL):
        seen = np.broadcast_to(mask.bind(SIZES)(*SIZES.grid()), SIZES.shape)[:, 0]
        for bound in (mask.bind(SIZES), jax.jit(lambda x: x)(mask.bind(SIZES))):
            first, end = runs_of(bound, queries)
            keys = np.arange(7)
            shown = (
                np.ones((2, 5, 7), bool) if first is None else keys >= np.asarray(first)[..., None]
            )
            assert np.array_equal(shown & (keys < np.asarray(end)[..., None]), seen)
            assert as_known_band(bound) is None


def test_chunks_and_prefixes_have_a_reach():
    assert reach_of(Window(3, 0) & CAUSAL) == 4 and reach_of(CAUSAL) is None
    assert reach_of(Window(3, 0, 2)) == 2 and reach_of(Window(3, 9, 9)) == 0
    assert reach_of(Window(3, 0, np.asarray([1, 2]))) is None and reach_of(Causal("end")) is None


def test_a_static_mask_is_the_same_on_every_shard():
    """It reads neither batch entries nor heads, so a mesh adds nothing traced."""
    places = Places(np.asarray([5, 3]), np.asarray([2, 7, 4])).bind(SIZES)
    mesh = jax.make_mesh((1,), ("data",))  # of an Explicit axis
    x = jnp.asarray(np.random.RandomState(0).standard_normal((2, 150, 1, 4)), jnp.float32)
    sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
    for mask in KINDS:
        assert mask.at(places) is mask and (~mask & CAUSAL).at(places) == ~mask & CAUSAL
    call = jax.jit(lambda x: attend(x, x, x, mask=KINDS[2], backend="blockwise"))
    plain = jax.jit(lambda x: attend(x, x, x, mask=Window(3, 2), backend="reference"))
    assert judge.allclose(call(sharded), plain(x))
