"""Blockwise is about as near to the truth as the plain formula, where rounding hurts the most.

Hidden keys by huge negative numbers instead of a mask, as Hugging Face writes left padding;
saturated softmax over several blocks; the gradients of everything that a score can learn.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import flax_attn as fa
from parity_tests.core.attend.peers.run import (
    BACKENDS,
    DTYPES,
    Additive,
    Alibi,
    Softcap,
    none_worse,
    outcome,
    rounded,
    truth,
)

pytestmark = pytest.mark.nightly  # another library's suite, at its size

# N, K, T and S: nine heads to a key head walk in loops, two to one are written out; both in blocks.
SIZES = {"in loops": (9, 1, 130, 260), "written out": (4, 2, 70, 90)}
H, h = 8, 10
HIDDEN = {
    "finfo.min": lambda dtype: float(ml_dtypes.finfo(dtype).min),
    "-1e9": lambda dtype: -1e9,
    "-1e4": lambda dtype: -1e4,
    "-inf": lambda dtype: -np.inf,
}


def every(name, values):
    """The test with every value, walk and dtype."""

    def parametrized(test):
        test = pytest.mark.parametrize(("walk", "dtype"), [*product(SIZES, DTYPES)])(test)
        return pytest.mark.parametrize(name, values)(test)

    return parametrized


def draw(seed, walk, size=1.0):
    """q, k, v and cotangents; no gradient comes by way of the log-sum-exp."""
    random, (N, K, T, S), B = np.random.RandomState(seed), SIZES[walk], 2
    of = random.standard_normal
    learnt = {
        "q": size * of((B, T, N, H)),
        "k": size * of((B, S, K, H)),
        "v": of((B, S, K, h)),
    }
    return random, learnt, (of((B, T, N, h)), np.zeros((B, T, N)))


def judge_all(draws, rules, dtype, how):
    """Asserts that blockwise is no worse over all draws of (learnt, cotangents)."""
    found = []
    for learnt, cotangents in draws:
        learnt, cotangents = rounded((learnt, cotangents), dtype)
        want = truth(learnt, cotangents, wide=dtype == "float64", **how)
        others, got = (outcome(rules, one, dtype, learnt, {}, cotangents) for one in BACKENDS)
        found.append((got, others, want))
    none_worse(found, dtype)


# Left padding as an additive mask.


def additive_mask(x):
    return {"score": Additive(x["bias"])}


def left_padding(number, T, S):
    """Causal from the end and five or no padding tokens on the left, as zeros and a huge number.

    The first queries of the padded entry see nothing else: all their keys are hidden alike.
    """
    q, k = np.arange(T)[:, None] + S - T, np.arange(S)
    padding = np.asarray([S - T + 5, 0]).reshape(2, 1, 1, 1)
    return np.where((k <= q) & (k >= padding), 0, number)


@every("number", HIDDEN)
def test_left_padding_by_huge_numbers(walk, dtype, number):
    """One program for all numbers."""
    draws = []
    for seed in range(2):
        _, learnt, cotangents = draw(seed, walk)
        learnt["bias"] = left_padding(HIDDEN[number](dtype), *SIZES[walk][2:])
        draws.append((learnt, cotangents))
    judge_all(draws, additive_mask, dtype, {"chain": ("bias",)})


# Everything that is learnt.


CAPS = {"wide": [(3.0, 50.0), (5.0, 500.0)], "narrow": [(1.0, 3.0), (3.0, 5.0)]}


def everything(x):
    score = Additive(x["bias"]) >> Softcap(x["cap"]) >> Alibi(x["slopes"], "end")
    return {"mask": fa.Causal("end"), "score": score, "scale": x["scale"], "sinks": x["sinks"]}


@every("caps", CAPS)
def test_gradients_of_all_parameters(walk, dtype, caps):
    """Usual logits and saturated ones; a narrow cap bends most of them."""
    N, _, T, S = SIZES[walk]
    draws = []
    for seed, (size, cap) in enumerate(CAPS[caps]):
        random, learnt, cotangents = draw(seed, walk, size)
        more = {
            "bias": 3 * random.standard_normal((1, N, T, S)),
            "cap": np.asarray(cap),
            "slopes": random.rand(N),
            "scale": np.asarray(0.4),
            "sinks": 3 * random.standard_normal(N),
        }
        draws.append((learnt | more, cotangents))
    q, k = np.arange(T)[:, None] + S - T, np.arange(S)
    how = {"seen": k <= q, "chain": ("bias", "cap", "slopes"), "distance": np.abs(q - k)}
    judge_all(draws, everything, dtype, how)
