"""Flax's side: the module merged afresh, run eagerly or under jit, every tap heard by its path."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from ... import taps
from ..mapping import flax_params, flax_state
from . import jaxpr_precision as precision
from .run import Request, Run, counted, leaves, one_or, rebuilt, rounded

# The name under which the anchors of replaced taps leave a run.
ANCHOR = "anchors"


class Force(NamedTuple):
    """What torch had at a tap, in Flax's shape: its value, and its gradient where it is known."""

    value: np.ndarray
    gradient: np.ndarray | None


class Flax:
    """A copy of a Flax module, ready to run with any weights, eagerly or as one jitted function.

    At the highest matmul precision, and with JAX's standard promotion, since `nnx.LayerNorm` itself
    cannot run under the strict one.

    Args:
      module, call, request: as `compare` got them.
      dtype: of weights and inputs.
      jit: whether it is one jitted function.
      force: taps whose computed value and arriving cotangent are noted and replaced by torch's.
    """

    def __init__(
        self,
        module: nnx.Module,
        call: Callable[..., Any],
        request: Request,
        dtype: str,
        jit: bool,
        force: Mapping[str, Force] | None = None,
    ):
        self.module, self.call, self.request = module, call, request
        self.dtype, self.jit, self.force = dtype, jit, dict(force or {})
        self.program: Callable[..., Any] | None = None
        self.findings: dict[str, list[str]] = {}

    def run(self, weights: Mapping[str, np.ndarray]) -> Run:
        """One forward and backward pass; without weights, with the module's own."""
        with (
            jax.enable_x64(self.dtype == "float64"),
            jax.numpy_dtype_promotion("standard"),
            jax.default_matmul_precision("highest"),
        ):
            arrays = self.request.arrays().items()
            inputs = {name: jnp.asarray(rounded(x, self.dtype)) for name, x in arrays}
            floats = {k: v for k, v in inputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
            probes = {k: jnp.zeros_like(f.value) for k, f in self.force.items()}
            held = {path: jnp.asarray(rounded(x, self.dtype)) for path, x in weights.items()}
            held = held or _unique(self.module, self.dtype)
            trained = unique_params(self.module)
            params = {k: v for k, v in held.items() if k in trained}
            rest = {k: v for k, v in held.items() if k not in params}
            program = self._program(inputs, params, floats, probes, rest)
            return self._noted(program(params, floats, probes, rest))

    def _program(self, inputs: Mapping[str, jax.Array], *args: Any) -> Callable[..., Any]:
        if self.program is None:
            run = self._forward(inputs)
            run = _with_gradients(run, self.request, self.dtype) if self.request.grads else run
            self.program = run
            if self.jit or not self.force:
                traced = jax.jit(run).trace(*args)
                self.findings = _findings(traced.jaxpr)
                self.program = traced.lower().compile() if self.jit else run
        return self.program

    def _forward(self, inputs: Mapping[str, jax.Array]) -> Callable[..., Any]:
        """A pure function of everything floating: floating outputs, and all else beside."""
        graph, state = nnx.split(self.module)
        state = jax.tree.map(lambda x: _cast(x, self.dtype), state)
        request = self.request

        def forward(params, floats, probes, rest):
            copy = nnx.merge(graph, state, copy=True)
            _unpin(copy)
            copy.train() if request.train else copy.eval()
            held = flax_state(copy)
            for path, value in (params | rest).items():
                held[path].set_value(value)
            args, kwargs = request.fill({**inputs, **floats})
            with _heard(copy, self.force, probes) as heard:
                out = self.call(copy, *args, **kwargs)
            named = dict(leaves(out, _is_array))
            exact = {k: v for k, v in named.items() if not jnp.issubdtype(v.dtype, jnp.floating)}
            named = {k: v for k, v in named.items() if k not in exact}
            named |= {ANCHOR: sum(heard.anchors)} if heard.anchors else {}
            after = {k: v.get_value() for k, v in flax_state(copy).items() if k not in params}
            noted = (heard.taps, heard.inputs) if request.taps else ({}, {})
            return named, (exact, *noted, heard.keeps, after)

        return forward

    def _noted(self, out: Any) -> Run:
        named, (exact, heard, inputs, keeps, after), grads = (
            out if self.request.grads else (*out, ({},) * 3)
        )
        named = {k: v for k, v in named.items() if k != ANCHOR}
        of_params, of_inputs, of_taps, *_ = grads
        return Run(
            outputs=_numpy({**named, **exact}),
            taps=_numpy(heard),
            inputs={name: tuple(map(np.asarray, xs)) for name, xs in inputs.items()},
            gradients=_numpy({**{f"input {k}": v for k, v in of_inputs.items()}, **of_params}),
            keeps=[np.asarray(keep) for keep in keeps],
            tap_gradients=_numpy(of_taps),
            state=_numpy(after),
            findings=self.findings,
        )


def _with_gradients(forward: Callable[..., Any], request: Request, dtype: str) -> Callable:
    """`forward`, and the gradients of all it takes by the request's cotangents."""

    def run(params, floats, probes, rest):
        def of(params, floats, probes):
            return forward(params, floats, probes, rest)

        named, back, aux = jax.vjp(of, params, floats, probes, has_aux=True)
        cotangents = {
            name: jnp.asarray(rounded(request.cotangent(name, x.shape), dtype)).astype(x.dtype)
            for name, x in named.items()
        }
        cotangents |= {ANCHOR: jnp.zeros_like(named[ANCHOR])} if ANCHOR in named else {}
        # A barrier, or XLA spends seconds on folding large constants.
        return named, aux, back(jax.lax.optimization_barrier(cotangents))

    return run


def _replaced(value: jax.Array, probe: jax.Array, force: Force) -> tuple[jax.Array, jax.Array]:
    """Torch's value, and an anchor: a zero that every output of the run depends on.

    Behind it torch's gradient goes on, and what arrived is the probe's. Without the anchor JAX
    would pass by a point where a gradient was stopped, and torch's would not go on.
    """

    @jax.custom_vjp
    def put(value, probe):
        return jnp.asarray(force.value, value.dtype), jnp.zeros((), value.dtype)

    def forward(value, probe):
        return put(value, probe), None

    def back(_, cotangents):
        cotangent, _ = cotangents
        known = force.gradient is not None
        own = jnp.asarray(force.gradient, cotangent.dtype) if known else cotangent
        return own, cotangent

    put.defvjp(forward, back)
    return put(value, probe)


def _findings(jaxpr: Any) -> dict[str, list[str]]:
    """Hidden casts, and products below the highest precision, as sentences."""
    return {
        "casts": [str(found) for found in precision.casts(jaxpr)],
        "products": [str(found) for found in precision.products(jaxpr)],
    }


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


def _unpin(module: nnx.Module) -> None:
    """Lets layers that fix the dtype of their parameters when they are built follow the run's."""
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Embed | nnx.SimpleCell) and part.dtype == part.param_dtype:
            part.dtype = None


def _cast(x: Any, dtype: str) -> Any:
    floating = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.asarray(rounded(np.asarray(x), dtype)) if floating else x


def _numpy(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in arrays.items()}


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


class _Heard:
    """Notes what is heard in the trace it was made in, and puts torch's values in its place; inside
    a scan or a vmap there are no values that could be brought out, so nothing is noted there."""

    def __init__(self, force: Mapping[str, Force], probes: Mapping[str, jax.Array]) -> None:
        self.trace = get_opaque_trace_state(convention="flax")
        self.force, self.probes = force, probes
        self.taps: dict[str, jax.Array] = {}
        self.inputs: dict[str, tuple[jax.Array, ...]] = {}
        self.keeps: list[jax.Array] = []
        self.anchors: list[jax.Array] = []
        self.path: list[str] = []

    def here(self) -> bool:
        return self.trace == get_opaque_trace_state(convention="flax")

    def note(
        self, name: str, value: jax.Array, inputs: tuple[jax.Array, ...] | None = None
    ) -> jax.Array:
        """Notes a tap and, of a submodule's output, what the call was given."""
        if not self.here():
            return value
        name = counted(self.taps, name)
        self.taps[name] = value
        if inputs is not None:
            self.inputs[name] = inputs
        force = self.force.get(name)
        if force is None or force.value.shape != value.shape:
            return value
        value, anchor = _replaced(value, self.probes[name], force)
        self.anchors.append(anchor)
        return value

    def keep(self, value: jax.Array) -> None:
        if self.here():
            self.keeps.append(value)

    def tap(self, name: str, value: jax.Array) -> jax.Array:
        if name != "keep":
            return self.note(
                f"{self.path[-1]}.{name}" if self.path and self.path[-1] else name, value
            )
        self.keep(value)
        return value


@contextmanager
def _heard(
    module: nnx.Module, force: Mapping[str, Force], probes: Mapping[str, jax.Array]
) -> Iterator[_Heard]:
    """Hears every submodule's output, every tap and every Bernoulli draw of `module` meanwhile."""
    heard = _Heard(force, probes)
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
            if not path:
                return out
            told = one_or(path, out, _is_array)
            given = tuple(x for _, x in leaves((*args, *kwargs.values()), _is_array))
            return rebuilt(out, _is_array, lambda name, x: heard.note(told(name), x, given), path)

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
