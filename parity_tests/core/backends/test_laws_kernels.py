"""The laws of the wrapper around every kernel: sinks, masking, the gradient of the lse.

The kernel here is a plain formula that knows of the mask through a bias alone, as kernels do.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import reference
from flax_attn._internal.types import Sizes, wide
from flax_attn.backends.protocol import Kernel, of_lse, serve, with_dlse, zero_gradient
from flax_attn.masks import FULL, Causal, Lengths, Mask
from flax_attn.parity import judge
from flax_attn.reference import Stats
from flax_attn.rules import Rules
from flax_attn.scores import Additive

from .law_cases import eager64, normal, same

B, N, T, S, H, h = 2, 2, 3, 4, 3, 5
SIZES = Sizes((B,), N, T, S)
INT32_MAX = -1e20  # what a kernel adds where the mask hides


@dataclass(frozen=True)
class Toy:
    """softmax(q.k / 2 + bias) v; where nothing is to be seen it gives what a kernel may give.

    `by_lse`: it knows the log-sum-exp alone.
    """

    fully_masked: bool = False
    by_lse: bool = False

    def run(self, q, k, v, given):
        (bias,) = given
        kind = wide(q.dtype)
        x = jnp.einsum("btnh,bsnh->bnts", *(y.astype(kind) for y in (q, k))) / 2 + bias
        m = x.max(-1)
        safe = jnp.where(m == -jnp.inf, 0, m)
        l = jnp.exp(x - safe[..., None]).sum(-1)
        o = jnp.einsum("bnts,bsnh->btnh", jnp.exp(x - safe[..., None]), v.astype(kind))
        o = (o / jnp.swapaxes(l, 1, 2)[..., None]).astype(q.dtype)
        stats = Stats(m, l)
        return o, of_lse(m + jnp.log(l)) if self.by_lse else stats

    def backward(self, q, k, v, given, o, stats, do, dlse):
        (bias,) = given
        kind, narrow = stats.m.dtype, q.dtype
        q, k, v, o, do = (y.astype(kind) for y in (q, k, v, o, do))
        x = jnp.einsum("btnh,bsnh->bnts", q, k) / 2 + bias
        p = jnp.exp(x - stats.m[..., None]) / stats.l[..., None]
        delta = jnp.swapaxes((do * o).sum(-1), 1, 2)
        delta = delta if dlse is None else delta - dlse
        ds = p * (jnp.einsum("btnh,bsnh->bnts", do, v) - delta[..., None])
        dq, dk = (
            jnp.einsum(f"bnts,{x}", ds, y) / 2 for x, y in (("bsnh->btnh", k), ("btnh->bsnh", q))
        )
        dv = jnp.einsum("bnts,btnh->bsnh", p, do)
        return *(x.astype(narrow) for x in (dq, dk, dv)), (ds.astype(bias.dtype),)


SEEN = np.ones((B, N, T, S), bool)
EARLY = np.arange(T)[:, None] < np.asarray([3, 2])[:, None, None, None]
PADDED = EARLY & (np.arange(S) < np.asarray([3, 2])[:, None, None, None])
KINDS: dict[str, tuple[Mask, np.ndarray, Any]] = {
    "plain": (FULL, SEEN, None),
    "causal": (Causal(-1), SEEN & (np.arange(S) < np.arange(T)[:, None]), np.asarray([0.4, -1.0])),
    "lengths": (Lengths(np.asarray([3, 2]), q=np.asarray([3, 2])), SEEN & PADDED, None),
    "lengths, sinks": (
        Lengths(np.asarray([3, 2]), q=np.asarray([3, 2])),
        SEEN & PADDED,
        np.asarray([-np.inf, 1.5]),
    ),
    "sinks": (FULL, SEEN, np.asarray([2.0, -3.0])),
    "dark": (FULL, SEEN, np.asarray([0.5, -np.inf])),
    "dark, no sinks": (FULL, SEEN, None),
    "dark, lengths": (Lengths(np.asarray([S, S]), q=np.asarray([3, 2])), SEEN & EARLY, None),
}


@cache
def arrays(kind: str) -> tuple[Any, ...]:
    """q, k, v, the bias and the cotangents, with NaN wherever the mask hides."""
    seen = KINDS[kind][1]
    with jax.enable_x64(True):
        q, k, v = normal(0, B, T, N, H), normal(1, B, S, N, H), normal(2, B, S, N, h)
        bias, do, dlse = normal(3, B, N, T, S), normal(4, B, T, N, h), normal(5, B, N, T)
        q[~seen.any((1, 3))] = np.nan
        k[~seen.any((1, 2))] = v[~seen.any((1, 2))] = np.nan
        dead = ~seen.any(3)
        if kind.startswith("dark"):
            bias[0, :, 1] = bias[1, 1, 2] = -np.inf
            dead = dead | np.isneginf(bias).all(3)
        do[np.swapaxes(dead, 1, 2)] = np.nan
        if KINDS[kind][2] is None:
            dlse[dead] = np.nan
        return tuple(jnp.asarray(x) for x in (q, k, v, bias, do, dlse))


def told(kernel: Toy, kind: str, which: tuple[bool, bool], given: tuple) -> list[Any]:
    """Output, lse and gradients by `serve`; `which` of the cotangents there are."""
    mask, seen, sinks = KINDS[kind]
    q, k, v, bias, do, dlse = given
    sinks = None if sinks is None else jnp.asarray(sinks)

    def run(q, k, v, bias, sinks):
        given = (jnp.where(seen, bias, INT32_MAX),)
        return serve(kernel, q, k, v, Rules(mask, sinks=sinks).bind(SIZES, 4), given)

    return _outcome(run, (q, k, v, bias, sinks), do, dlse, which)


def true(kind: str, which: tuple[bool, bool], given: tuple) -> list[Any]:
    mask, _, sinks = KINDS[kind]
    q, k, v, bias, do, dlse = given
    sinks = None if sinks is None else jnp.asarray(sinks, q.dtype)

    def run(q, k, v, bias, sinks):
        rules = Rules(mask, Additive(bias), 0.5, sinks).bind(SIZES, H)
        return reference.forward(q, k, v, rules)

    return _outcome(run, (q, k, v, bias, sinks), do, dlse.astype(wide(q.dtype)), which)


def _outcome(run: Any, given: tuple, do: Any, dlse: Any, which: tuple[bool, bool]) -> list[Any]:
    def some(*given):
        o, lse = run(*given)
        return tuple(x for x, wanted in zip((o, lse), which, strict=True) if wanted), (o, lse)

    _, backward, out = jax.vjp(some, *given, has_aux=True)
    wanted = tuple(x for x, wanted in zip((do, dlse), which, strict=True) if wanted)
    return [*out, *(g for g in backward(wanted) if g is not None)]


BOTH = ((True, True), (True, False), (False, True))


def check_kernels(kind: str, *kernels: Toy) -> None:
    """Whichever cotangents there are; all in one program."""

    @jax.jit
    def run(*given):
        told_by = [partial(told, kernel) for kernel in kernels]
        return [[say(kind, which, given) for say in (true, *told_by)] for which in BOTH]

    for which, (want, *got) in zip(BOTH, run(*arrays(kind)), strict=True):
        for kernel, found in zip(kernels, got, strict=True):
            same(list(map(np.asarray, found)), list(map(np.asarray, want)), f"{kernel}, {which}")


@eager64
def test_a_kernel_gives_what_the_plain_formula_gives():
    for kind in ("lengths, sinks", "plain", "causal", "lengths", "sinks"):
        check_kernels(kind, Toy(), Toy(by_lse=True))


@pytest.mark.nightly
@eager64
def test_a_kernel_without_lse_finds_fully_masked_rows():
    for kind in ("dark", "dark, no sinks", "dark, lengths", "lengths, sinks"):
        check_kernels(kind, Toy(fully_masked=True), Toy(fully_masked=True, by_lse=True))


@pytest.mark.nightly
@eager64
def test_narrow_outputs_stay_narrow():
    mask, seen, sinks = KINDS["lengths, sinks"]
    q, k, v, bias, do, dlse = (x.astype("bfloat16") for x in arrays("lengths, sinks"))
    rules = Rules(mask, sinks=jnp.asarray(sinks, "bfloat16")).bind(SIZES, 4)
    given = (jnp.where(seen, bias, INT32_MAX).astype("float32"),)
    (o, lse), backward = jax.vjp(
        lambda q, s: serve(Toy(), q, k, v, Rules(rules.mask, sinks=s, scale=rules.scale), given),
        q,
        rules.sinks,
    )
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    dq, dsinks = backward((do, dlse.astype("float32")))
    assert dq.dtype == dsinks.dtype == jnp.bfloat16
    exact, plain = (
        true("lengths, sinks", (True, True), [x.astype(dtype) for x in arrays("lengths, sinks")])
        for dtype in ("float64", "bfloat16")
    )
    for got, i in ((o, 0), (dsinks, -1)):
        assert judge.no_worse(got, plain[i], exact[i], "bfloat16").ok


@pytest.mark.nightly
def test_equal_kernels_compile_once():
    q, k, v, bias, *_ = (x.astype("float32") for x in arrays("plain"))
    rules = Rules().bind(SIZES, 4)
    made = jax.make_jaxpr(lambda q: serve(Toy(), q, k, v, rules, (bias,)))(q)
    assert [str(e.primitive) for e in made.eqns] in (["jit"], ["pjit"])
    first, again = (serve(Toy(), q, k, v, rules, (bias,))[0] for _ in range(2))
    assert judge.exact(first, again).ok and isinstance(Toy(), Kernel)
    assert not isinstance(object(), Kernel)
    hidden = jax.make_jaxpr(lambda q: serve(Toy(), q, k, v, Rules(Causal(-1)), (bias,)))(q)
    assert len(hidden.eqns) > 1


@pytest.mark.nightly
def test_nothing_flows_into_what_has_no_gradient():
    for x in (jnp.ones((2, 3), bool), jnp.ones((2, 3), int)):
        found = zero_gradient(x)
        assert found.dtype == jax.dtypes.float0 and found.shape == (2, 3)
    found = zero_gradient(jnp.ones((2, 3), "bfloat16"))
    assert found.dtype == jnp.bfloat16 and not found.any() and found.shape == (2, 3)


@pytest.mark.nightly
@eager64
def test_a_gradient_of_the_lse_by_a_second_call():
    q, k, v, bias, do, dlse = arrays("plain")
    kernel = Toy()
    for width in (5, 3, 2, 1):
        v_, do_ = v[..., :width], do[..., :width]
        o, stats = kernel.run(q, k, v_, (bias,))
        calls = []

        def backward(v, o, do, calls=calls, stats=stats):
            calls.append(do)
            return kernel.backward(q, k, v, (bias,), o, stats, do, None)[:3]

        for given in (None, dlse):
            calls.clear()
            got = with_dlse(backward, v_, o, do_, given)
            want = kernel.backward(q, k, v_, (bias,), o, stats, do_, given)[:3]
            assert len(calls) == (1 if given is None else 2)
            for a, b in zip(got, want, strict=True):
                assert a.shape == b.shape and judge.same_function(a, b).ok
            assert given is None or calls[1].shape == do_.shape


@pytest.mark.nightly
@eager64
def test_a_narrow_output_holds_all_bits_of_the_lse():
    dlse = jnp.asarray(normal(7, B, N, T), "float32")
    left, parts = -np.swapaxes(np.asarray(dlse), 1, 2), []
    for _ in range(3):  # of eight bits each
        parts.append(np.asarray(left.astype(jnp.bfloat16), np.float32))
        left = left - parts[-1]
    assert not left.any()
    for width in (1, 2, 3, 4):
        calls = []

        def backward(v, o, do, calls=calls):
            calls.append((v, o, do))
            return 0.0, 0.0, 0.0

        o = jnp.ones((B, T, N, width), "bfloat16")
        with_dlse(backward, o, o, o, dlse)
        v, stands, ones = calls[1]
        assert not v.any() and stands.dtype == ones.dtype == jnp.bfloat16
        assert stands.shape == ones.shape == o.shape
        for i in range(width):
            assert np.array_equal(stands[..., i], parts[i] if i < 3 else 0 * left)
            assert np.array_equal(ones[..., i], np.full_like(left, i < 3))
