"""Forward mode and second derivatives, below and above 128 x 128 weights.

From there on "auto" takes a backend with its own gradient: second derivatives by reverse mode first
are the plain formula's, and forward mode raises an error that says what serves it.
"""

import os
import subprocess
import sys
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_attn import (
    CAUSAL,
    Lengths,
    ScoreFn,
    Segments,
    Window,
    attend,
    attend_by_weights,
    dot_product_attention,
    explain,
    use_backend,
)
from flax_attn.parity import judge
from parity_tests.core.attend import words_of_jax
from parity_tests.core.backends.refusal import told
from parity_tests.tables import with_nightly

T, N, H = 130, 2, 3
X, U = (np.random.RandomState(i).standard_normal((T, N, H)) for i in range(2))
WAY_OUT = ("Forward mode", 'attend(..., backend="autodiff")', "attend_by_weights")


def causal(x):
    return attend(x, x, x, mask=CAUSAL)


def loss(x):
    return (causal(x) ** 2).sum()


FORWARD = {
    "jvp": lambda f, x, u: jax.jvp(f, (x,), (u,)),
    "jacfwd": lambda f, x, u: jax.jacfwd(f)(x),
    "of a vmap": lambda f, x, u: jax.jvp(jax.vmap(f), (x[None],), (u[None],)),
}
TWICE = {
    "forward over reverse": lambda x, u: jax.jvp(jax.grad(loss), (x,), (u,))[1],
    "reverse over reverse": lambda x, u: jax.grad(lambda x: (jax.grad(loss)(x) * u).sum())(x),
}


def test_the_error_messages_of_jax_that_are_parsed_are_unchanged():
    words_of_jax.check()


def test_the_sizes_select_the_blockwise_backend():
    assert explain(X, X, X).chosen == "blockwise"
    assert explain(X[:100], X[:100], X[:100]).chosen == "reference"


@pytest.mark.parametrize("name", FORWARD)
def test_forward_mode_names_the_backend_that_serves_it(name):
    x, u = jnp.asarray(X), jnp.asarray(U)
    for call in (causal, lambda x: dot_product_attention(x, x, x)):
        with told(TypeError, *WAY_OUT):
            FORWARD[name](call, x, u)


@pytest.mark.parametrize("name", FORWARD)
def test_the_backend_is_named_while_a_program_is_traced_too(name):
    x, u = jnp.asarray(X), jnp.asarray(U)
    with told(TypeError, *WAY_OUT):
        jax.jit(lambda x, u: FORWARD[name](causal, x, u))(x, u)


def test_second_derivatives_over_several_devices_name_what_has_them():
    code = """
import jax, jax.numpy as jnp
from flax_attn import attend
x = jnp.ones((130, 2, 3))
loss = lambda x: (attend(x, x, x) ** 2).sum()
jax.grad(lambda x: jax.grad(loss)(x).sum())(x)
"""
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, "-c", code], env=flags, capture_output=True, text=True)
    assert "NotImplementedError: Derivatives of derivatives" in run.stderr
    assert 'use_backend("autodiff")' in run.stderr


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_of_the_pallas_kernel_name_what_has_them(name):
    x, u = (jnp.asarray(x[:5], jnp.float32) for x in (X, U))
    with use_backend("pallas"), told(NotImplementedError, "Derivatives of", '"autodiff"'):
        jax.eval_shape(TWICE[name], x, u)


@pytest.mark.nightly
def test_each_suggested_way_to_forward_mode_works():
    """Eagerly by name, under jit by the context, "xla" of the drop-in, and by weights."""
    x, u = jnp.asarray(X), jnp.asarray(U)
    want = jax.jvp(lambda x: attend(x, x, x, backend="reference"), (x,), (u,))[1]

    def inside(x):
        with use_backend("autodiff"):
            return attend(x, x, x)

    _, by_context = jax.jit(lambda x, u: jax.jvp(inside, (x,), (u,)))(x, u)
    named = jax.jvp(lambda x: dot_product_attention(x, x, x, implementation="xla"), (x,), (u,))[1]
    by_weights = jax.jvp(lambda x: attend_by_weights(x, x, x), (x,), (u,))[1]
    for got in (by_context, named, by_weights):
        assert judge.allclose(np.asarray(got), np.asarray(want))


@cache
def by_the_plain_formula():
    """The Hessian times U, which is symmetric: both orders have this one truth."""
    with jax.enable_x64(True), use_backend("reference"):
        return np.asarray(jax.jit(TWICE["forward over reverse"])(jnp.asarray(X), jnp.asarray(U)))


@pytest.mark.nightly
@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_the_plain_formulas(name):
    with jax.enable_x64(True):
        got = jax.jit(TWICE[name])(jnp.asarray(X), jnp.asarray(U))
    verdict = judge.same_function(np.asarray(got), by_the_plain_formula())
    assert verdict.ok, verdict


SIZES = {  # B, T, N, K
    "little": (1, 130, 2, 1),
    "loops side by side": (1, 512, 4, 4),
    "many batch entries": (16, 256, 4, 2),
    "one loop": (1, 640, 4, 4),
    "1,024 tokens": (1, 1024, 4, 2),
    "many heads to a key head": (1, 200, 16, 1),
    "loops whose ends the mask says": (1, 2000, 2, 1),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SIZES)
def test_a_gradient_through_blocks_has_a_gradient(name, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    B, T, N, K = SIZES[name]
    q, k = (jax.ShapeDtypeStruct((B, T, n, 4), jnp.float32) for n in (N, K))

    def twice(q, k):
        loss = lambda q: attend(q, k, k, mask=CAUSAL, backend="blockwise").sum()  # noqa: E731
        return jax.grad(lambda q: (jax.grad(loss)(q) ** 2).sum())(q)

    assert jax.eval_shape(twice, q, k).shape == q.shape


SAME = {  # T, S, N, mask
    "many heads to a key head": (70, 70, 9, CAUSAL),
    "long": (1030, 1030, 1, Window(40, None)),
    "few queries": (2, 1100, 1, Lengths(jnp.asarray([5, 700]))),
    "documents": (1030, 1030, 1, Segments(np.arange(1030) // 400)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", with_nightly(SAME, commit=["many heads to a key head"]))
def test_the_gradient_of_a_gradient_is_the_plain_formulas(name):
    T, S, N, mask = SAME[name]

    def twice(backend: str):
        loss = lambda q, k: jnp.sin(attend(q, k, k, mask=mask, backend=backend)).sum()  # noqa: E731
        length = lambda *x: sum((y**2).sum() for y in jax.grad(loss, (0, 1))(*x))  # noqa: E731
        return jax.jit(jax.grad(length, (0, 1)))

    with jax.enable_x64(True):
        draw = np.random.RandomState(0).standard_normal
        q, k = (jnp.asarray(draw((2, n, heads, 3))) for n, heads in ((T, N), (S, 1)))
        for got, want in zip(twice("blockwise")(q, k), twice("reference")(q, k), strict=True):
            assert judge.same_function(np.asarray(got), np.asarray(want)).ok


@jax.custom_vjp
def halved(logits):
    return logits / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, d: (d / 2,))


@pytest.mark.nightly
def test_other_type_errors_are_left_as_they_are():
    """An error of the caller's score function, and one that has nothing to do with derivatives."""
    x, u = jnp.asarray(X[:5]), jnp.asarray(U[:5])
    score = ScoreFn(lambda logits, b, n, q, k: halved(logits))
    with pytest.raises(TypeError, match="custom_vjp function"):
        jax.jvp(lambda x: attend(x, x, x, score=score), (x,), (u,))

    def broken(logits, b, n, q, k):
        raise TypeError("mine")

    with pytest.raises(TypeError, match=r"^mine"):
        attend(x, x, x, score=ScoreFn(broken), backend="blockwise")
