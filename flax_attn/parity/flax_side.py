"""Flax's side: the module merged afresh, run eagerly or under jit, every tap heard by its path."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from .. import taps
from .mapping import flax_params
from .run import Request, Run, counted, leaves, rounded


def run_flax(
    module: nnx.Module,
    call: Callable[..., Any],
    request: Request,
    weights: Mapping[str, np.ndarray],
    dtype: str,
    jit: bool,
) -> Run:
    """Runs a copy of `module` in `dtype` with these weights, eagerly or as one jitted function.

    At the highest matmul precision, and with JAX's standard promotion, since `nnx.LayerNorm` itself
    cannot run under the strict one.
    """
    with (
        jax.enable_x64(dtype == "float64"),
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision("highest"),
    ):
        inputs = {name: jnp.asarray(rounded(x, dtype)) for name, x in request.arrays().items()}
        floats = {k: v for k, v in inputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
        params = {path: jnp.asarray(rounded(x, dtype)) for path, x in weights.items()}
        params = params or _unique(module, dtype)
        forward = _forward(module, call, request, inputs, dtype)
        run = _with_gradients(forward, request, dtype) if request.grads else forward
        out = (jax.jit(run) if jit else run)(params, floats)
        named, (exact, heard, keeps), grads = out if request.grads else (*out, ({}, {}))
        gradients = {**{f"input {k}": v for k, v in grads[1].items()}, **grads[0]}
        found = (_numpy(x) for x in ({**named, **exact}, heard, gradients))
        return Run(*found, keeps=[np.asarray(keep) for keep in keeps])


def _forward(
    module: nnx.Module,
    call: Callable[..., Any],
    request: Request,
    inputs: Mapping[str, jax.Array],
    dtype: str,
) -> Callable[..., Any]:
    """A pure function of parameters and floating inputs: floating outputs, and all else beside."""
    graph, state = nnx.split(module)
    state = jax.tree.map(lambda x: _cast(x, dtype), state)

    def forward(params, floats):
        copy = nnx.merge(graph, state, copy=True)
        copy.train() if request.train else copy.eval()
        held = flax_params(copy)
        for path, value in params.items():
            held[path].set_value(value)
        args, kwargs = request.fill({**inputs, **floats})
        with _heard(copy) as heard:
            out = call(copy, *args, **kwargs)
        named = dict(leaves(out, lambda x: isinstance(x, jax.Array)))
        exact = {k: v for k, v in named.items() if not jnp.issubdtype(v.dtype, jnp.floating)}
        named = {k: v for k, v in named.items() if k not in exact}
        return named, (exact, heard.taps if request.taps else {}, heard.keeps)

    return forward


def _with_gradients(forward: Callable[..., Any], request: Request, dtype: str) -> Callable:
    """`forward`, and the gradients of parameters and inputs by the request's cotangents."""

    def run(params, floats):
        named, back, aux = jax.vjp(forward, params, floats, has_aux=True)
        cotangents = {
            name: jnp.asarray(rounded(request.cotangent(name, x.shape), dtype)).astype(x.dtype)
            for name, x in named.items()
        }
        # A barrier, or XLA spends seconds on folding large constants.
        return named, aux, back(jax.lax.optimization_barrier(cotangents))

    return run


def unique_params(module: nnx.Module) -> dict[str, str]:
    """Every Param path of a module, with the first path of the same Param."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(param), path) for path, param in flax_params(module).items()}


def _unique(module: nnx.Module, dtype: str) -> dict[str, jax.Array]:
    held = flax_params(module)
    return {
        path: _cast(held[path].get_value(), dtype)
        for path in dict.fromkeys(unique_params(module).values())
    }


def _cast(x: Any, dtype: str) -> Any:
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(rounded(np.asarray(x), dtype)) if floating else x


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in arrays.items()}


class _Heard:
    """Notes what is heard in the trace it was made in; inside a scan or a vmap there are no values
    that could be brought out, so nothing is noted there."""

    def __init__(self) -> None:
        self.trace = get_opaque_trace_state(convention="flax")
        self.taps: dict[str, jax.Array] = {}
        self.keeps: list[jax.Array] = []
        self.path: list[str] = []

    def here(self) -> bool:
        return self.trace == get_opaque_trace_state(convention="flax")

    def note(self, name: str, value: jax.Array) -> None:
        if self.here():
            self.taps[counted(self.taps, name)] = value

    def keep(self, value: jax.Array) -> None:
        if self.here():
            self.keeps.append(value)

    def tap(self, name: str, value: jax.Array) -> None:
        if name == "keep":
            self.keep(value)
        else:
            self.note(f"{self.path[-1]}.{name}" if self.path and self.path[-1] else name, value)


@contextmanager
def _heard(module: nnx.Module) -> Iterator[_Heard]:
    """Hears every submodule's output, every tap and every Bernoulli draw of `module` meanwhile."""
    heard = _Heard()
    paths = {id(part): ".".join(map(str, path)) for path, part in nnx.iter_modules(module)}
    kinds = {type(part) for _, part in nnx.iter_modules(module) if callable(part)}
    plain = {kind: kind.__dict__.get("__call__") for kind in kinds}

    def wrapped(original):
        def call(self, *args, **kwargs):
            path = paths.get(id(self))
            if path is None or (heard.path and heard.path[-1] == path):
                return original(self, *args, **kwargs)
            heard.path.append(path)
            try:
                out = original(self, *args, **kwargs)
            finally:
                heard.path.pop()
            if path:
                for name, x in leaves(out, lambda x: isinstance(x, jax.Array), path):
                    heard.note(name, x)
            return out

        return call

    try:
        for kind in kinds:
            kind.__call__ = wrapped(kind.__call__)
        with taps.listen(heard.tap), _draws_heard(heard):
            yield heard
    finally:
        for kind, own in plain.items():
            if own is None:
                del kind.__call__
            else:
                kind.__call__ = own


@contextmanager
def _draws_heard(heard: _Heard) -> Iterator[None]:
    """Notes every Bernoulli draw, which is how other people's dropout draws."""
    draw = jax.random.bernoulli

    def bernoulli(*args, **kwargs):
        keep = draw(*args, **kwargs)
        heard.keep(keep)
        return keep

    jax.random.bernoulli = bernoulli
    try:
        yield
    finally:
        jax.random.bernoulli = draw
