"""The matrix of flash-attention's own tests: lengths by heads by masks by scores, as data.

Its causal diagonal and its windows are aligned at the end, `Causal("end")` and
`Window(left, right, "end")`. A cell is one compiled program; what fills it (lengths of padding,
slopes, cap, survivors of dropout) are arrays, so that each runs on several draws. Padding is drawn
as there: none, at most the last twenty tokens, at most two thirds. Blockwise by its own plan is the
oracle's function in float64, and in float32 it is no worse than the plain formula.
"""

from itertools import product

import numpy as np
import pytest

import flax_attn as fa
from parity_tests.core.attend.peers.run import (
    Alibi,
    Softcap,
    none_worse,
    outcome,
    rounded,
    same,
    truth,
)

pytestmark = pytest.mark.nightly  # another library's suite, at its size

LENGTHS = [
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023)),
]
DECODING = [(1, 239), (3, 799), (127, 512), (127, 513)]  # of its split and variable-length tests
HEADS = {"mha": (6, 6), "mqa": (12, 1), "gqa": (6, 2)}  # twelve to one walk in loops
WIDTHS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
# What hides, by the length of keys; flash-attention draws both ends of a window from it.
MASKS = {
    "full": lambda S: (None, None),
    "causal": lambda S: (None, 0),
    "local": lambda S: (S // 5, S // 7),
    "causal local": lambda S: (S // 3, 0),
    "no window": lambda S: (0, 0),
}
SCORES = ((), ("cap",), ("slopes",), ("cap", "slopes"))
RATE = 0.17

# Every mask, score and kind of heads at least once, each extra with and without.
# Lengths, heads, width, mask, scores, padding, dropout, dtype.
CELLS = [
    ((128, 217), "mha", 40, "local", ("cap",), True, False, "float64"),
    ((113, 211), "mqa", 59, "causal local", ("slopes",), False, True, "float64"),
    ((108, 256), "gqa", 64, "full", ("cap", "slopes"), True, True, "float64"),
    ((256, 512), "mqa", 32, "local", ("slopes",), True, False, "float64"),
    ((512, 256), "gqa", 32, "causal", ("cap",), False, False, "float64"),
    ((3, 799), "mha", 32, "no window", (), True, False, "float32"),
]
PADDING = {"none": lambda n: (n, n), "few": lambda n: (n - 20, n), "third": lambda n: (n // 3, n)}


def rules(lengths, mask, scores, padding, dropout):
    """The arguments of `attend` from arrays by name; one object a cell."""
    left, right = MASKS[mask](lengths[1])

    def of(x):
        hides = fa.Causal("end") if mask == "causal" else fa.Window(left, right, "end")
        hides = fa.FULL if mask == "full" else hides
        chain = {"cap": lambda: Softcap(x["cap"]), "slopes": lambda: Alibi(x["slopes"], "end")}
        score = fa.IDENTITY
        for name in scores:
            score = chain[name]() if score == fa.IDENTITY else score >> chain[name]()
        return {
            "mask": hides & fa.Lengths(x["keys"], q=x["queries"]) if padding else hides,
            "score": score,
            "dropout": fa.DropoutMask(x["keep"], RATE) if dropout else None,
        }

    return of


def draw(seed, lengths, heads, H, scores, padding, dropout, mode):
    """Learnt and fixed arrays and cotangents of a batch of two."""
    random = np.random.RandomState(seed)
    (T, S), (N, K), B = lengths, HEADS[heads], 2
    of = random.standard_normal
    learnt = {"q": of((B, T, N, H)), "k": of((B, S, K, H)), "v": of((B, S, K, H))}
    if "cap" in scores:  # as small as to bend most logits
        learnt["cap"] = random.uniform(1, 5)
    if "slopes" in scores:
        learnt["slopes"] = 0.3 * random.rand(N)
    fixed = {}
    if padding:
        lo, hi = PADDING[mode](S)
        fixed["keys"] = random.randint(max(lo, 1), hi + 1, B).astype(np.int32)
        lo, hi = PADDING[mode](T)
        fixed["queries"] = random.randint(max(lo, 1), hi + 1, B).astype(np.int32)
    if dropout:
        fixed["keep"] = random.rand(B, N, T, S) >= RATE
    return learnt, fixed, (of((B, T, N, H)), of((B, T, N)))


def known_to_the_oracle(lengths, mask, scores, fixed):
    T, S = lengths
    left, right = MASKS[mask](S)
    q, k = np.arange(T)[:, None] + S - T, np.arange(S)
    seen = np.ones((1, 1, T, S), bool)
    seen = seen if left is None else seen & (k >= q - left)
    seen = seen if right is None else seen & (k <= q + right)
    if "keys" in fixed:
        keys, queries = (fixed[name].reshape(-1, 1, 1, 1) for name in ("keys", "queries"))
        seen = seen & (k < keys) & (q - (S - T) < queries)
    how = {"seen": seen, "chain": scores, "distance": np.abs(q - k)}
    return how | ({"keep": fixed["keep"], "rate": RATE} if "keep" in fixed else {})


def check(cell, modes):
    lengths, heads, H, mask, scores, padding, dropout, dtype = cell
    of, found = rules(lengths, mask, scores, padding, dropout), []
    for seed, mode in enumerate(modes):
        drawn = draw(seed, lengths, heads, H, scores, padding, dropout, mode)
        learnt, cotangents = rounded((drawn[0], drawn[2]), dtype)
        fixed = drawn[1]
        want = truth(learnt, cotangents, **known_to_the_oracle(lengths, mask, scores, fixed))
        got = outcome(of, "blockwise", dtype, learnt, fixed, cotangents)
        if dtype == "float64":
            same(got, want)
        else:
            others = outcome(of, "reference", dtype, learnt, fixed, cotangents)
            found.append((got, others, want))
    if found:
        none_worse(found, dtype)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cells(cell):
    check(cell, PADDING if cell[5] else ["none"])


def whole():
    """Every length with every mask, the rest in turn, in float64."""
    cells = product([*LENGTHS, *DECODING], MASKS)
    for i, (lengths, mask) in enumerate(cells):
        heads = [*HEADS][i % 3]
        scores, width = SCORES[(i + i // 4) % 4], WIDTHS[(5 * i) % 12]
        dtype = ("float64", "float32")[i // 5 % 2]
        yield lengths, heads, width, mask, scores, i % 2 == 0, i // 2 % 2 == 0, dtype


@pytest.mark.parametrize("cell", list(whole()), ids=str)
def test_the_whole_matrix(cell):
    check(cell, PADDING if cell[5] else ["none"])


def test_the_matrix_holds_everything():
    for axis, values in ((0, LENGTHS), (1, HEADS), (2, WIDTHS), (3, MASKS), (4, SCORES)):
        assert {cell[axis] for cell in whole()} >= {*values}
    few = [{cell[axis] for cell in CELLS} for axis in range(8)]
    assert few[1] == {*HEADS} and few[3] == {*MASKS} and few[4] == {*SCORES}
    assert all(x == {True, False} for x in few[5:7])
