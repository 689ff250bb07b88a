"""Competitors for a whole layer: nine torch implementations of one multi-head attention.

Raschka compares these nine in the bonus material of "Build a Large Language Model (From Scratch)",
2024, chapter 3. This library's layers, flax.nnx, equinox and jax.nn are added. All have biases in
all four projections, so that all compute the same function.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from .. import layers as flax_layers
from ..masks import CAUSAL
from ..weights.plan import Plan
from . import torch_layers
from .competitor import OWN_FAMILY, Competitor, always, lookup
from .program import JaxProgram, Program, TorchProgram
from .torch_layers import config
from .weights import NOTEBOOK, by_heads, combined, einsum, paths, separate, wrapper
from .workload import Workload

NEW = ("q_proj", "k_proj", "v_proj", "out_proj")
EQUINOX = ("query_proj", "key_proj", "value_proj", "output_proj")
Run = Callable[[Any, Any], Any]
Make = Callable[[Workload], tuple[Run, Plan]]


def book() -> list[Competitor]:
    """Returns every implementation, this library's first."""
    return [*map(_flax, OWN), *_other_jax(), *_torch()]


def _program(make: Make, w: Workload, which: str) -> JaxProgram:
    """Program of a JAX layer `run(weights by path, x)`."""
    run, plan = make(w)

    def pack(arrays: Any) -> Any:
        return plan.forward(arrays), arrays["x"]

    def unpack(grads: Any) -> Any:
        return {**plan.back(grads[0]), "x": grads[1]}

    return JaxProgram(lambda packed: run(*packed), pack, unpack, which)


def _module(build: Callable[[], nnx.Module], call: Callable = lambda layer, x: layer(x)) -> Run:
    """Converts an nnx module to a function of its weights by path and x."""
    module = build()
    module.eval()
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    paths = [path for path, _ in nnx.to_flat_state(params)]

    def run(weights: dict[str, Any], x: Any) -> Any:
        flat = [(path, weights[".".join(map(str, path))]) for path in paths]
        return call(nnx.merge(graph, nnx.from_flat_state(flat), rest), x)

    return run


def _book(name: str, plan_for: Callable[[Workload], Plan]) -> tuple[str, Make]:
    """Returns the class name and the builder of a layer of the book."""

    def build(w: Workload) -> nnx.Module:
        return getattr(flax_layers, name)(**config(w), rngs=nnx.Rngs(0), param_dtype=w.dtype)

    return name, lambda w: (_module(partial(build, w)), plan_for(w))


def _wrapper(w: Workload) -> tuple[Run, Plan]:
    types = {"rngs": nnx.Rngs(0), "param_dtype": jnp.dtype(w.dtype)}

    def build() -> nnx.Module:
        heads = flax_layers.MultiHeadAttentionWrapper(**{**config(w), "d_out": w.width}, **types)
        return nnx.Sequential(heads, nnx.Linear(w.features, w.features, **types))

    return _module(build), wrapper(w.heads, "layers.0", "layers.1", "kernel", False)


def _transformer(w: Workload) -> tuple[Run, Plan]:
    kind = jnp.dtype(w.dtype)

    def build() -> nnx.Module:
        return flax_layers.TransformerMultiHeadAttention(
            w.features, w.heads, rngs=nnx.Rngs(0), param_dtype=kind
        )

    run = _module(build, lambda layer, x: layer(x, mask=CAUSAL))
    return run, separate(NEW, "kernel", False)


OWN: dict[str, tuple[str, Make]] = {
    "transformer_multi_head": ("TransformerMultiHeadAttention", _transformer),
    "multi_head": _book("MultiHeadAttention", lambda w: separate(NOTEBOOK, "kernel", False)),
    "multi_head_combined": _book(
        "MultiHeadAttentionCombined",
        lambda w: combined("qkv.kernel", "qkv.bias", "out_proj", "kernel", False),
    ),
    "multi_head_einsum": _book(
        "MultiHeadAttentionEinsum", lambda w: einsum("out_proj", "kernel", False)
    ),
    "multi_head_wrapper": ("MultiHeadAttentionWrapper", _wrapper),
}


def _flax(variant: str) -> Competitor:
    name, make = OWN[variant]
    return Competitor(f"{OWN_FAMILY}.{name}", OWN_FAMILY, partial(_program, make))


def _nnx(w: Workload) -> tuple[Run, Plan]:
    def build() -> nnx.Module:
        kind = jnp.dtype(w.dtype)
        return nnx.MultiHeadAttention(
            w.heads, w.features, decode=False, param_dtype=kind, rngs=nnx.Rngs(0)
        )

    return _module(build, lambda layer, x: layer(x, is_causal=True)), by_heads(w.heads)


def _equinox(w: Workload) -> tuple[Run, Plan]:
    equinox = import_module("equinox")
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    template = equinox.nn.MultiheadAttention(
        w.heads, w.features, **biases, dtype=jnp.dtype(w.dtype), key=jax.random.key(0)
    )

    def run(weights: dict[str, Any], x: Any) -> Any:
        paths = list(weights)
        layer = equinox.tree_at(
            lambda m: [lookup(m, path) for path in paths], template, [weights[p] for p in paths]
        )
        return jax.vmap(lambda one: layer(one, one, one, mask=_causal_mask(w)))(x)

    return run, separate(EQUINOX, "weight", True)


def _jax_nn(w: Workload) -> tuple[Run, Plan]:
    def run(weights: dict[str, Any], x: Any) -> Any:
        def project(name: str, x: Any) -> Any:
            y = x @ weights[f"{name}.kernel"]
            return y + jnp.broadcast_to(weights[f"{name}.bias"], y.shape)

        q, k, v = (project(name, x).reshape(*x.shape[:2], w.heads, w.width) for name in NEW[:3])
        return project(
            NEW[3], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        )

    return run, separate(NEW, "kernel", False)


def _causal_mask(w: Workload) -> jax.Array:
    return jnp.tril(jnp.ones((w.length, w.length), bool))


def _other_jax() -> list[Competitor]:
    return [
        Competitor("flax.nnx.MultiHeadAttention", "flax.nnx", partial(_program, _nnx)),
        Competitor("equinox.nn.MultiheadAttention", "equinox", partial(_program, _equinox)),
        Competitor("jax.nn.dot_product_attention", "jax.nn", partial(_program, _jax_nn)),
    ]


def _in_torch(
    build: Callable[[Workload], Any], plan_for: Callable[[Workload], Plan], w: Workload, which: str
) -> Program:
    """Program of a torch module, rebuilt for each set of weights."""
    plan = plan_for(w)

    def pack(tensors: Any) -> Any:
        arrays = {name: np.asarray(x.float().cpu()) for name, x in tensors.items()}
        module = torch_layers.with_weights(build(w), plan.forward(arrays), tensors["x"])
        return module, tensors["x"]

    def leaves(packed: Any) -> list[Any]:
        named = dict(packed[0].named_parameters())
        return [packed[1], *(named[path] for path in paths(plan))]

    def unpack(grads: Any) -> Any:
        return {**plan.back(dict(zip(paths(plan), grads[1:], strict=True))), "x": grads[0]}

    return TorchProgram(lambda packed: packed[0](packed[1]), pack, leaves, unpack, which)


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
