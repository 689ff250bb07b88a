"""Hidden casts and dropped precision are found wherever they stand, by the line they stand in."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from flax_attn import parity
from flax_attn.parity.sides.jax.precision import casts, products

HERE = __file__.rpartition("/")[2]


def traced(f, *args, dtype="float64", asked="highest"):
    """The jaxpr of f on a random square, under the settings that the harness runs Flax with."""
    x = np.random.RandomState(5).standard_normal((4, 4)).astype(dtype)
    with (
        jax.enable_x64(dtype == "float64"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision(asked),
    ):
        return jax.make_jaxpr(f)(jnp.asarray(x), *args)


def line_of(f, text):
    """Where in this file `text` stands in f."""
    lines, start = inspect.getsourcelines(f)
    return start + next(i for i, line in enumerate(lines) if text in line)


def narrowed(x):
    return jnp.sin(x.astype(jnp.float32)) * 2  # the cast


def inner(x):
    y = jnp.cos(x)
    return narrowed(y) + 1


def scanned(x):
    return lax.scan(lambda carry, row: (carry, narrowed(row)), 0, x)


def chosen(x):
    return lax.cond(x[0, 0] > 0, narrowed, lambda x: jnp.zeros_like(x, jnp.float32), x)


def looped(x):
    return lax.while_loop(lambda c: c[0, 0] < 0, lambda c: narrowed(c).astype(c.dtype), x)


@jax.custom_vjp
def own_backward(x):
    return x * 2


def forward(x):
    return x * 2, None


def backward(_, g):
    return (g.astype(jnp.float32).astype(g.dtype),)


own_backward.defvjp(forward, backward)

WRAPPED = {
    "plain": inner,
    "jit": jax.jit(inner),
    "jit in jit": jax.jit(lambda x: jax.jit(inner)(x) + 1),
    "remat": jax.checkpoint(inner),
    "vmap": jax.vmap(inner),
    "scan": scanned,
    "cond": chosen,
    "while": looped,
    "gradient": jax.grad(lambda x: inner(x).sum()),
    "jvp": lambda x: jax.jvp(inner, (x,), (x,)),
    "nnx.jit": nnx.jit(inner),
}


@pytest.mark.parametrize("f", WRAPPED.values(), ids=WRAPPED)
def test_a_cast_is_found_anywhere_in_the_program(f):
    (found,) = casts(traced(f))
    line = line_of(narrowed, "# the cast")
    assert str(found) == f"{HERE}:{line} (narrowed) casts float64 to float32"
    assert (found.file, found.line) == (__file__, line)


def test_a_cast_in_a_backward_pass_alone_names_the_forward_call():
    def loss(x):
        return own_backward(x).sum()  # the call

    assert casts(traced(loss)) == []
    (found,) = casts(traced(jax.grad(loss)))
    assert found.line == line_of(loss, "# the call")
    assert found.what == "casts float64 to float32, in its backward pass"


def test_every_line_that_calls_the_same_jitted_function_is_named():
    def twice(x):
        y = jnp.matmul(x, x, precision="default")  # first
        z = jnp.matmul(x, x, precision="default")  # second
        return y + z

    lines = [found.line for found in products(traced(twice))]
    assert lines == [line_of(twice, "# first"), line_of(twice, "# second")]


CASTS = [
    (lambda x: x.astype(jnp.bfloat16), "float64", ["casts float64 to bfloat16"]),
    (lambda x: x.astype(jnp.complex64), "float64", ["casts float64 to complex64"]),
    (lambda x: x * jnp.arange(4).astype(jnp.float32)[None], "float64", ["casts int64 to float32"]),
    (lambda x: x * jnp.arange(4, dtype=jnp.float32)[None], "float64", ["counts in float32"]),
    (lambda x: lax.reduce_precision(x, 8, 7), "float64", ["rounds to 7 bits of mantissa"]),
    (lambda x: x.astype(jnp.float16), "float32", ["casts float32 to float16"]),
    (lambda x: x * (x > 0).astype(jnp.float32), "float64", []),
    (lambda x: x.astype(jnp.float32).astype(x.dtype), "bfloat16", []),
    (lambda x: x * jnp.arange(4, dtype=jnp.float32)[None], "float32", []),
    (lambda x: jax.nn.softmax(jnp.var(x, axis=0) * 0.1 + jnp.linspace(0, 1, 4)), "float64", []),
    (lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.3, (4, 4)), "float64", []),
]


@pytest.mark.parametrize(("f", "dtype", "said"), CASTS)
def test_only_casts_that_lose_digits_are_listed(f, dtype, said):
    assert [found.what for found in casts(traced(f, dtype=dtype))] == said


@pytest.mark.nightly
def test_a_cast_in_flax_names_the_line_that_called_it():
    with jax.enable_x64(True):
        attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=4, decode=False, rngs=nnx.Rngs(0), param_dtype=jnp.float64
        )
        said = [str(found) for found in casts(traced(lambda x: attention(x)))]
        inside = [str(found) for found in casts(traced(attention.__call__))]
    here = line_of(test_a_cast_in_flax_names_the_line_that_called_it, "lambda x: attention(x)")
    assert len(said) == len(inside) == 1
    assert said[0].startswith(f"{HERE}:{here} (")
    assert "casts float64 to float32, inside flax/nnx/nn/attention.py:" in said[0]
    assert inside[0].startswith("flax/nnx/nn/attention.py:")
    # As the harness calls it: its own lines are not the person's.
    scope = {}
    exec(
        compile("def call(module, x): return module(x)", parity.__path__[0] + "/a.py", "exec"),
        scope,
    )
    with jax.enable_x64(True):
        assert [str(f) for f in casts(traced(partial(scope["call"], attention)))] == inside


def dot(**options):
    return lambda x: lax.dot_general(x, x, (((1,), (0,)), ((), ())), **options)


def dot_twice(x):
    return jnp.matmul(x, jnp.cos(x), precision="default").sum()


def conv(x):
    return lax.conv_general_dilated(x[None], x[None], (1,), "SAME", precision="high")


PRODUCTS = [
    (lambda x: x @ x, "float64", ""),
    (partial(jnp.matmul, jnp.ones((4, 4), jnp.float32), precision="highest"), "float32", ""),
    (dot(precision="F32_F32_F32"), "float32", ""),
    (lambda x: jnp.matmul(jnp.arange(4), jnp.arange(4), precision="default"), "float32", ""),
    (jax.grad(lambda x: (x @ jnp.cos(x)).sum()), "float64", ""),
    (jax.grad(dot_twice), "float64", "(dot_general) at precision default"),
    (lambda x: jnp.convolve(x[0], x[1], precision="default"), "float32", "(conv_general_dil"),
    (lambda x: jnp.matmul(x, x, precision="default"), "float64", "(dot_general) at precision def"),
    (dot(precision=("highest", "high")), "float32", "(dot_general) at precision highest x high,"),
    (dot(precision="BF16_BF16_F32"), "float32", "(dot_general) by the algorithm BF16_BF16_F32,"),
    (dot(preferred_element_type=jnp.float32), "float64", "(dot_general) float64 into float32"),
    (conv, "float32", "(conv_general_dilated) at precision high, where highest is asked"),
    (
        lambda x: lax.ragged_dot(x, x[None], jnp.array([4]), precision="default"),
        "float32",
        "(ragged_dot_general) at precision default",
    ),
]


@pytest.mark.parametrize(("f", "dtype", "said"), PRODUCTS)
def test_products_below_the_asked_precision_are_found(f, dtype, said):
    found = products(traced(f, dtype=dtype))
    assert len(found) == bool(said)
    assert all(str(x).startswith(f"{HERE}:") and f" multiplies {said}" in str(x) for x in found)


def test_precision_is_judged_against_what_was_asked():
    jaxpr = traced(lambda x: jnp.matmul(x, x, precision="high"), dtype="float32")
    assert products(jaxpr, "high") == products(jaxpr, "default") == []
    assert len(products(jaxpr, "highest")) == len(products(jaxpr, "float32")) == 1
    (found,) = products(jax.make_jaxpr(dot())(jnp.ones((3, 3), jnp.float32)))
    assert "with no precision set, where highest is asked" in found.what
    with pytest.raises(ValueError, match=r"asked must be one of default, .*; got 'best'"):
        products(jaxpr, "best")


def test_casts_inside_jitted_functions_are_found():
    with jax.enable_x64(True):
        (found,) = casts(jax.jit(inner).trace(jnp.ones((4, 4))).jaxpr)
    assert found.function == "narrowed"
