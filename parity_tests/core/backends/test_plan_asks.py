"""Plans evaluate a static mask a bounded number of times, however long the sequence."""

import numpy as np
import pytest

from flax_attn import CAUSAL, FULL, Causal, Chunked, MaskFn, Prefix, Window
from flax_attn._internal.types import Sizes
from flax_attn.backends.blockwise.plan import every_key_visible, make_plan
from flax_attn.masks import ranges
from flax_attn.rules import rules_of
from parity_tests.tables import each

T = 16384
LONG = {
    "causal": CAUSAL,
    "a window": CAUSAL & Window(4095, 0),
    "chunks": CAUSAL & Chunked(8192),
    "a prefix": CAUSAL | Prefix(10),
    "full": FULL,
}


@each("name", LONG)
def test_a_plan_evaluates_ranges_per_block_and_not_per_query(name):
    asks, asked = [], ranges._evaluate
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranges, "_evaluate", lambda *args: asks.append(args) or asked(*args))
        sizes = Sizes((1,), 2, T, T)
        every_key_visible.cache_clear()
        make_plan(sizes, 2, rules_of(mask=LONG[name]).bind(sizes, 64), "cpu")
    assert 0 < len(asks) <= 4 * T / 128, len(asks)


def drawn(random):
    """A mask of one run a query, by numbers that are known."""
    mask = Causal(int(random.randint(-3, 9))) if random.rand() < 0.7 else FULL
    parts = (
        Window(*(int(n) for n in random.randint(0, 9, 2))),
        Chunked(int(random.randint(1, 9))),
        Window(None, int(random.randint(0, 5))),
    )
    for part in parts:
        mask = mask & part if random.rand() < 0.4 else mask
    return mask | Prefix(int(random.randint(1, 9))) if random.rand() < 0.2 else mask


def seen_by_some(mask, sizes):
    q, k = np.ogrid[: sizes.T, : sizes.S]
    return np.broadcast_to(np.asarray(mask(0, 0, q, k)), (sizes.T, sizes.S)).any(0).all()


@pytest.mark.nightly
def test_whether_all_keys_are_seen_is_known_of_every_mask_of_runs():
    random, wrong, found = np.random.RandomState(0), [], []
    for _ in range(300):
        sizes = Sizes((1,), 1, *(int(n) for n in random.randint(1, 30, 2)))
        mask = drawn(random).bind(sizes)
        want = seen_by_some(mask, sizes)
        is_known = ranges.runs_of(mask, np.arange(sizes.T)[None]) is not None
        found.append((want, is_known))
        if every_key_visible(mask, sizes) is not bool(want) and (is_known or not want):
            wrong.append((mask, sizes))
    assert not wrong
    assert {*found} >= {(True, True), (False, True)}


def test_a_key_that_no_query_sees_is_found_in_a_gap_of_a_mask_of_several_runs():
    sizes = Sizes((1,), 1, 8, 8)
    lonely = MaskFn(lambda b, n, q, k: (k != 3) & (k <= q))
    assert not every_key_visible(lonely.bind(sizes), sizes)
