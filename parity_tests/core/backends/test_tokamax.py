"""Tokamax's adapter: its refusals, and where it is installed, its arguments by its plain formula.

The kernels themselves want Hopper or Blackwell. Their forward pass is played by Tokamax's own XLA
implementation of the same operation, their backward pass by a stand-in that reads the arguments.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    Additive,
    Alibi,
    Causal,
    Chunked,
    Dense,
    Documents,
    Dropout,
    Lengths,
    Prefix,
    Segments,
    Softcap,
    Window,
    explain,
)
from flax_attn.backends import tokamax
from flax_attn.rules import Rules, sizes_of
from flax_attn.where import assume_platform
from parity_tests.core.backends import flash
from parity_tests.core.backends.flash import check_precision, normal

B, T, S, N, K, H, h = 2, 11, 13, 6, 3, 8, 16
IS_THERE = importlib.util.find_spec("tokamax") is not None
where_installed = pytest.mark.skipif(not IS_THERE, reason="tokamax is not installed")


def arrays(dtype=jnp.bfloat16, H=H, h=h, T=T):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def says(*given, **rules):
    return str(next(v for v in explain(*given, **rules) if v.backend == "tokamax"))


# What it refuses.

REFUSED = {
    "odd width": (dict(H=12), {}, "keys are 12 and values 16 wide"),
    "wide values": (dict(h=264), {}, "at most 256; keys are 8 and values 264 wide"),
    "dropout": ({}, dict(dropout=Dropout(0.5, jax.random.key(0))), "has no dropout"),
    "scale": ({}, dict(scale=jnp.asarray(0.3)), "needs scale as a number"),
    "alibi": ({}, dict(score=Alibi(np.ones(N))), "Additive >> Softcap as a score"),
    "other order": ({}, dict(score=Softcap(2.0) >> Additive(np.ones(S))), "Additive >> Softcap"),
    "cap": ({}, dict(score=Softcap(jnp.asarray(2.0))), "Softcap by a number"),
    "dense": ({}, dict(mask=CAUSAL & Dense(np.ones((T, S), bool))), "Dense may give several"),
    "segments": (
        {},
        dict(mask=Segments(q_ids=np.arange(T), kv_ids=np.arange(S))),
        "Segments may give several",
    ),
    "or": ({}, dict(mask=Window(2, 0) | Prefix(3)), "Or may give several"),
    "bias of one query": (dict(T=1), dict(score=Additive(np.ones(S))), "two queries or more"),
}


@pytest.mark.nightly(
    but=["alibi", "bias of one query", "cap", "dropout", "odd width", "or", "scale"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_tokamax_refuses_unsupported_requests_by_name(name):
    shapes, rules, text = REFUSED[name]
    given = arrays(**shapes)
    bound = Rules(**rules).bind(sizes_of(*given[:2]), given[0].shape[-1])
    assert text in tokamax.unsupported_reason(*given, bound)


@pytest.mark.nightly
def test_the_refusal_names_a_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert says(*arrays()) == "refuses: tokamax is not installed: pip install flax-attn[tokamax]"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "needs an NVIDIA GPU; the platform is cpu" in says(*arrays())
    with assume_platform("gpu"):
        assert "compute capability 9 or 10; this one has 8.0" in says(*arrays())
    monkeypatch.setattr(tokamax, "_of_version", lambda: "another version")
    with assume_platform("gpu", (9, 0)):
        assert "would round float32" in says(*arrays(jnp.float32))
        assert says(*arrays()) == "refuses: another version"


def test_the_refusal_names_an_old_version(monkeypatch):
    monkeypatch.setattr(tokamax.metadata, "version", lambda name: "0.0.9")
    text = tokamax._of_version.__wrapped__()
    assert text == "needs tokamax 0.0.12 or later; 0.0.9 is installed"


# What it computes, with its own plain formula in place of its kernels.

BIAS = normal(5, N, T, S).astype(jnp.float32)
LENGTHS = Lengths(np.asarray([9, 4]), q=np.asarray([11, 7]))
COMPUTED = {
    "full and softcap": Rules(FULL, Softcap(2.0), scale=0.4),
    "causal and bias": Rules(CAUSAL, Additive(BIAS)),
    "from the end": Rules(Causal("end"), Additive(BIAS[:1, :1]) >> Softcap(1.5)),
    "window": Rules(Window(3, 2, offset=1)),
    "chunks and lengths": Rules(Chunked(4) & LENGTHS, sinks=BIAS[:, 0, 0]),
    "prefix": Rules(Prefix(np.asarray([3, 9])) & CAUSAL),
    "prefix or causal": Rules(CAUSAL | Prefix(np.asarray([3, 9]))),
    "a bias that hides all": Rules(score=Additive(BIAS.at[1, 4].set(-jnp.inf))),
}


def played():
    base = tokamax._kernel_module("base")

    class Played:
        @staticmethod
        def vjp(residuals, o, do, q, k, v, *, mask, bias, logits_scale, logits_soft_cap, **rest):
            lse, one = residuals
            seen = mask.as_array(q.shape[1], k.shape[1])
            seen = jnp.ones((1, 1, 1, 1), bool) if seen is None else seen
            given = (q, k, v, seen, o, lse + jnp.log(one), do, logits_scale, logits_soft_cap, bias)
            return dict(zip("q k v bias".split(), flash.backward(*given), strict=True))

        def __call__(self, *given, **how):
            return base.DotProductAttention()(*given, **how)

    return Played()


@where_installed
@pytest.mark.parametrize("wanted", [(True, False), (True, True)], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_tokamax_equals_the_plain_formula(name, wanted):
    given = arrays(jnp.float32)
    rules, kernel = COMPUTED[name], played()
    bound = rules.bind(sizes_of(*given[:2]), H)
    assert tokamax.unsupported_reason(*given, bound) is None
    check_precision(lambda *x: tokamax.forward(*x, kernel=kernel), *given, rules, wanted)


@where_installed
def test_packed_documents():
    """Of the same tokens, with padding in one row and none in the other."""
    q, k, v = arrays(jnp.float32, T=S)
    rules = Rules(CAUSAL & Documents(np.asarray([[4, 0, 6], [5, 8, 0]])))
    check_precision(lambda *x: tokamax.forward(*x, kernel=played()), q, k, v, rules, (True, True))


@where_installed
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", COMPUTED)
def test_tokamax_on_a_gpu_equals_the_plain_formula(name):
    given = arrays(jnp.bfloat16, H=64, h=128)
    check_precision(tokamax.forward, *given, COMPUTED[name])
