"""A grouped-query transformer, one step of it with a ring of keys and values, and a batch norm."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn import parity
from flax_attn.parity import draw
from flax_attn.parity.port import flax_values, set_flax
from flax_attn.parity.torch_module import describe, write
from flax_attn.taps import tap

from ...port import Port
from .. import wrong  # noqa: F401  for the texts that take the place of parts of this one
from . import transformer_torch
from .transformer_sizes import APART, BASE, CAP, LAYER_EPS, RATE, RMS_EPS, SQUARE, Sizes


def linear(x, kernel, bias):
    return x @ kernel + bias


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + LAYER_EPS) * scale + bias


def rms_norm(x, scale):
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + RMS_EPS) * scale


def split(y, heads):
    return y.reshape(*y.shape[:-1], heads, -1)  # B T N h


def turn(x, angle):
    """Halves of B T N h turned by angles of (B) T h/2."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angle)[..., None, :], jnp.sin(angle)[..., None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


def angles(positions, width, dtype, base=BASE):
    half = width // 2
    return positions[..., None].astype(dtype) * base ** (-jnp.arange(half, dtype=dtype) / half)


def rotate(x, positions):
    return turn(x, angles(positions, x.shape[-1], x.dtype))


def product(q, k):
    return jnp.einsum("btnh,bsnh->bnts", q, k)


def softcap(scores):
    return CAP * jnp.tanh(scores / CAP)


def slopes(heads, dtype):
    return 2.0 ** (-8.0 * jnp.arange(1, heads + 1, dtype=dtype) / heads)


def distance(z):
    return jnp.arange(z.M, z.S)[:, None] - jnp.arange(z.S)  # T S


def alibi(scores, z):
    return scores - slopes(z.N, scores.dtype)[:, None, None] * distance(z).astype(scores.dtype)


def mask(there, z):
    return (distance(z) >= 0) & there[:, None, None]  # B 1 T S


def hide(scores, visible):
    return jnp.where(visible, scores, -jnp.inf)


def softmax(scores):
    raised = jnp.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def mix(weights, v):
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def merge(y):
    return y.reshape(*y.shape[:-2], -1)


class Linear(nnx.Linear):
    def __call__(self, x):
        return linear(x, self.kernel[...], self.bias[...])


class LayerNorm(nnx.LayerNorm):
    def __call__(self, x):
        return layer_norm(x, self.scale[...], self.bias[...])


class RMSNorm(nnx.RMSNorm):
    def __call__(self, x):
        return rms_norm(x, self.scale[...])


class Embed(nnx.Embed):
    def __call__(self, ids):
        return self.embedding[...][ids]


class Projections(nnx.Module):
    """Of queries, keys, values and what is attended to."""

    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.z = z
        self.q_proj = Linear(z.D, z.N * z.h, rngs=rngs)
        self.k_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.v_proj = Linear(z.D, z.K * z.h, rngs=rngs)
        self.o_proj = Linear(z.N * z.h, z.D, rngs=rngs)


class Attention(Projections):
    def __init__(self, z: Sizes, number: int, rngs: nnx.Rngs):
        super().__init__(z, rngs)
        self.number = number
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x, memory, there):
        z = self.z
        all_keys = jnp.concatenate([memory, x], axis=1)  # B S D
        q, k, v = self.q_proj(x), self.k_proj(all_keys), self.v_proj(all_keys)
        q = split(q, z.N)  # B T N h
        k = split(k, z.K)  # B S K h
        v = split(v, z.K)  # B S K h
        rows, columns = jnp.arange(z.M, z.S), jnp.arange(z.S)
        q = tap("query", rotate(q, rows))
        k = rotate(k, columns)
        k = tap("key", jnp.repeat(k, z.G, axis=2))  # B S N h
        scores = product(q, k) / z.h**0.5  # B N T S
        scores = alibi(softcap(scores), z)
        scores = tap("scores", hide(scores, mask(there, z)))
        weights = tap("weights", softmax(scores))
        weights = self.dropout(weights)
        v = tap("value", jnp.repeat(v, z.G, axis=2))  # B S N h
        mixed = tap("context", mix(weights, v))  # B T N h
        return self.o_proj(merge(mixed))


class MLP(nnx.Module):
    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.up, self.down = Linear(z.D, z.F, rngs=rngs), Linear(z.F, z.D, rngs=rngs)

    def __call__(self, x):
        x = self.up(x)
        return self.down(tap("act", jax.nn.gelu(x, approximate=False)))


class Layer(nnx.Module):
    def __init__(self, z: Sizes, number: int, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(z.D, epsilon=LAYER_EPS, rngs=rngs)
        self.attn = Attention(z, number, rngs)
        self.norm2 = RMSNorm(z.D, epsilon=RMS_EPS, rngs=rngs)
        self.mlp = MLP(z, rngs)

    def __call__(self, x, memory, there):
        y = x + self.attn(self.norm1(x), memory, there)
        return y + self.mlp(self.norm2(y))


class Model(nnx.Module):
    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.embed = Embed(z.V, z.D, rngs=rngs)
        self.layers = nnx.List([Layer(z, number, rngs) for number in range(z.L)])
        self.norm = LayerNorm(z.D, epsilon=LAYER_EPS, rngs=rngs)
        self.head = Linear(z.D, z.V, rngs=rngs)

    def __call__(self, tokens, memory, there):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, memory, there)
        normed = self.norm(x)
        logits = self.head(normed)
        return {"logits": logits, "best": logits.argmax(-1)}


class Step(Projections):
    """One token that attends to a ring of S slots into which it first writes its key and value."""

    def __call__(self, x, cache_k, cache_v, before):
        z = self.z
        q = split(self.q_proj(x), z.N)  # B 1 N h
        k = split(self.k_proj(x), z.K)  # B 1 K h
        v = split(self.v_proj(x), z.K)  # B 1 K h
        q = tap("query", rotate(q, before[:, None]))
        k = rotate(k, before[:, None])
        slot = before % z.S
        here = (jnp.arange(z.S) == slot[:, None])[..., None, None]  # B S 1 1
        new_k, new_v = jnp.where(here, k, cache_k), jnp.where(here, v, cache_v)  # B S K h
        keys = tap("key", jnp.repeat(new_k, z.G, axis=2))  # B S N h
        written = jnp.arange(z.S) <= before[:, None]
        scores = tap("scores", hide(product(q, keys) / z.h**0.5, written[:, None, None]))  # B N 1 S
        values = tap("value", jnp.repeat(new_v, z.G, axis=2))  # B S N h
        context = tap("context", mix(tap("weights", softmax(scores)), values))
        out = self.o_proj(merge(context))
        return {"out": out, "cache_k": new_k, "cache_v": new_v, "before": before + 1}


class BatchNorm(nnx.BatchNorm):
    """With torch's running variance, which divides by n - 1; nnx's own divides by n."""

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        mean, var = self.mean[...], self.var[...]
        if not self.use_running_average:
            mean, var, n = x.mean(0), x.var(0), x.shape[0]
            self.mean[...] = 0.9 * self.mean[...] + 0.1 * mean
            self.var[...] = 0.9 * self.var[...] + 0.1 * var * n / (n - 1)
        return (x - mean) * jax.lax.rsqrt(var + self.epsilon) * self.scale[...] + self.bias[...]


class Statistics(nnx.Module):
    def __init__(self, z: Sizes, rngs: nnx.Rngs):
        self.norm = BatchNorm(z.D, momentum=0.9, epsilon=LAYER_EPS, rngs=rngs)
        self.out = Linear(z.D, z.V, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


@cache
def original(kind: str, z: Sizes) -> Any:
    """Torch's module with random weights."""
    transformer_torch.torch.manual_seed(0)
    module = getattr(transformer_torch, kind)(z)
    write(module, draw.parameters(0, describe(module)))
    return module.eval()


def edits(w: dict[str, np.ndarray], z: Sizes) -> Mapping[str, np.ndarray]:
    """What a converter makes of weights that are right, by path."""
    return dict(w)


def converted(z: Sizes, rngs: nnx.Rngs) -> nnx.Module:
    """The model with torch's weights and what a converter makes of them."""
    module = parity.port(original("Model", z), Model(z, rngs))
    weights = {path: x.astype(np.float64) for path, x in flax_values(module).items()}
    with jax.enable_x64(True):
        set_flax(module, edits(weights, z), np.float64)
    return module


AT_ONCE = {"grads": False, "weights": "given"}


def model(name: str, z: Sizes = APART, layers: int = 1, **options: Any) -> Port:
    """A port of the transformer, with one layer unless the fault needs two."""
    z = replace(z, L=layers)
    make: Callable[..., nnx.Module] = partial(Model, z)
    made = {**AT_ONCE, **options}
    return Port(name, partial(original, "Model", z), make, lambda seed: z.inputs(), (), made)


def carried(name: str, z: Sizes = APART, layers: int = 1) -> Port:
    """The same with weights as a converter has left them."""
    return replace(
        model(name, z, layers, weights="as_is"), mine=partial(converted, replace(z, L=layers))
    )


def vectors(seed: int) -> dict[str, np.ndarray]:
    return {"x": APART.inputs()["memory"][0]}


PORTS = [
    model("transformer"),
    model("square transformer", SQUARE),
    model("two layers", layers=2),
    model("transformer in training", train=True),
    model("two layers in training", layers=2, train=True),
    model("gradients", grads=True),
    model("square gradients", SQUARE, grads=True),
    model("gradients in training", grads=True, train=True),
    model("two layers of its weights", layers=2, weights="random"),
    carried("converter"),
    carried("square converter", SQUARE),
    carried("converter of two layers", layers=2),
    Port(
        "step",
        partial(original, "Step", APART),
        partial(Step, APART),
        lambda seed: APART.step_inputs(),
        (),
        AT_ONCE,
    ),
    Port(
        "batch norm",
        partial(original, "Statistics", APART),
        partial(Statistics, APART),
        vectors,
        (),
        {**AT_ONCE, "train": True},
    ),
]
