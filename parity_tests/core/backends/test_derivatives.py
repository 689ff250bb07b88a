"""Derivatives of every kind through backend "autodiff": those of the plain formula.

Forward, reverse and both orders of both, of the output and the log-sum-exp, by all that is learnt:
queries, keys, values, a bias, sinks, the scale, parameters of a score. Gradients of `.sum()` hide
faults, so cotangents and directions are random.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Causal,
    Softcap,
    Window,
    attend,
)
from flax_attn.backends.blockwise import autodiff
from flax_attn.parity import judge
from parity_tests.requests import runs
from parity_tests.requests.backends import rules_of
from parity_tests.requests.programs import program, request
from parity_tests.tables import with_nightly

H, h = 3, 2


class Sizes(NamedTuple):
    """Batch entries, queries, keys, heads and key heads."""

    B: int
    T: int
    S: int
    N: int
    K: int


LONG = {"1,500": Sizes(1, 1500, 1400, 2, 1), "4,096": Sizes(1, 4096, 4096, 1, 1)}
RULES = {  # of long sequences: what is learnt besides q, k and v, and the shapes of that
    "causal": (lambda _: {"mask": Causal("end")}, {}),
    "a window and a softcap": (lambda _: {"mask": Window(40, 3), "score": Softcap(2.0)}, {}),
    "sinks and a scale": (
        lambda x: {"mask": CAUSAL, "sinks": x["sinks"], "scale": x["scale"]},
        {"sinks": "N", "scale": ()},
    ),
}


def draw(more, sizes):
    """What is learnt, a direction of it, and cotangents of the output and the lse."""
    normal, (B, T, S, N, K) = np.random.RandomState(0).standard_normal, sizes
    more = {name: (N,) if shape == "N" else shape for name, shape in more.items()}
    shapes = {"q": (B, T, N, H), "k": (B, S, K, H), "v": (B, S, K, h), **more}
    at, along = ({name: jnp.asarray(normal(n)) for name, n in shapes.items()} for _ in range(2))
    return at, along, (jnp.asarray(normal((B, T, N, h))), jnp.asarray(normal((B, T, N))))


def outputs(rules, backend, at):
    o, lse = attend(at["q"], at["k"], at["v"], backend=backend, return_lse=True, **rules(at))
    return o, jnp.where(jnp.isfinite(lse), lse, 0)  # -inf in an empty row is no number to add up


def loss(f, cotangents, at):
    """Of curvature, so that second derivatives show every part."""
    return sum((c * jnp.sin(y)).sum() for c, y in zip(cotangents, f(at), strict=True))


def inner(a, b):
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: (x * y).sum(), a, b)))


def along_line(f, at, u):
    """By a number alone: the way from `at` along `u`."""
    line = lambda s: jax.tree.map(lambda x, d: x + s * d, at, u)  # noqa: E731
    return jax.jacfwd(lambda s: f(line(s)))(jnp.asarray(0.3))


def changes(f, c, at, u):
    """The loss of a derivative along `u`, as a step of MeanFlow has it."""
    return loss(lambda x: jax.jvp(f, (x,), (u,))[1], c, at)


def of_many(f, c, at, u):
    both = jax.tree.map(lambda x: jnp.stack([x, 2 - x]), u)
    return jax.vmap(lambda u: jax.grad(lambda x: changes(f, c, x, u))(at))(both)


KINDS = {
    "gradient": lambda f, c, at, u: jax.grad(partial(loss, f, c))(at),
    "jvp": lambda f, c, at, u: jax.jvp(f, (at,), (u,)),
    "jacfwd": lambda f, c, at, u: along_line(f, at, u),
    "linearize": lambda f, c, at, u: jax.linearize(f, at)[1](u),
    "jvp of jvp": lambda f, c, at, u: jax.jvp(
        lambda x: jax.jvp(f, (x,), (u,))[1], (at,), (jax.tree.map(jnp.cos, u),)
    )[1],
    "jvp of grad": lambda f, c, at, u: jax.jvp(jax.grad(partial(loss, f, c)), (at,), (u,))[1],
    "grad of jvp": lambda f, c, at, u: jax.grad(lambda x: changes(f, c, x, u))(at),
    "grad of grad": lambda f, c, at, u: jax.grad(
        lambda x: inner(jax.grad(partial(loss, f, c))(x), u)
    )(at),
    "vmap of grad of jvp": of_many,
}


def derivative(kind, rules, backend):
    f = partial(outputs, rules, backend)
    return jax.jit(lambda at, u, c: KINDS[kind](f, c, at, u))


def same(pair, what):
    got, want = ([np.asarray(x) for x in jax.tree.leaves(leaves)] for leaves in pair)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        verdict = judge.same_function(a, b, judge.gradient_scale(want, b), zero=True)
        assert verdict.ok, (what, i, verdict)


def is_little(seed):
    drawn = program(seed)
    if drawn.dtype != "float64" or drawn.is_long:
        return False
    # Of one key all derivatives by scores are zero, and what is left of them is rounding.
    return (request(drawn, 0).truth.seen.sum(axis=-1) > 1).any()


SEEDS = [seed for seed in range(7000, 7060) if is_little(seed)]
EVERY = [(seed, kind) for i, seed in enumerate(SEEDS) for kind in [*KINDS][i % 3 :: 3]]


@pytest.mark.parametrize("seed, kind", with_nightly(EVERY, commit=EVERY[: len(KINDS)]))
def test_a_derivative_of_a_random_program_is_the_plain_formulas(seed, kind, monkeypatch):
    monkeypatch.setattr(autodiff, "CPU_PAIRS", (16, 12))  # so that both lengths are several blocks
    drawn = program(seed)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        asked, normal = request(drawn, 0), np.random.RandomState(seed).standard_normal
        along = jax.tree.map(lambda x: jnp.asarray(normal(np.shape(x))), asked.floats)

        def through(backend):
            def f(floats):
                fixed = asked.data["mask"] if drawn.fixed else None
                rules = rules_of(drawn, floats, asked.data, fixed)
                parts = {x: getattr(rules, x) for x in ("mask", "score", "scale", "sinks")}
                return outputs(lambda _: {**parts, "dropout": rules.dropout}, backend, floats)

            cotangents = jnp.asarray(asked.do), jnp.asarray(asked.dlse)
            return jax.jit(lambda x: KINDS[kind](f, cotangents, x, along))(asked.floats)

        same((through("autodiff"), through("reference")), (seed, kind))


@pytest.mark.nightly
@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["jvp", "jvp of grad", "grad of jvp", "grad of grad"])
def test_a_derivative_of_long_sequences_is_the_plain_formulas(length, rule, kind):
    rules, more = RULES[rule]
    with jax.enable_x64(True):
        given = draw(more, LONG[length])
        pair = [derivative(kind, rules, by)(*given) for by in ("autodiff", "reference")]
    same(pair, kind)


# Memory.


def temporary_bytes(kind, tokens, mask):
    """What a program of one head of width 64 needs besides its arguments and results."""
    x, rules = jax.ShapeDtypeStruct((tokens, 1, 64), jnp.float32), lambda _: {"mask": mask}
    c = x, jax.ShapeDtypeStruct((tokens, 1), jnp.float32)
    at = dict.fromkeys("qkv", x)
    program = derivative(kind, rules, "autodiff").lower(at, at, c).compile()
    return program.memory_analysis().temp_size_in_bytes


LINEAR = [kind for kind in KINDS if kind not in ("jacfwd", "linearize", "vmap of grad of jvp")]


@pytest.mark.parametrize(
    "kind, mask",
    with_nightly(
        [(kind, mask) for kind in LINEAR for mask in (CAUSAL, Window(500, 500))],
        commit=[("jvp", CAUSAL), ("grad of jvp", CAUSAL)],
    ),
)
def test_memory_grows_as_the_tokens(kind, mask):
    few, many = (temporary_bytes(kind, tokens, mask) for tokens in (2048, 4096))
    assert many <= 2.2 * few


@pytest.mark.nightly
def test_the_gradient_of_a_jvp_of_16384_tokens_needs_less_than_two_gigabytes():
    assert temporary_bytes("grad of jvp", 16384, CAUSAL) < 2e9


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(7100, 7140))
def test_a_random_program_is_the_oracle(seed, monkeypatch):
    monkeypatch.setattr(runs, "BACKENDS", ("autodiff",))
    outcome = runs.run(seed, requests=3)
    assert not outcome.faults, outcome.faults
