"""`empty="mean"` in programs: none where no row is empty, batch axes, transformations, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from flax_attn import (
    CAUSAL,
    FULL,
    Additive,
    Causal,
    Chunked,
    Dropout,
    Lengths,
    MaskFn,
    ScoreFn,
    Softcap,
    Window,
    attend,
)
from flax_attn.parity import judge
from parity_tests.core.attend.test_empty_mean import (
    BACKENDS,
    B,
    H,
    K,
    N,
    T,
    arrays,
    check,
    compiled,
    h,
    mean,
    of_backends,
    of_ragged,
    outcome,
    ragged,
    run,
)
from parity_tests.core.drawing import normal
from parity_tests.tables import with_nightly

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
def test_batch_axes_and_vmap():
    with jax.enable_x64(True):
        given, mask = arrays(), ragged()
        program = compiled(mean)
        want = run(program, *given, normal(9, B, T, N), mask)
        for i in range(B):
            one = run(program, *(x[i] for x in given), normal(9, B, T, N)[i], mask[i])
            check(one, [x[i] for x in want])
        lead = [x[:, None] for x in given]
        lead = run(program, *lead, normal(9, B, 1, T, N), mask[:, None])
        check([x[:, 0] for x in lead], want)
        for backend in BACKENDS:
            mapped = jax.jit(
                jax.vmap(lambda q, k, v, mask, to=backend: mean(q, k, v, mask=mask, backend=to))
            )
            assert judge.same_function(mapped(*given[:3], mask), want[0]).ok


@pytest.mark.nightly
@of_backends
def test_under_remat_and_scan(backend):
    with jax.enable_x64(True):
        given, mask = arrays(), ragged()
        want = run(of_ragged("reference"), *given)

        def one(carry, _):
            f = jax.checkpoint(partial(mean, mask=mask, backend=backend, return_lse=True))
            return carry, f(*carry)

        def f(q, k, v, return_lse):
            o, lse = jax.lax.scan(one, (q, k, v), None, length=1)[1]
            return o[0], lse[0]

        check(outcome(f, *given), want)


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


@pytest.mark.nightly
def test_inside_a_shard_map_of_the_callers():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    with jax.enable_x64(True):
        *given, _ = arrays()
        want = jax.jit(partial(mean, mask=ragged()))(*given)
        for backend in BACKENDS:
            f = jax.shard_map(
                lambda q, k, v, mask, to=backend: mean(q, k, v, mask=mask, backend=to),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
            )
            assert judge.same_function(jax.jit(f)(*given, ragged()), want).ok


@pytest.mark.nightly
def test_open_sizes():
    with jax.enable_x64(True):
        b, t = export.symbolic_shape("b, t")
        q, kv = (jax.ShapeDtypeStruct((b, t, n, H), jnp.float64) for n in (N, K))
        f = jax.jit(lambda q, k, v: mean(q, k, v, mask=Causal(-1)))
        program = export.export(f)(q, kv, kv)
        for size in (5, 6):
            q, k, _, _ = arrays(T=size, S=size)
            verdict = judge.same_function(program.call(q, k, k), f(q, k, k))
            assert verdict.ok and np.any(f(q, k, k)[:, 0])


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
