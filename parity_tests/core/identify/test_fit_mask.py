"""Masks named from their tables: drawn ones of our algebra, and tables made by numpy alone."""

from typing import Any

import numpy as np
import pytest

import flax_attn as fa
from flax_attn import CAUSAL, FULL, Causal, Chunked, Lengths, Prefix, Window
from flax_attn._internal.types import Sizes
from flax_attn.identify.fit_mask import fit_mask, mask_text
from parity_tests.tables import each

END = Causal("end")
# By three drawn numbers, from 1 to 3.
DRAWN = [
    lambda a, b, c: FULL,
    lambda a, b, c: CAUSAL,
    lambda a, b, c: END,
    lambda a, b, c: Causal(-a),
    lambda a, b, c: ~Window(0, 0),
    lambda a, b, c: Window(None, a),
    lambda a, b, c: Window(a, None),
    lambda a, b, c: Window(a, a),
    lambda a, b, c: Window(a, b),
    lambda a, b, c: Window(a, b, "end"),
    lambda a, b, c: Window(0, a),
    lambda a, b, c: CAUSAL & Window(a, 0),
    lambda a, b, c: Causal(-a) & Window(a + b, 0),
    lambda a, b, c: END & Window(a, 0, "end"),
    lambda a, b, c: Chunked(a + 1),
    lambda a, b, c: CAUSAL & Chunked(a + 1),
    lambda a, b, c: CAUSAL | Chunked(a + 1),
    lambda a, b, c: Prefix(a),
    lambda a, b, c: CAUSAL | Prefix(a + 1),
    lambda a, b, c: END | Prefix(a + 6),
    lambda a, b, c: CAUSAL & Prefix(a),
    lambda a, b, c: CAUSAL & (Window(a, 0) | Prefix(b)),
    lambda a, b, c: END & (Window(a, 0, "end") | Prefix(b)),
    lambda a, b, c: Window(a, a) | Prefix(b),
    lambda a, b, c: Window(a, b) | Prefix(c),
    lambda a, b, c: Window(a, 0) | Prefix(b + 1),
    lambda a, b, c: Window(a, None) | Prefix(b),
]


def table_of(mask, queries, keys) -> Any:
    return mask.static(Sizes((), 1, queries, keys))


def squares(visible):
    """Tables at two lengths of a function of the index arrays of queries and keys."""
    return [np.broadcast_to(visible(*np.ogrid[:n, :n]), (n, n)) for n in (7, 11)]


@pytest.mark.nightly
@each("number", range(len(DRAWN)))
def test_a_drawn_mask_is_equal_at_a_third_length(number):
    for seed in range(6):
        rng = np.random.RandomState(100 * number + seed)
        mask = DRAWN[number](*rng.randint(1, 4, 3).tolist())
        more = rng.randint(0, 4, 2) * (seed % 2)  # keys more than queries, in every other draw
        lengths = (rng.randint(8, 10), rng.randint(11, 14))
        shapes = [(n, n + int(extra)) for n, extra in zip(lengths, more, strict=True)]
        fitted = fit_mask([table_of(mask, *shape) for shape in shapes])
        assert fitted is not None, f"{mask_text(mask)} at {shapes}"
        longer = (30, 30 + int(more[1]))
        same = np.array_equal(table_of(fitted, *longer), table_of(mask, *longer))
        assert same, f"{mask_text(mask)} at {shapes}: {mask_text(fitted)}"


@each(
    "visible, text",
    [
        (lambda q, k: (q >= 0) & (k >= 0), "FULL"),
        (lambda q, k: np.tri(max(q.shape), dtype=bool), "CAUSAL"),
        (lambda q, k: np.tri(max(q.shape), k=2, dtype=bool), "Window(None, 2)"),
        (lambda q, k: np.tri(max(q.shape), k=-1, dtype=bool), "Causal(offset=-1)"),
        (lambda q, k: np.triu(np.ones((q.size, q.size)), -3) > 0, "Window(3, None)"),
        (lambda q, k: (k <= q) & (q - k < 4), "CAUSAL & Window(3, 0)"),
        (lambda q, k: abs(q - k) <= 2, "Window(2, 2)"),
        (lambda q, k: np.eye(q.size, dtype=bool), "CAUSAL & Window(0, 0)"),
        (lambda q, k: ~np.eye(q.size, dtype=bool), "~Window(0, 0)"),
        (lambda q, k: q // 3 == k // 3, "Chunked(3)"),
        (lambda q, k: (q // 4 == k // 4) & (q >= k), "CAUSAL & Chunked(4)"),
        (lambda q, k: q // 4 >= k // 4, "CAUSAL | Chunked(4)"),
        (lambda q, k: (q >= k) | (k < 3), "CAUSAL | Prefix(3)"),
        (lambda q, k: (q < 0) | (k < 3), "Prefix(3)"),
        (
            lambda q, k: (q >= k) & ((q - k <= 2) | (k < 2)),
            "CAUSAL & (Window(2, 0) | Prefix(2))",
        ),
        (lambda q, k: (abs(q - k) < 2) | (k < 1), "Window(1, 1) | Prefix(1)"),
        # A window at least as long as the longest table shows no number.
        (lambda q, k: (k <= q) & (q - k < 11), "CAUSAL"),
        (lambda q, k: (q - k < 11) & (k - q < 3), "Window(None, 2)"),
        (lambda q, k: abs(q - k) < 11, "FULL"),
        (lambda q, k: (q >= k) & (q // 11 == k // 11), "CAUSAL"),
        (lambda q, k: (q >= k) & ((q - k <= 8) | (k < 2)), "CAUSAL"),
        # One pair of the longest table does.
        (lambda q, k: (k <= q) & (q - k < 10), "CAUSAL & Window(9, 0)"),
        (lambda q, k: (q >= k) & ((q - k <= 7) | (k < 2)), "CAUSAL & (Window(7, 0) | Prefix(2))"),
    ],
)
def test_tables_of_numpy_have_the_simplest_text(visible, text):
    fitted = fit_mask(squares(visible))
    assert fitted is not None
    assert mask_text(fitted) == text


@each(
    "visible",
    [
        lambda q, k: (q < 0) & (k < 0),  # nothing
        lambda q, k: (q - k) % 2 == 0,
        lambda q, k: (k <= q) & ((q - k) % 3 == 0),
        lambda q, k: (abs(q - k) < 2) | (k < 2) | (q < 2),  # rows that see everything
        lambda q, k: (q // 3 == k // 3) | (q // 3 == k // 3 + 1),
        lambda q, k: (k <= q) & (q - k != 4),
        lambda q, k: k <= q * q.size // 4,  # another number at each length
        lambda q, k: (k <= q) & (q - k < q.size - 2),
        lambda q, k: (k >= 2) | (q < 0),
        lambda q, k: (q + 1) // 3 == (k + 1) // 3,
        # With one pair of chunks of which the last has one position, this is also a prefix.
        lambda q, k: q // 10 >= k // 10,
    ],
)
def test_other_tables_have_no_mask(visible):
    fitted = fit_mask(squares(visible))
    assert fitted is None, mask_text(fitted)


def test_each_pair_of_each_table_is_compared():
    for place in np.ndindex(7, 7):
        tables = [np.array(table) for table in squares(lambda q, k: abs(q - k) <= 3)]
        tables[0][place] ^= True
        assert fit_mask(tables) is None, place


def test_the_diagonal_of_cross_attention_is_read_from_the_tables():
    shapes = ((5, 7), (7, 11))
    assert fit_mask([np.tri(T, S, S - T, dtype=bool) for T, S in shapes]) == END
    assert fit_mask([np.tri(T, S, dtype=bool) for T, S in shapes]) == CAUSAL
    assert fit_mask([np.tri(T, S, 1, dtype=bool) for T, S in shapes]) == Window(None, 1)
    assert fit_mask([np.ones(shape, bool) for shape in shapes]) == FULL


@each("number", range(len(DRAWN)))
def test_a_text_builds_its_mask(number):
    mask = DRAWN[number](1, 2, 3)
    assert eval(mask_text(mask), {**vars(fa)}) == mask


def test_a_text_groups_as_the_mask_does():
    one, two, three = CAUSAL, Chunked(2), Prefix(1)
    for mask in (one & two & three, one & (two & three), (one & two) | three, ~(one | two) & three):
        assert eval(mask_text(mask), {**vars(fa)}) == mask


def test_what_is_no_table_is_refused():
    for tables in ([], [np.ones((2, 3, 3), bool)]):
        with pytest.raises(ValueError, match="tables of two axes"):
            fit_mask(tables)
    with pytest.raises(ValueError, match="without arrays"):
        mask_text(Lengths(np.asarray([3])))
