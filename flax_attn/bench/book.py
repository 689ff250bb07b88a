"""Competitors for a whole layer: nine torch implementations of one multi-head attention.

Raschka compares these nine in the bonus material of "Build a Large Language Model (From Scratch)",
2024, chapter 3. This library's layers, flax.nnx, equinox and jax.nn are added. All have biases in
all four projections, so that all compute the same function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import layers as flax_layers
from ..masks import CAUSAL
from ..weights.plan import Plan
from . import torch_layers
from .attention import Attention, plain
from .competitor import OWN_FAMILY, Competitor, always
from .program import JaxProgram, TorchProgram
from .task import FORWARD, Arrays, Task
from .weights import NOTEBOOK, PROJECTIONS, by_heads, combined, einsum, separate, wrapper

NEW = ("q_proj", "k_proj", "v_proj", "out_proj")
EQUINOX = ("query_proj", "key_proj", "value_proj", "output_proj")
Run = Callable[[Any], Any]  # maps weights by path, and x, to the output
Make = Callable[[Any], tuple[Run, Plan]]


@dataclass(frozen=True)
class Book(Attention):
    """A whole causal layer of width `heads * width`, with its four projections."""

    @property
    def table(self) -> str:
        return f"whole layer, width {self.features}, causal, {self.dtype}"

    @property
    def flops(self) -> int:
        projections = 4 * 2 * self.batch * self.length * self.features**2
        return super().flops + projections * (1 if self.which == FORWARD else 3)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return Task.shapes(self)

    def weight_arrays(self) -> Arrays:
        """A weight `(in, out)` and a bias of each projection."""
        D = self.features
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (D, D) for name in PROJECTIONS}
        return self.drawn({**shapes, **{f"{name}.bias": (D,) for name in PROJECTIONS}}, 0)

    def formula(self, inputs: Any, visible: jax.Array) -> jax.Array:
        """`out(attention(query(x), key(x), value(x)))` in the verified rows."""

        def project(name: str, x: jax.Array) -> jax.Array:
            y = x @ inputs[f"{name}.weight"]
            return y + jnp.broadcast_to(inputs[f"{name}.bias"], y.shape)

        def heads(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], self.heads, self.width)

        x, (query, key, value, out) = inputs["x"], PROJECTIONS
        q = heads(project(query, x[:, self.rows]))
        o = plain(q, heads(project(key, x)), heads(project(value, x)), visible, {})
        return project(out, o.reshape(*o.shape[:2], self.features))


def competitors(variant: str | None) -> list[Competitor]:
    """Returns every implementation, this library's first, or of these only `variant`."""
    mine = [_flax(name) for name in OWN if variant in (None, name)]
    return [*mine, *_other_jax(), *_torch()]


def _program(make: Make, task: Book) -> JaxProgram:
    """Program of a JAX layer `run(weights by path and x)`."""
    run, plan = make(task)
    return JaxProgram(run, task.which, plan.forward(task.weight_arrays()), plan)


def _module(build: Callable[[], nnx.Module], call: Callable = lambda layer, x: layer(x)) -> Run:
    """Converts an nnx module to a function of its weights by path and x."""
    module = build()
    module.eval()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    paths = [path for path, _ in nnx.to_flat_state(params)]

    def run(inputs: dict[str, Any]) -> Any:
        flat = [(path, inputs[".".join(map(str, path))]) for path in paths]
        return call(nnx.merge(graph, nnx.from_flat_state(flat), rest), inputs["x"])

    return run


def _book(name: str, plan_for: Callable[[Book], Plan]) -> tuple[str, Make]:
    """Returns the class name and the builder of a layer of the book."""

    def build(task: Book) -> nnx.Module:
        config = torch_layers.config(task)
        return getattr(flax_layers, name)(**config, rngs=nnx.Rngs(0), param_dtype=task.dtype)

    return name, lambda task: (_module(partial(build, task)), plan_for(task))


def _wrapper(task: Book) -> tuple[Run, Plan]:
    types = {"rngs": nnx.Rngs(0), "param_dtype": jnp.dtype(task.dtype)}
    config = {**torch_layers.config(task), "d_out": task.width}

    def build() -> nnx.Module:
        heads = flax_layers.MultiHeadAttentionWrapper(**config, **types)
        return nnx.Sequential(heads, nnx.Linear(task.features, task.features, **types))

    return _module(build), wrapper(task.heads, "layers.0", "layers.1", "kernel", False)


def _transformer(task: Book) -> tuple[Run, Plan]:
    kind = jnp.dtype(task.dtype)

    def build() -> nnx.Module:
        return flax_layers.TransformerMultiHeadAttention(
            task.features, task.heads, rngs=nnx.Rngs(0), param_dtype=kind
        )

    run = _module(build, lambda layer, x: layer(x, mask=CAUSAL))
    return run, separate(NEW, "kernel", False)


OWN: dict[str, tuple[str, Make]] = {
    "transformer_multi_head": ("TransformerMultiHeadAttention", _transformer),
    "multi_head": _book("MultiHeadAttention", lambda task: separate(NOTEBOOK, "kernel", False)),
    "multi_head_combined": _book(
        "MultiHeadAttentionCombined",
        lambda task: combined("qkv.kernel", "qkv.bias", "out_proj", "kernel", False),
    ),
    "multi_head_einsum": _book(
        "MultiHeadAttentionEinsum", lambda task: einsum("out_proj", "kernel", False)
    ),
    "multi_head_wrapper": ("MultiHeadAttentionWrapper", _wrapper),
}


def _flax(variant: str) -> Competitor:
    name, make = OWN[variant]
    return Competitor(f"{OWN_FAMILY}.{name}", OWN_FAMILY, partial(_program, make))


def _nnx(task: Book) -> tuple[Run, Plan]:
    def build() -> nnx.Module:
        kind = jnp.dtype(task.dtype)
        return nnx.MultiHeadAttention(
            task.heads, task.features, decode=False, param_dtype=kind, rngs=nnx.Rngs(0)
        )

    return _module(build, lambda layer, x: layer(x, is_causal=True)), by_heads(task.heads)


def _equinox(task: Book) -> tuple[Run, Plan]:
    equinox = import_module("equinox")
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    template = equinox.nn.MultiheadAttention(
        task.heads, task.features, **biases, dtype=jnp.dtype(task.dtype), key=jax.random.key(0)
    )
    past = jnp.tril(jnp.ones((task.length, task.length), bool))
    paths = [f"{name}.{kind}" for name in EQUINOX for kind in ("weight", "bias")]

    def leaves(layer: Any) -> list[Any]:
        return [getattr(getattr(layer, path.split(".")[0]), path.split(".")[1]) for path in paths]

    def run(inputs: dict[str, Any]) -> Any:
        layer = equinox.tree_at(leaves, template, [inputs[path] for path in paths])
        return jax.vmap(lambda one: layer(one, one, one, mask=past))(inputs["x"])

    return run, separate(EQUINOX, "weight", True)


def _jax_nn(task: Book) -> tuple[Run, Plan]:
    def run(inputs: dict[str, Any]) -> Any:
        def project(name: str, x: Any) -> Any:
            y = x @ inputs[f"{name}.kernel"]
            return y + jnp.broadcast_to(inputs[f"{name}.bias"], y.shape)

        x, heads = inputs["x"], (task.heads, task.width)
        q, k, v = (project(name, x).reshape(*x.shape[:2], *heads) for name in NEW[:3])
        o = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return project(NEW[3], o.reshape(x.shape))

    return run, separate(NEW, "kernel", False)


def _other_jax() -> list[Competitor]:
    return [
        Competitor("flax.nnx.MultiHeadAttention", "flax.nnx", partial(_program, _nnx)),
        Competitor("equinox.nn.MultiheadAttention", "equinox", partial(_program, _equinox)),
        Competitor("jax.nn.dot_product_attention", "jax.nn", partial(_program, _jax_nn)),
    ]


def _in_torch(
    build: Callable[[Book], Any], plan_for: Callable[[Book], Plan], task: Book
) -> TorchProgram:
    """Program of a torch module."""
    plan, weights = plan_for(task), task.weight_arrays()
    module = torch_layers.with_weights(build(task), plan.forward(weights), task.dtype)
    params = dict(module.named_parameters())
    return TorchProgram(lambda inputs: module(inputs["x"]), task.which, params, plan)


def _torch() -> list[Competitor]:
    competitors = []
    for number, (name, family, build, plan_for, num_arrays) in enumerate(
        torch_layers.BOOK_LAYERS, start=1
    ):
        refusal = torch_layers.no_backward_of_flex if "FlexAttention" in name else always
        program = partial(_in_torch, build, plan_for)
        competitors.append(
            Competitor(f"{number}. {name}", family, program, refusal, quadratic=num_arrays)
        )
    return competitors
