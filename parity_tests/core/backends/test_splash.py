"""Splash attention's adapter, interpreted on any machine, against the plain formula."""

from functools import partial

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
    Dense,
    Documents,
    Dropout,
    Lengths,
    MaskFn,
    Prefix,
    ScoreFn,
    Segments,
    Softcap,
    Window,
    attend,
    explain,
)
from flax_attn.backends import splash
from flax_attn.parity import judge
from flax_attn.rules import Rules, sizes_of
from flax_attn.where import assume_platform
from parity_tests.core.backends.flash import check_precision, normal, outcome
from parity_tests.core.backends.refusal import told
from parity_tests.tables import with_nightly

B, K = 2, 2
interpreted = partial(splash.forward, interpret=True)


def arrays(T, S, H, h=None, N=4, dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h or H)
    return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def words(length, *ends):
    """Ids of packed documents that end where it is said."""
    return np.searchsorted(np.asarray(ends), np.arange(length), side="right")


DOCUMENTS = Segments(q_ids=words(150, 40, 90), kv_ids=words(140, 40, 100))
SINKS = np.linspace(-1, 2, 4, dtype=np.float32)
EVERYTHING = "window, segments and lengths"
# Shapes T, S, H, h, N and rules; lengths of one block and of several, and no multiples of them.
COMPUTED = {
    "causal": ((520, 520, 64, 64, 2), Rules(CAUSAL)),
    "full, softcap and sinks": ((128, 100, 128, 128, 4), Rules(FULL, Softcap(2.0), sinks=SINKS)),
    EVERYTHING: (
        (150, 140, 192, 128, 4),
        Rules(
            Window(60, 20) & DOCUMENTS & Lengths(np.asarray([30, 120]), q=np.asarray([150, 70])),
            scale=0.2,
            sinks=SINKS,
        ),
    ),
    "documents after padding": (
        (150, 150, 64, 64, 4),
        Rules(
            CAUSAL
            & Documents(np.asarray([[40, 0, 90], [3, 60, 87]]))
            & ~Lengths(np.asarray([45, 2])),
            sinks=SINKS,
        ),
    ),
    "queries that see nothing": (
        (50, 60, 64, 48, 4),
        Rules(Causal(-9) & Prefix(40) | Causal(-20), Softcap(3.0)),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", with_nightly(COMPUTED, commit=["documents after padding", EVERYTHING])
)
def test_splash_equals_the_plain_formula(name):
    shape, rules = COMPUTED[name]
    given = arrays(*shape)
    bound = rules.bind(sizes_of(*given[:2]), shape[2])
    assert splash.unsupported_reason(*given, bound) is None
    check_precision(interpreted, *given, rules)


def test_masked_values_affect_no_output_or_gradient():
    q, k, v = arrays(50, 60, 64)
    rules = Rules(Lengths(np.asarray([40, 60]), q=np.asarray([50, 30])))

    clean = outcome(interpreted, q, k, v, rules)
    k, v = (x.at[0, 40:].set(jnp.nan) for x in (k, v))
    dirty = outcome(interpreted, q.at[1, 30:].set(jnp.inf), k, v, rules)
    assert all(judge.exact(a, b).ok for a, b in zip(clean, dirty, strict=True))


# What it refuses, on a TPU.

REFUSED = {
    "float16": (jnp.float16, {}, "needs float32 or bfloat16; q is float16"),
    "dropout": (jnp.float32, dict(dropout=Dropout(0.5, jax.random.key(0))), "has no dropout"),
    "bias": (jnp.float32, dict(score=Additive(np.zeros((9, 9)))), "got Additive"),
    "chain": (jnp.float32, dict(score=Softcap(2.0) >> Softcap(3.0)), "got Chain"),
    "function": (jnp.float32, dict(score=ScoreFn(lambda x, *at: x)), "got ScoreFn"),
    "cap": (jnp.float32, dict(score=Softcap(jnp.asarray(2.0))), "Softcap as a number"),
    "dense": (jnp.float32, dict(mask=Dense(np.ones((9, 9), bool))), "got Dense"),
    "mask function": (
        jnp.float32,
        dict(mask=CAUSAL & MaskFn(lambda b, n, q, k: q == k)),
        "got MaskFn",
    ),
    "or of segments": (jnp.float32, dict(mask=CAUSAL | Segments(np.arange(9))), "got Or"),
    "two segments": (
        jnp.float32,
        dict(mask=Segments(np.arange(9)) & Segments(np.arange(9) // 2)),
        "takes one Segments or Documents; combine their ids",
    ),
    "scattered": (jnp.float32, dict(mask=Causal(-1) & Chunked(3)), "some between"),
}


@pytest.mark.nightly(but=["cap", "chain", "float16", "scattered", "two segments"])
@pytest.mark.parametrize("name", REFUSED)
def test_splash_refuses_unsupported_requests_by_name(name):
    dtype, rules, text = REFUSED[name]
    given = arrays(9, 9, 8, dtype=dtype)
    with assume_platform("tpu"):
        found = next(v for v in explain(*given, **rules) if v.backend == "splash")
        assert text in str(found)
        with told(NotImplementedError, "'splash' cannot serve this request", text):
            attend(*given, backend="splash", **rules)


def test_a_checked_shard_map_is_refused_by_name():
    given = arrays(9, 9, 8)
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    f = partial(attend, backend="splash")
    how = {"mesh": mesh, "in_specs": (spec,) * 3, "out_specs": spec}
    with assume_platform("tpu"):
        with told(NotImplementedError, "needs check_vma=False in the shard_map around it"):
            jax.shard_map(f, **how)(*given)
        jax.eval_shape(jax.shard_map(f, check_vma=False, **how), *given)


def test_the_refusal_names_platform_and_version(monkeypatch):
    given = arrays(9, 9, 8)
    with told(NotImplementedError, "needs a TPU; the platform is cpu"):
        attend(*given, backend="splash")
    monkeypatch.setattr(splash, "REQUIRED_NAMES", ("gone",))
    with (
        assume_platform("tpu"),
        told(NotImplementedError, f"this version of jax, {jax.__version__}"),
    ):
        attend(*given, backend="splash")


@pytest.mark.nightly
def test_splash_lowers_for_a_tpu_without_one():
    given = [jnp.zeros((1, 300, 4, 64), jnp.bfloat16)] * 3

    def both(q, k, v):
        f = partial(attend, mask=CAUSAL, score=Softcap(30.0), sinks=SINKS, return_lse=True)
        out, back = jax.vjp(f, q, k, v)
        return out, *back(out)

    with assume_platform("tpu"):
        assert explain(*given, mask=CAUSAL).chosen == "splash"
        text = jax.jit(both).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3  # forward, dk and dv, dq
