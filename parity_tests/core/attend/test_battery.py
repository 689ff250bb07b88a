"""Every backend with every argument equals the reference or refuses it by name.

On the machine at hand those that run are held against the reference; the kernels of other machines
are aimed at, where each knob is refused by name or traced, forward and backward.
"""

from functools import partial
from itertools import product

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
    DropoutMask,
    Lengths,
    MaskFn,
    Prefix,
    ScoreFn,
    Segments,
    Softcap,
    T5Bias,
    Window,
    attend,
    explain,
    reference,
)
from flax_attn.backends import BACKENDS, splash
from flax_attn.rules import Request, Rules, sizes_of
from flax_attn.where import assume_platform
from parity_tests.core.backends.flash import check_precision, normal
from parity_tests.tables import with_nightly

B, T, S, N, K, H, h = 2, 11, 13, 6, 3, 8, 16
MACHINES = {"cpu": ("cpu",), "a100": ("gpu", (8, 0)), "h200": ("gpu", (9, 0)), "tpu": ("tpu",)}


def drawn(*shape):
    return np.random.RandomState(3).rand(*shape) < 0.6


def f32(seed, *shape):
    return np.random.RandomState(seed).standard_normal(shape).astype(np.float32)


# Rules, and shapes where they are not T, S, N, K, H, h.
KNOBS = {
    "nothing": (Rules(), {}),
    "causal": (Rules(CAUSAL), {}),
    "causal from the end": (Rules(Causal("end")), {}),
    "queries that see nothing": (Rules(Causal(-3)), {}),
    "window": (Rules(Window(3, 2)), {}),
    "left window": (Rules(Window(3, 0)), {}),
    "chunks": (Rules(Chunked(4)), {}),
    "prefix": (Rules(CAUSAL | Prefix(5)), {}),
    "prefix of each": (Rules(Prefix(np.asarray([4, 9]))), {}),
    "lengths": (Rules(CAUSAL & Lengths(np.asarray([9, 4]), q=np.asarray([11, 7]))), {}),
    "segments": (Rules(CAUSAL & Segments(q_ids=np.arange(T) // 4, kv_ids=np.arange(S) // 5)), {}),
    "packed": (Rules(CAUSAL & Documents(np.asarray([[5, 0, 4], [1, 9, 3]]))), {"T": S}),
    "dense": (Rules(Dense(drawn(B, N, T, S))), {}),
    "mask function": (Rules(MaskFn(lambda b, n, q, k: (q + k + n) % 3 > 0)), {}),
    "not": (Rules(~Window(1, 2)), {}),
    "softcap": (Rules(score=Softcap(1.5)), {}),
    "softcap by an array": (Rules(score=Softcap(np.asarray(1.5, np.float32))), {}),
    "alibi": (Rules(score=Alibi(f32(4, N))), {}),
    "t5": (Rules(score=T5Bias(f32(6, 8, N), buckets=8, max_distance=9)), {}),
    "bias": (Rules(score=Additive(f32(5, N, T, S))), {}),
    "bias of few axes": (Rules(score=Additive(f32(5, B, 1, 1, S)) >> Softcap(2.0)), {}),
    "score function": (Rules(score=ScoreFn(lambda x, b, n, q, k: jnp.where(k % 2, x, x / 2))), {}),
    "scale": (Rules(scale=0.3), {}),
    "scale by an array": (Rules(scale=np.asarray(0.3, np.float32)), {}),
    "sinks": (Rules(sinks=f32(7, N)), {}),
    "dropout": (Rules(dropout=Dropout(0.4, jax.random.key(1))), {}),
    "keep": (Rules(dropout=DropoutMask(drawn(N, T, S), 0.4)), {}),
    "one key head": (Rules(CAUSAL), {"K": 1}),
    "as many key heads": (Rules(CAUSAL), {"K": N}),
    "values as wide": (Rules(CAUSAL), {"h": H}),
    "odd widths": (Rules(CAUSAL), {"H": 5, "h": 3}),
    "one query": (Rules(Causal("end")), {"T": 1}),
    "one key": (Rules(CAUSAL), {"S": 1}),
}


def arrays(dtype, T=T, S=S, K=K, H=H, h=h):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    return [normal(i, *shape).astype(dtype) for i, shape in enumerate(shapes)]


def by(backend):
    """`attend` as a backend's forward."""

    def forward(q, k, v, rules):
        how = {name: getattr(rules, name) for name in ("mask", "score", "scale", "sinks")}
        how |= {"dropout": rules.dropout, "backend": backend, "return_lse": True}
        o, lse = attend(q, k, v, **how)
        return o, jnp.swapaxes(lse, 1, 2)

    return forward


def verdict(name, q, k, v, rules):
    ask = BACKENDS[name].refusal
    return ask and ask(Request.of(q, k, v, rules), rules.bind(sizes_of(q, k), q.shape[-1]))


OURS = ("blockwise", "autodiff")


# The kernels of other machines.


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "dtype", "machine"),
    with_nightly(
        product(sorted({*BACKENDS} - {*OURS, "reference"}), [jnp.bfloat16, jnp.float32], MACHINES),
        commit=5,
    ),
)
def test_every_knob_is_refused_by_name_or_traced(name, dtype, machine):
    traced = []
    for knob, (rules, shape) in KNOBS.items():
        given = arrays(dtype, **shape)
        with assume_platform(*MACHINES[machine]):
            reason = verdict(name, *given, rules)
            run = partial(jax.eval_shape, partial(outline, by(name)), *given, rules)
            if reason is None:
                shapes = run()
                assert [x.shape for x in shapes[2:]] == [x.shape for x in given]
                assert (shapes[0].dtype, shapes[1].dtype) == (dtype, jnp.float32)
                traced.append(knob)
            else:
                with pytest.raises(NotImplementedError, match=f"backend '{name}' cannot serve"):
                    run()
    assert traced == SERVED.get((name, machine, jnp.dtype(dtype).name), [])


def outline(forward, q, k, v, rules):
    out, back = jax.vjp(lambda q, k, v: forward(q, k, v, rules), q, k, v)
    return *out, *back(out)


CUDNN = ["values as wide"]
STATIC = [
    *("nothing", "causal", "causal from the end", "queries that see nothing", "window"),
    *("left window", "chunks", "prefix", "prefix of each", "lengths", "segments", "packed", "not"),
    *("softcap", "scale", "scale by an array", "sinks", "one key head", "as many key heads"),
    *("values as wide", "odd widths", "one query", "one key"),
]
SERVED = {
    ("cudnn", "a100", "bfloat16"): CUDNN,
    ("cudnn", "h200", "bfloat16"): CUDNN,
    ("splash", "tpu", "bfloat16"): STATIC,
    ("splash", "tpu", "float32"): STATIC,
    # Every knob there is, on a CPU interpreted.
    **{
        ("pallas", machine, dtype): [*KNOBS]
        for machine, dtype in product(["cpu", "a100", "h200"], ["bfloat16", "float32"])
    },
}


SPLASH = ["segments", "one query", "scale by an array"]


@pytest.mark.parametrize("knob", with_nightly(SPLASH, commit=["segments", "scale by an array"]))
def test_splash_as_interpreted_is_the_reference(knob):
    rules, shape = KNOBS[knob]
    interpreted = partial(splash.forward, interpret=True)
    check_precision(interpreted, *arrays(jnp.float32, **shape), rules, (True, False))


@pytest.mark.nightly
def test_explain_lists_all_backends():
    assert [found.backend for found in explain(*arrays(jnp.float32), mask=FULL)] == [*BACKENDS]
    assert reference.attention is BACKENDS["reference"].attention
