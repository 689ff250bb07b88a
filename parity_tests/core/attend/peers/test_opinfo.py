"""The inputs by which torch tests its `scaled_dot_product_attention`, drawn anew and live.

torch draws q, k, v and masks uniformly from -9 to 9, so that the logits have a deviation of 27 and
most of the softmax is saturated: gradients are small differences of large numbers, where a
log-sum-exp or a rowsum(do * o) that is kept in few bits shows as nowhere else.

No gradient comes by way of the log-sum-exp: it would hide the small differences.

Blockwise may be off by about twice what the plain formula is off, in every dtype. The truth is the
oracle's, in numbers wider than float64 where the machine has them.
"""

from functools import partial

import numpy as np
import pytest

import flax_attn as fa
from parity_tests.core.attend.peers.run import (
    BACKENDS,
    DTYPES,
    Additive,
    none_worse,
    outcome,
    rounded,
    truth,
)

pytestmark = pytest.mark.nightly  # another library's suite, at its size

SEEDS, RATE = 16, 0.5


def full(x):
    return {}


def causal(x):
    return {"mask": fa.CAUSAL}


def keep(x):
    return {"dropout": fa.DropoutMask(x["keep"], RATE)}


def causal_keep(x):
    return causal(x) | keep(x)


def bias(x):
    return {"score": Additive(x["bias"])}


def scaled_upper(x):
    return {"mask": fa.CAUSAL, "scale": x["scale"]}


def scaled_lower_keep(x):
    return {"mask": fa.Causal("end"), "scale": x["scale"], **keep(x)}


def scaled_lower(x):
    return {"mask": fa.Causal("end"), "scale": x["scale"]}


def scaled_upper_keep(x):
    return scaled_upper(x) | keep(x)


def packed(x):
    return {"mask": fa.Segments(q_ids=x["q_ids"], kv_ids=x["kv_ids"])}


# Batch, queries, keys, heads and widths; the rules; the shape of a bias.
SAMPLES = {
    "rank 3, causal": ((4, 3, 6, 1, 8, 8), causal, None),
    "heads, causal, dropout": ((4, 3, 6, 4, 8, 8), causal_keep, None),
    "heads, attn_mask": ((4, 3, 6, 4, 8, 8), bias, (3, 6)),
    "wider values, dropout": ((4, 3, 6, 4, 8, 16), keep, None),
    "from the first": ((4, 11, 32, 4, 8, 8), scaled_upper, None),
    "a bias for every weight": ((4, 11, 32, 4, 8, 16), bias, (4, 4, 11, 32)),
    "rank 3": ((4, 3, 6, 1, 8, 8), full, None),
    "rank 3, dropout": ((4, 3, 6, 1, 8, 8), keep, None),
    "rank 3, causal, dropout": ((4, 3, 6, 1, 8, 8), causal_keep, None),
    "heads": ((4, 3, 6, 4, 8, 8), full, None),
    "heads, causal": ((4, 3, 6, 4, 8, 8), causal, None),
    "heads, dropout": ((4, 3, 6, 4, 8, 8), keep, None),
    "from the first, dropout": ((4, 11, 32, 4, 8, 8), scaled_upper_keep, None),
    "from the last": ((4, 11, 32, 4, 8, 8), scaled_lower, None),
    "from the last, dropout": ((4, 11, 32, 4, 8, 8), scaled_lower_keep, None),
    "packed in pairs": ((1, 64, 64, 8, 8, 8), packed, None),
}


def draw(seed, sizes, rules, bias_shape):
    """Learnt and fixed arrays and cotangents; every other seed has one query for all entries."""
    random = np.random.RandomState(seed)
    uniform = partial(random.uniform, -9, 9)
    B, T, S, N, H, h = sizes
    q = uniform((B, T, N, H))
    learnt = {
        "q": np.repeat(q[:1], B, axis=0) if seed % 2 else q,
        "k": uniform((B, S, N, H)),
        "v": uniform((B, S, N, h)),
    }
    if bias_shape is not None:
        learnt["bias"] = uniform(bias_shape)
    fixed = {"keep": random.rand(B, N, T, S) >= RATE} if "keep" in rules.__name__ else {}
    if "scaled" in rules.__name__:
        fixed["scale"] = np.asarray(1.0 if seed % 4 < 2 else H**-0.5)
    if rules is packed:
        # The first key stands alone, so that ids of queries and keys differ.
        fixed["q_ids"] = np.arange(T, dtype=np.int32) // 2
        fixed["kv_ids"] = (np.arange(S, dtype=np.int32) + 1) // 2
    return learnt, fixed, (random.standard_normal((B, T, N, h)), np.zeros((B, T, N)))


def known_to_the_oracle(rules, learnt, fixed):
    """The same rules for the oracle."""
    T, S = learnt["q"].shape[1], learnt["k"].shape[1]
    q, k = np.arange(T)[:, None], np.arange(S)
    how = {"seen": True, "chain": ("bias",) if "bias" in learnt else ()}
    if "causal" in rules.__name__ or "upper" in rules.__name__:
        how["seen"] = k <= q
    if "lower" in rules.__name__:
        how["seen"] = k <= q + S - T
    if rules is packed:
        how["seen"] = fixed["q_ids"][:, None] == fixed["kv_ids"]
    how["scale"] = fixed.get("scale")
    if "keep" in fixed:
        how |= {"keep": fixed["keep"], "rate": RATE}
    return how


def check(sample, dtype, seeds=SEEDS):
    sizes, rules, bias_shape = sample
    found = []
    for seed in range(seeds):
        learnt, fixed, cotangents = draw(seed, sizes, rules, bias_shape)
        learnt, fixed, cotangents = rounded((learnt, fixed, cotangents), dtype)
        how = known_to_the_oracle(rules, learnt, fixed)
        want = truth(learnt, cotangents, wide=dtype == "float64", **how)
        others, got = (outcome(rules, one, dtype, learnt, fixed, cotangents) for one in BACKENDS)
        found.append((got, others, want))
    none_worse(found, dtype)


EVERY = [(name, dtype) for name in SAMPLES for dtype in DTYPES]


@pytest.mark.parametrize(("name", "dtype"), EVERY)
def test_blockwise_is_no_worse_than_the_formula(name, dtype):
    check(SAMPLES[name], dtype)


# torch's own samples, drawn by torch.


def torch_samples(torch, dtype, seeds):
    """Of every sample without dropout the arrays as we lay them out, and torch's answer."""
    pytest.importorskip("expecttest", reason="torch's test inputs need expecttest")
    from torch.testing._internal import common_methods_invocations as invocations

    draw = invocations.sample_inputs_scaled_dot_product_attention
    for seed in range(seeds):
        torch.manual_seed(seed)
        for sample in draw(None, "cpu", getattr(torch, dtype), True):
            if sample.kwargs["dropout_p"] == 0:
                yield of_sample(torch, sample)


def of_sample(torch, sample):
    """`(rules, learnt, cotangents, torch's answer)` of one sample; heads after lengths."""
    given = dict(zip("qkv", (sample.input, *sample.args), strict=True))
    if sample.kwargs.get("attn_mask") is not None:
        given["bias"] = sample.kwargs["attn_mask"]
    batch = given["k"].shape[:-2]

    def laid_out(name, x):
        x = x.detach().double()
        if name == "bias":
            return x.numpy()
        x = x.expand(*batch, *x.shape[-2:])
        return (x.unsqueeze(2) if x.ndim == 3 else x.transpose(1, 2)).numpy()

    arrays = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    for name in "qkv":
        shape = *batch, *arrays[name].shape[-2:]
        arrays[name] = arrays[name].detach().expand(shape).clone().requires_grad_()
    out = torch.nn.functional.scaled_dot_product_attention(
        *(arrays[name] for name in "qkv"),
        attn_mask=arrays.get("bias"),
        is_causal=sample.kwargs["is_causal"],
    )
    out.backward(torch.ones_like(out))
    theirs = {name: laid_out(name, x.grad) for name, x in arrays.items()}
    theirs["out"] = laid_out("out", out)
    rules = bias if "bias" in given else causal if sample.kwargs["is_causal"] else full
    learnt = {name: laid_out(name, x) for name, x in given.items()}
    shape = theirs["out"].shape
    return rules, learnt, (np.ones(shape), np.zeros(shape[:3])), theirs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_samples_that_torch_draws(dtype, backend):
    """Of twenty seeds: no worse than torch, output and gradients, by cotangents of ones."""
    torch = pytest.importorskip("torch", reason="torch draws its own samples")
    found = {}
    for rules, learnt, cotangents, theirs in torch_samples(torch, dtype, 20):
        want = truth(learnt, cotangents, True, **known_to_the_oracle(rules, learnt, {}))
        got = outcome(rules, backend, dtype, learnt, {}, cotangents)
        theirs["lse"] = got["lse"]  # which torch does not give
        theirs = {name: x.astype(got[name].dtype) for name, x in theirs.items()}
        found.setdefault((rules, learnt["q"].shape), []).append((got, theirs, want))
    for samples in found.values():
        none_worse(samples, dtype)
