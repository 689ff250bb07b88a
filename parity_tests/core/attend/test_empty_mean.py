"""`empty="mean"`: a fully masked row gives the mean of v, as adding finfo.min does.

Any mask, score, sinks and dropout, in every dtype: parity_tests/requests draws them.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    FULL,
    Additive,
    Causal,
    Chunked,
    Dropout,
    Lengths,
    MaskFn,
    Rules,
    ScoreFn,
    Softcap,
    Window,
    attend,
    attention_weights,
    explain,
)
from flax_attn.backends import local, protocol, splash
from flax_attn.parity import judge
from flax_attn.rules import sizes_of
from parity_tests.core.backends.refusal import refused
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

B, T, S, N, K, H, h = 2, 5, 7, 6, 3, 4, 8
BACKENDS = ("reference", "blockwise")
of_backends = pytest.mark.parametrize("backend", BACKENDS)
mean = partial(attend, empty="mean")


def arrays():
    """q, k, v and the cotangent of the output."""
    shapes = (T, N, H), (S, K, H), (S, K, h), (T, N, h)
    return [normal(i, B, *shape) for i, shape in enumerate(shapes)]


def ragged():
    """A random mask with empty rows in some heads, in all heads, and a key that nobody sees."""
    seen = np.random.RandomState(3).rand(B, N, T, S) < 0.6
    seen[0, 1, 2] = seen[1, :, :2] = False
    seen[1, :, :, S - 1] = False
    return seen


def outcome(f, q, k, v, do, **asked):
    """Output, lse, and the gradients of q, k and v; no cotangent of an lse of -inf."""
    return run(compiled(f, **asked), q, k, v, do)


def compiled(f, **asked):
    """The program of an `outcome`, for `run`."""

    def both(q, k, v, do, dlse):
        out, back = jax.vjp(partial(f, return_lse=True, **asked), q, k, v)
        return *out, *back((do, jnp.where(jnp.isneginf(out[1]), 0, dlse)))

    return jax.jit(both)


def run(program, q, k, v, do, dlse=None):
    dlse = normal(9, *q.shape[:-1]) if dlse is None else dlse
    return [np.asarray(x) for x in program(q, k, v, do, dlse.astype(wide(q)))]


@cache
def of_ragged(backend):
    """The program that most tests ask, each with its own arrays."""
    return compiled(mean, mask=ragged(), backend=backend)


def wide(x):
    return np.float64 if x.dtype == np.float64 else np.float32


def check(got, want, name=None):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        scale = judge.gradient_scale(want[2:], b) if i > 1 else None
        verdict = judge.same_function(a, b, scale, zero=True)
        assert verdict.ok and a.dtype == np.float64, (name, i, verdict)


def bit_equal(a, b):
    return all(judge.exact(x, y).ok for x, y in zip(a, b, strict=True))


DRAWN = Dropout(0.4, jax.random.key(1))


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
def test_empty_mean_equals_torch_with_finfo_min(way, backend):
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
def test_empty_mean_around_a_kernel_equals_the_plain_formula():
    """Of the kernels for TPU and GPU, only splash attention can run here, interpreted."""
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
def test_an_unknown_value_of_empty_is_refused(word):
    given = [jnp.asarray(x, jnp.float32) for x in arrays()[:3]]
    for verb in (attend, explain):
        with refused(ValueError, f"empty must be one of 'zero', 'mean'; got {word!r}."):
            verb(*given, empty=word)


STATIC = {
    "full": {},
    "causal": {"mask": CAUSAL},
    "window": {"mask": CAUSAL & Window(2, 0), "score": Softcap(2.0)},
    "chunks": {"mask": Chunked(3)},
}
OTHER = {
    "strictly before": {"mask": Causal(-1)},
    "lengths": {"mask": Lengths(np.asarray([3, 0]))},
    "bias": {"score": Additive(np.ones((1, 1), np.float32))},
    "function": {"score": ScoreFn(lambda x, b, n, q, k: x)},
    "mask function": {"mask": MaskFn(lambda b, n, q, k: q >= k)},
}


@pytest.mark.nightly(but=["chunks-reference", "function-reference"])
@of_backends
@pytest.mark.parametrize("name", [*STATIC, *OTHER])
def test_where_no_row_can_be_empty_the_program_is_the_same(name, backend):
    given = [jnp.asarray(x, jnp.float32) for x in arrays()[:3]]
    asked = {**STATIC, **OTHER}[name]

    def text(**more):
        return jax.jit(partial(attend, backend=backend, **asked, **more)).lower(*given).as_text()

    plain = text()
    assert plain == text(empty="zero")
    assert (text(empty="mean") == plain) == (name in STATIC)


@pytest.mark.nightly
def test_forward_mode_and_second_derivatives_by_the_plain_formula():
    with jax.enable_x64(True):
        *given, do = arrays()
        f = partial(mean, mask=ragged(), backend="reference")
        along = [normal(20 + i, *x.shape) for i, x in enumerate(given)]

        @jax.jit
        def derivatives(given, along, do):
            _, back = jax.vjp(f, *given)
            _, tangent = jax.jvp(f, tuple(given), tuple(along))
            once = jax.grad(lambda v: jnp.sum(f(*given[:2], v) ** 2))
            return back(do), tangent, jax.grad(lambda v: jnp.sum(once(v)))(given[2])

        sent, tangent, twice = derivatives(given, along, do)
        paired = sum(np.vdot(a, b) for a, b in zip(sent, along, strict=True))
        assert judge.same_function(np.vdot(do, tangent), paired).ok
        assert np.isfinite(twice).all()


@pytest.mark.nightly(but=["blockwise"])
@of_backends
def test_no_keys_and_no_queries(backend):
    q, k, v, _ = (x.astype(np.float32) for x in arrays())
    for mask in (FULL, CAUSAL, ~FULL):
        how = {"mask": mask, "backend": backend, "return_lse": True}
        call = jax.jit(partial(mean, **how))
        o, lse = call(q, k[:, :0], v[:, :0])
        assert not np.any(o) and np.isneginf(lse).all()
        assert call(q[:, :0], k, v)[0].shape == (B, 0, N, h)


RATES = with_nightly([0.0, 0.5], commit=[0.5])  # what drops holds all that the other holds


@pytest.mark.nightly
@pytest.mark.parametrize("rate", RATES)
def test_memory_is_linear_in_the_lengths(rate):
    length, dropout = 4096, Dropout(rate, jax.random.key(0)) if rate else None
    given = [jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)] * 3
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)

    def loss(q, k, v, lengths):
        mask = CAUSAL & ~Lengths(lengths)
        return jnp.sum(mean(q, k, v, mask=mask, dropout=dropout, backend="blockwise") ** 2)

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*given, lengths).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < length * length  # a byte a weight
