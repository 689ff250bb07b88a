"""Faults of the backward pass: forward right, some cotangent wrong, in the first layer alone."""

import jax
import jax.numpy as jnp

from . import trial_flax as right
from .fault import A, Fault, part
from .setup import LOW, Setup
from .sizes import CAP, LAYER_EPS, RMS_EPS

G = "gradient"
FIRST = "layers.0."


def planted(name, wrong, at=FIRST, **setup):
    return part(name, wrong, at, **setup)


def stopped(name, argument):
    """A part whose argument of this number is taken for a constant."""
    good = getattr(right.RIGHT, name)

    def wrong(*args):
        stop = [jax.lax.stop_gradient(x) if i == argument else x for i, x in enumerate(args)]
        return good(*stop)

    return wrong


def arriving(name, argument, change):
    """A part behind which the gradient of one argument is changed."""
    good = getattr(right.RIGHT, name)

    @jax.custom_vjp
    def passes(x):
        return x

    passes.defvjp(lambda x: (x, None), lambda _, g: (change(g),))

    def wrong(*args):
        return good(*(passes(x) if i == argument else x for i, x in enumerate(args)))

    return wrong


def with_backward(good, backward):
    """`good(x)` with `backward(x, good(x), g)` for its gradient."""

    @jax.custom_vjp
    def f(x):
        return good(x)

    f.defvjp(lambda x: (good(x), x), lambda x, g: (backward(x, good(x), g),))
    return f


def _linear_transposed(x, kernel, bias):
    return arriving("linear", 1, lambda g: g.T)(x, kernel, bias)


def _rotate_forward(x, positions):
    """Cotangents are turned the way values are, not back."""
    turned = lambda y: right.rotate(y, positions)  # noqa: E731
    return with_backward(turned, lambda _, out, g: turned(g))(x)


def _constant_statistics(x, scale, bias):
    mean = jax.lax.stop_gradient(x.mean(-1, keepdims=True))
    var = jax.lax.stop_gradient(x.var(-1, keepdims=True))
    return (x - mean) * jax.lax.rsqrt(var + LAYER_EPS) * scale + bias


def _constant_root(x, scale):
    root = jax.lax.stop_gradient(jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + RMS_EPS))
    return x * root * scale


def _mean_gain(x, scale, bias):
    """The gain's gradient averaged over positions, not summed."""
    count = x.size // x.shape[-1]
    return arriving("layer_norm", 1, lambda g: g / count)(x, scale, bias)


def _first_of_group(x, times):
    """A repeated head gets the gradient of its first query head, not the sum."""

    @jax.custom_vjp
    def f(y):
        return right.repeat(y, times)

    f.defvjp(lambda y: (f(y), None), lambda _, g: (g[:, :, ::times],))
    return f(x)


def _rows_once(ids, table):
    """Of an id that occurs often only the first row's gradient counts."""
    flat = ids.ravel()
    first = (jnp.cumsum(flat[:, None] == jnp.arange(table.shape[0]), 0) == 1)[
        jnp.arange(flat.size), flat
    ].reshape(*ids.shape, 1)
    rows = table[ids]
    return jnp.where(first, rows, jax.lax.stop_gradient(rows))


def _without_sum(scores, weights, g):
    return weights * g


def _ungated(x, out, g):
    return jnp.where(x > 0, g, 0.0)


def _straight(out, weights):
    """What dropout gives, the gradient past it."""
    return weights + jax.lax.stop_gradient(out - weights)


def _dropout_straight(is_low):
    """One draw at either amplitude."""

    def drop(dropout, weights):
        out = dropout(weights)
        wrong = _straight(out, weights)
        return out + LOW * (wrong - out) if is_low else wrong

    return Setup(parts=((FIRST, "drop", drop),), options={"train": True})


softmax_without_sum = with_backward(right.softmax, _without_sum)
FAULTS = [
    Fault(
        "queries stopped",
        G,
        planted("product", stopped("product", 0)),
        f"{A}query",
        "stopped|times 0.9999",
    ),
    Fault(
        "keys stopped",
        G,
        planted("product", stopped("product", 1)),
        f"{A}key",
        "stopped|times 0.9999",
    ),
    Fault(
        "values stopped", G, planted("mix", stopped("mix", 1)), f"{A}value", "stopped|times 0.9999"
    ),
    Fault(
        "weights stopped",
        G,
        planted("mix", stopped("mix", 0)),
        f"{A}dropout",
        "stopped|times 0.9999",
    ),
    Fault(
        "gradient not scaled",
        G,
        planted("scale", arriving("scale", 0, lambda g: g * 10**0.5)),
        f"{A}query",
        "gradient times",
    ),
    Fault(
        "softmax's gradient less the sum", G, planted("softmax", softmax_without_sum), f"{A}scores"
    ),
    Fault(
        "softcap straight through",
        G,
        planted("softcap", lambda x: x + jax.lax.stop_gradient(CAP * jnp.tanh(x / CAP) - x)),
        f"{A}query",
    ),
    Fault(
        "queries' gradient turned forward", G, planted("rotate_q", _rotate_forward), f"{A}q_proj"
    ),
    Fault("key heads' gradient not summed", G, planted("repeat_k", _first_of_group), f"{A}k_proj"),
    Fault(
        "GELU's gradient that of ReLU",
        G,
        planted("act", with_backward(right.act, _ungated)),
        f"{FIRST}mlp.up",
    ),
    Fault(
        "LayerNorm's statistics constant", G, planted("layer_norm", _constant_statistics), "embed"
    ),
    Fault("RMSNorm's root constant", G, planted("rms_norm", _constant_root), "embed"),
    Fault("skip stopped", G, planted("skip1", stopped("skip1", 0)), "embed"),
    Fault(
        "bias of q_proj stopped",
        G,
        planted("linear", stopped("linear", 2), f"{A}q_proj."),
        f"{A}q_proj.bias",
        "stopped|times 0.9999",
    ),
    Fault(
        "kernel of o_proj stopped",
        G,
        planted("linear", stopped("linear", 1), f"{A}o_proj."),
        f"{A}o_proj.kernel",
        "stopped|times 0.9999",
    ),
    Fault(
        "kernel's gradient transposed",
        G,
        planted("linear", _linear_transposed, f"{A}v_proj.", pair="square"),
        f"{A}v_proj.kernel",
    ),
    Fault(
        "gain's gradient averaged",
        G,
        planted("layer_norm", _mean_gain),
        f"{FIRST}norm1.scale",
        "gradient times",
    ),
    Fault(
        "embedding's gradient once per id",
        G,
        planted("embed", _rows_once, ""),
        "embed.embedding",
    ),
    Fault(
        "gradient through float32",
        G,
        planted("merge", arriving("merge", 0, lambda g: g.astype(jnp.float32).astype(g.dtype))),
        f"{A}context",
        "float32",
    ),
    Fault(
        "dropout straight through",
        G,
        _dropout_straight,
        f"{A}weights",
    ),
]
