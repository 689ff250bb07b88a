"""Faults of rotary positions, norms, skips and the MLP."""

import jax
import jax.numpy as jnp

from . import trial_flax as right
from .fault import A, Fault, part
from .setup import Setup, mixed, one
from .sizes import BASE, LAYER_EPS

Q, K = f"{A}query", f"{A}key"


def both(wrong, low=mixed):
    """Another rotation of queries and of keys."""

    def plant(is_low: bool) -> Setup:
        put = low(right.rotate, wrong) if is_low else wrong
        return Setup(parts=(("", "rotate_q", put), ("", "rotate_k", put)))

    return plant


def _interleaved(x, positions):
    angle = right.angles(positions, x.shape[-1], x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    return jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(x.shape)


def speeds(speed):
    """Rotation with other speeds, given half the width and a dtype."""

    def rotate(x, positions):
        half = x.shape[-1] // 2
        return right.turn(x, positions[..., None].astype(x.dtype) * speed(half, x.dtype))

    return rotate


def angled(change):
    """Rotation with angles changed."""

    def rotate(x, positions):
        return right.turn(x, change(right.angles(positions, x.shape[-1], x.dtype)))

    return rotate


def _through(dtype):
    return angled(lambda angle: angle.astype(dtype).astype(angle.dtype))


def _half(x, positions):
    width = x.shape[-1] // 2 // 2 * 2
    return jnp.concatenate([right.rotate(x[..., :width], positions), x[..., width:]], axis=-1)


def _tables_interleaved(x, positions):
    """Speeds repeated as for interleaved pairs, halves turned all the same."""
    speed = BASE ** (-jnp.arange(0, x.shape[-1], 2, dtype=x.dtype) / x.shape[-1])
    angle = positions[..., None].astype(x.dtype) * jnp.repeat(speed, 2)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    x1, x2 = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-x2, x1], axis=-1) * sin


R = "rotary and norm"
ROTARY = [
    Fault("interleaved pairs", R, both(_interleaved), Q, "pairs of neighbours"),
    Fault(
        "speeds repeated for interleaved pairs",
        R,
        both(_tables_interleaved),
        Q,
        "tables of one pairing",
    ),
    Fault("turned backwards", R, both(angled(lambda a: -a)), Q, "the other way"),
    Fault(
        "a base of 500,000",
        R,
        both(speeds(lambda half, t: 5e5 ** (-jnp.arange(half, dtype=t) / half))),
        Q,
        "500000",
    ),
    Fault(
        "speeds by twice the exponent",
        R,
        both(speeds(lambda half, t: BASE ** (-2 * jnp.arange(half, dtype=t) / half))),
        Q,
        "twice the exponent",
    ),
    Fault("half the width turned", R, both(_half), Q),
    Fault("rotated twice", R, both(angled(lambda a: 2 * a)), Q, "rotated twice"),
    Fault("angles in float32", R, both(_through(jnp.float32), one), Q, "float32"),
    Fault("queries not rotated", R, part("rotate_q", lambda x, p: x), Q, "not rotated"),
    Fault("keys not rotated", R, part("rotate_k", lambda x, p: x), K, "not rotated"),
    Fault(
        "queries counted from zero",
        R,
        part("rotate_q", lambda x, p: right.rotate(x, p - p[0])),
        Q,
        "from zero",
    ),
    Fault(
        "values turned too",
        R,
        part(
            "repeat_v",
            lambda v, times: right.repeat(right.rotate(v, jnp.arange(v.shape[1])), times),
        ),
        f"{A}value",
        "values turned",
    ),
]


def layer_normed(wrong, at="layers."):
    return part("layer_norm", wrong, at)


def rms_normed(wrong):
    return part("rms_norm", wrong)


def _layer_norm(eps=LAYER_EPS, ddof=0, outside=False):
    def norm(x, scale, bias):
        centred, var = x - x.mean(-1, keepdims=True), x.var(-1, keepdims=True, ddof=ddof)
        root = jnp.sqrt(var) + eps if outside else jnp.sqrt(var + eps)
        return centred / root * scale + bias

    return norm


def _rms(eps):
    return lambda x, scale: x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def _uncentred(x, scale, bias):
    return _rms(LAYER_EPS)(x, scale) + bias


def _centred(x, scale):
    return right.rms_norm(x - x.mean(-1, keepdims=True), scale)


def _rms_narrow(x, scale):
    return right.rms_norm(x.astype(jnp.float32), scale.astype(jnp.float32)).astype(x.dtype)


N1, N2, ACT = "layers.0.norm1", "layers.0.norm2", "layers.0.mlp.act"
NORM = [
    Fault(
        "LayerNorm's eps 1e-6", R, layer_normed(_layer_norm(1e-6)), N1, "epsilon: 1e-06|epsilon: 0"
    ),
    Fault(
        "the last norm's eps 1e-6",
        R,
        layer_normed(_layer_norm(1e-6), "norm."),
        "norm",
        "epsilon: 1e-06|epsilon: 0",
    ),
    Fault(
        "LayerNorm's eps outside the root",
        R,
        layer_normed(_layer_norm(outside=True)),
        N1,
        "deviation",
    ),
    Fault("LayerNorm's variance by D - 1", R, layer_normed(_layer_norm(ddof=1)), N1, "n - 1"),
    Fault("LayerNorm without the mean", R, layer_normed(_uncentred), N1, "mean not taken off"),
    Fault("RMSNorm's eps 1e-5", R, rms_normed(_rms(1e-5)), N2, "epsilon: 1e-05"),
    Fault("RMSNorm less the mean", R, rms_normed(_centred), N2, "mean taken off"),
    Fault(
        "RMSNorm's gain plus one",
        R,
        rms_normed(lambda x, scale: right.rms_norm(x, 1 + scale)),
        N2,
        "gain",
    ),
    Fault("RMSNorm in float32", R, part("rms_norm", _rms_narrow, low=one), N2, "float32"),
    Fault(
        "the last norm missing", R, part("head_in", lambda x, y: x), "head", "its input is layers"
    ),
    Fault("no skip around attention", R, part("skip1", lambda x, y: y), N2, "embed not added"),
    Fault("MLP beside attention", R, part("norm2_in", lambda x, y: x), N2, "its input is embed"),
    Fault("no skip around the MLP", R, part("skip2", lambda x, y: y), "layers.0", "mlp.down alone"),
    Fault("GELU by tanh", R, part("act", jax.nn.gelu), ACT, "tanh"),
    Fault(
        "GELU by a sigmoid",
        R,
        part("act", lambda x: x * jax.nn.sigmoid(1.702 * x)),
        ACT,
        "sigmoid GELU",
    ),
    Fault("ReLU for GELU", R, part("act", jax.nn.relu), ACT, "ReLU"),
]
FAULTS = ROTARY + NORM
