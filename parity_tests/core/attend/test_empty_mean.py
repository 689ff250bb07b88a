"""`empty="mean"`: a row that may look at nothing gives the mean of v, as adding finfo.min does."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    Additive,
    Causal,
    Dropout,
    DropoutMask,
    Lengths,
    Rules,
    attend,
    attention_weights,
    explain,
)
from flax_attn._internal.types import Sizes
from flax_attn.backends import local, protocol, splash
from flax_attn.parity import judge
from flax_attn.rules import sizes_of
from parity_tests.core.backends.refusal import refused
from parity_tests.core.drawing import normal
from parity_tests.requests import masks as random_masks
from parity_tests.requests.oracle import plain
from parity_tests.tables import with_nightly

B, T, S, N, K, H, h = 2, 5, 7, 6, 3, 4, 8
BACKENDS = ("reference", "blockwise")
of_backends = pytest.mark.parametrize("backend", BACKENDS)
mean = partial(attend, empty="mean")


def arrays(lead=(B,), T=T, S=S, N=N, K=K):
    """q, k, v and the cotangent of the output."""
    shapes = (T, N, H), (S, K, H), (S, K, h), (T, N, h)
    return [normal(i, *lead, *shape) for i, shape in enumerate(shapes)]


def ragged(T=T, S=S, N=N):
    """A random mask with empty rows in some heads, in all heads, and a key that nobody sees."""
    seen = np.random.RandomState(3).rand(B, N, T, S) < 0.6
    seen[0, 1, 2] = seen[1, :, :2] = False
    seen[1, :, :, S - 1] = False
    return seen


def outcome(f, q, k, v, do, dlse=None, **asked):
    """Output, lse, and the gradients of q, k and v; no cotangent of an lse of -inf."""
    return run(compiled(f, **asked), q, k, v, do, dlse)


def compiled(f, **asked):
    """The program of an `outcome`, for `run`; a mask given there is one of its arguments."""

    def both(q, k, v, do, dlse, mask=None):
        more = asked if mask is None else {**asked, "mask": mask}
        out, back = jax.vjp(partial(f, return_lse=True, **more), q, k, v)
        return *out, *back((do, jnp.where(jnp.isneginf(out[1]), 0, dlse)))

    return jax.jit(both)


def run(program, q, k, v, do, dlse=None, *mask):
    dlse = normal(9, *q.shape[:-1]) if dlse is None else dlse
    return [np.asarray(x) for x in program(q, k, v, do, dlse.astype(wide(q)), *mask)]


@cache
def of_ragged(backend):
    """The program that most tests ask, each with its own arrays."""
    return compiled(mean, mask=ragged(), backend=backend)


def wide(x):
    return np.float64 if x.dtype == np.float64 else np.float32


def truth(q, k, v, do, seen):
    """The same in numpy, with the mean written out."""
    G, S = q.shape[2] // k.shape[2], k.shape[1]
    seen = np.broadcast_to(seen, (len(q), q.shape[2], q.shape[1], S))
    dead = np.swapaxes(~seen.any(-1), 1, 2)  # B T N
    dlse = np.where(dead, 0, normal(9, *q.shape[:-1]))
    found = plain(q, k, v, do, seen=seen, dlse=dlse)
    means = np.repeat(v.mean(1, keepdims=True), G, axis=2)  # B 1 N h
    out = np.where(dead[..., None], means, found["o"])
    sent = np.where(dead[..., None], do, 0).sum(1, keepdims=True) / S  # B 1 N h
    return [
        out,
        found["lse"],
        found["q"],
        found["k"],
        found["v"] + sent.reshape(len(q), 1, -1, G, sent.shape[-1]).sum(3),
    ]


def check(got, want, name=None):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = judge.gradient_scale(want[2:], b) if i > 1 else None
        verdict = judge.same_function(a, b, scale, zero=True)
        assert verdict.ok and a.dtype == np.float64, (name, i, verdict)


def bit_equal(a, b):
    return all(judge.exact(x, y).ok for x, y in zip(a, b, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", with_nightly([6, 12, 36], commit=[6]))
def test_any_mask_gives_the_mean_where_it_shows_nothing(seeds):
    empty = full = 0
    for seed in range(seeds):
        size = [(5, 7), (8, 3), (1, 6), (6, 6)][seed % 4]
        given = arrays(T=size[0], S=size[1], N=4, K=2)
        mask, seen = random_masks.masks(seed, Sizes((B,), 4, *size))
        dead = ~seen.any(-1)
        empty, full = empty + dead.any(), full + dead.all()
        want = truth(*given, seen)
        for backend in BACKENDS[: 1 + (seed % 3 == 0)]:
            with jax.enable_x64(True):
                got = outcome(mean, *given, mask=mask, backend=backend)
            check(got, want, (seed, backend))
    assert empty > 8 * seeds // 36 and full < empty, (
        empty,
        full,
    )  # else the masks show nothing of this


LONG = {
    "above a block": (130, 140, 2, 1),
    "in loops": (2100, 2100, 2, 1),
    "few queries": (3, 2100, 4, 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(LONG, commit=3))
def test_long_rows_in_blocks(name):
    T, S, N, K = LONG[name]
    pads = np.asarray([S // 3, 0])
    mask = Causal("end") & ~Lengths(pads)
    q, k = np.arange(T)[:, None] + S - T, np.arange(S)
    seen = (k <= q) & (k >= pads[:, None, None, None])
    seen[0, :, -1] = False  # also where the last block of queries ends
    table = np.broadcast_to(seen.any(-1, keepdims=True), (B, 1, T, 1))
    with jax.enable_x64(True):
        given = arrays(T=T, S=S, N=N, K=K)
        got = outcome(mean, *given, mask=mask & table, backend="blockwise")
        check(got, truth(*given, seen), name)


def formula(q, k, v, seen, *, sinks=None, keep=None, rate=0.0):
    """softmax of the logits, finfo.min where nothing may be seen, the sink in a column of its own.

    As gpt-oss writes it, by jax.nn alone.
    """
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    logits = jnp.where(seen, logits, jnp.finfo(logits.dtype).min)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, column], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., : k.shape[1]]
    weights = weights if keep is None else jnp.where(keep, weights / (1 - rate), 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


SINKS = np.asarray([0.5, -np.inf, -1.0, 2.0, -np.inf, 0.0])
KEEP = np.random.RandomState(6).rand(B, N, T, S) < 0.7
DRAWN = Dropout(0.4, jax.random.key(1))
MORE = {
    "plain": ({}, {}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
    "a mask of what is kept": ({"dropout": DropoutMask(KEEP, 0.3)}, {"keep": KEEP, "rate": 0.3}),
    "dropout": ({"dropout": DRAWN}, {"keep": DRAWN, "rate": 0.4}),
    "sinks and dropout": (
        {"sinks": SINKS, "dropout": DRAWN},
        {"sinks": SINKS, "keep": DRAWN, "rate": 0.4},
    ),
}


def with_gradients(f):
    """The output, in place of an lse again, and the gradients, in float64."""

    @jax.jit
    def both(q, k, v, do):
        out, back = jax.vjp(f, q, k, v)
        return out, out, *back(do)

    with jax.enable_x64(True):
        return [np.asarray(x) for x in both(*arrays())]


@cache
def by_formula(name):
    plain = MORE[name][1]
    if isinstance(plain.get("keep"), Dropout):
        with jax.enable_x64(True):
            plain = {**plain, "keep": np.asarray(DRAWN.grid(Sizes((B,), N, T, S)))}
    return with_gradients(partial(formula, seen=ragged(), **plain))


AT_COMMIT = ["a mask of what is kept", "sinks and dropout"]


@pytest.mark.nightly
@of_backends
@pytest.mark.parametrize("name", with_nightly(MORE, commit=AT_COMMIT))
def test_sinks_and_dropout_are_those_of_the_formula(name, backend):
    asked, _ = MORE[name]
    got = with_gradients(partial(mean, mask=ragged(), backend=backend, **asked))
    check(got, by_formula(name), name)
    dead = np.swapaxes(~ragged().any(-1), 1, 2)
    silent = dead & np.isfinite(SINKS) if "sinks" in asked else np.zeros_like(dead)
    assert not got[0][silent].any() and got[0][dead & ~silent].any()


def by_torch(torch, q, k, v, do, way):
    """Output and gradients by finfo.min: added, filled in, or handed to torch's own function."""
    q, k, v = (torch.tensor(x, requires_grad=True) for x in (q, k, v))
    heads = [q, *(x.repeat_interleave(N // K, dim=2) for x in (k, v))]
    a, b, c = (x.transpose(1, 2) for x in heads)
    seen, lowest = torch.tensor(ragged()), torch.finfo(q.dtype).min
    bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, lowest)
    if way == "torch's own":
        o = torch.nn.functional.scaled_dot_product_attention(a, b, c, attn_mask=bias)
    else:
        logits = a @ b.mT * H**-0.5
        logits = logits + bias if way == "added" else logits.masked_fill(~seen, lowest)
        o = torch.softmax(logits, dim=-1) @ c
    o = o.transpose(1, 2)
    o.backward(torch.tensor(do))
    return [x.detach().numpy() for x in (o, o, q.grad, k.grad, v.grad)]


@of_backends
@pytest.mark.parametrize("way", ["added", "filled", "torch's own"])
def test_it_is_what_torch_makes_of_finfo_min(way, backend):
    """All gradients, where logits are replaced; where finfo.min is added torch sends more to q, k.

    The sum rounds the logits away, so that the output does not depend on them, but its derivative
    is taken to be one. Without a cotangent in the rows that see nothing all agree again.
    """
    torch = pytest.importorskip("torch", reason="torch is the witness here")
    *given, do = arrays()
    dead = np.swapaxes(~ragged().any(-1), 1, 2)
    with jax.enable_x64(True):
        none = np.zeros((B, T, N))
        zeroed = np.where(dead[..., None], 0, do)
        ours = [run(of_ragged(backend), *given, x, none) for x in (do, zeroed)]
        want = by_torch(torch, *given, do, way)
        loud, quiet = ([x[0], x[0], *x[2:]] for x in ours)
    if way == "filled":
        check(loud, want, way)
    else:
        check([loud[0], loud[4]], [want[0], want[4]], way)
        assert not loud[2][dead].any() and want[2][dead].all()
        check(quiet, by_torch(torch, *given, zeroed, way), way)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", with_nightly(["float32", "bfloat16"], commit=["bfloat16"]))
@of_backends
def test_narrow_dtypes(dtype, backend):
    given = [jnp.asarray(x, dtype) for x in arrays()]
    got, own = (run(of_ragged(x), *given) for x in (backend, "reference"))
    with jax.enable_x64(True):
        want = truth(*(np.asarray(x, np.float64) for x in given), ragged())
    for i, (a, b, c) in enumerate(zip(got, own, want, strict=True)):
        scale = judge.whole_gradient(want[2:]) if i > 1 else None
        assert judge.same_precision(a, b, c, dtype, scale, zero=True).ok, i
        assert a.dtype == (given[0].dtype if i != 1 else jnp.float32)
    dead = np.swapaxes(~ragged().any(-1), 1, 2)
    means = np.repeat(np.asarray(given[2], np.float64).mean(1, keepdims=True), N // K, axis=2)
    means = np.broadcast_to(means, got[0].shape)[dead]
    rounded = np.asarray(jnp.asarray(means, dtype))
    assert judge.no_worse(got[0][dead], rounded, means, dtype).ok


@of_backends
def test_nan_in_padding_reaches_the_rows_that_average_it_and_no_other(backend):
    *given, do = arrays()
    dirty = [*given[:2], given[2].copy()]
    dirty[2][1, S - 1] = np.nan  # a value that no row may look at
    dead = np.swapaxes(~ragged().any(-1), 1, 2)
    with jax.enable_x64(True):
        clean, got = (run(of_ragged(backend), *x, do) for x in (given, dirty))
    hit = dead & (np.arange(B) == 1)[:, None, None]
    assert np.isnan(got[0][hit]).all() and bit_equal([got[0][~hit]], [clean[0][~hit]])
    assert bit_equal(got[1:], clean[1:])


@pytest.mark.nightly
@of_backends
def test_nan_in_padding_reaches_no_gradient_of_the_rules(backend):
    *given, do = arrays()
    dirty = [*given[:2], given[2].copy()]
    dirty[2][1, S - 1] = np.nan

    @jax.jit
    def of_scale(q, k, v, do):
        how = {"mask": ragged(), "dropout": DRAWN, "backend": backend}
        _, back = jax.vjp(lambda scale: mean(q, k, v, scale=scale, **how), jnp.asarray(0.7))
        return back(do)[0]

    with jax.enable_x64(True):
        found = [np.asarray(of_scale(*x, do)) for x in (given, dirty)]
    assert judge.exact(*found).ok and found[0] != 0


@pytest.mark.nightly
def test_a_bias_of_minus_infinity_hides_a_row_too():
    bias = np.zeros((T, S))
    bias[2] = -np.inf
    for backend in BACKENDS:
        with jax.enable_x64(True):
            given = arrays()
            got = outcome(mean, *given, score=Additive(bias), backend=backend)
            check(got, truth(*given, np.isfinite(bias)))


@pytest.mark.nightly
def test_around_a_kernel():
    """Of those that need a TPU or a GPU, splash attention runs here, interpreted."""
    rules = Rules(Causal("end") & Lengths(np.asarray([130, 0]), q=np.asarray([70, 130])))
    shapes = (B, 130, 4, 64), (B, 140, 2, 64), (B, 140, 2, 64), (B, 130, 4, 64)
    given = [jnp.asarray(normal(i, *shape), jnp.float32) for i, shape in enumerate(shapes)]

    def kernel(q, k, v, rules):
        o, lse = splash.forward(q, k, v, rules, interpret=True)
        return o, protocol.of_lse(lse)

    def f(q, k, v, return_lse):
        bound = rules.bind(sizes_of(q, k), q.shape[-1])
        o, stats = local.attend_locally(kernel, q, k, v, bound, "mean")
        return o, jnp.swapaxes(stats.lse, 1, 2)

    got = outcome(f, *given)
    own = outcome(mean, *given, mask=rules.mask, backend="reference")
    with jax.enable_x64(True):
        exact = [np.asarray(x, np.float64) for x in given]
        want = outcome(mean, *exact, mask=rules.mask, backend="reference")
    for i, (a, b, c) in enumerate(zip(got, own, want, strict=True)):
        scale = judge.whole_gradient(want[2:]) if i > 1 else None
        assert judge.same_precision(a, b, c, "float32", scale, zero=True).ok, i


@pytest.mark.nightly
def test_weights_and_verdicts_do_not_change():
    given = [jnp.asarray(x, jnp.float32) for x in arrays()[:3]]
    assert explain(*given, mask=ragged(), empty="mean") == explain(*given, mask=ragged())
    assert not attention_weights(*given[:2], mask=ragged())[0, 1, 2].any()


@pytest.mark.parametrize("word", ["nan", "Mean", None, True, 0])
def test_another_word_is_refused(word):
    given = [jnp.asarray(x, jnp.float32) for x in arrays()[:3]]
    for verb in (attend, explain):
        with refused(ValueError, f"empty must be one of 'zero', 'mean'; got {word!r}."):
            verb(*given, empty=word)
