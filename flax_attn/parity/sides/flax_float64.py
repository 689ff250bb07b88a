"""Keeps a Flax run in float64 where `jax.nn.dot_product_attention` casts to float32.

It always computes its softmax in float32, as does `nnx.MultiHeadAttention`, which calls it, so no
port that uses them can agree with a float64 reference to better than 5e-8. Lifted, as torch's casts
are, it computes the same function in float64. Its jaxpr is evaluated operation by operation; casts
of float64 to float32 are skipped, and all that follows stays in float64.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

NAME = "dot_product_attention"
NOTE = (
    "jax.nn.dot_product_attention of Flax computes its softmax in float32: lifted to float64 "
    "(flax_attn.flax_attention, as attention_fn=, keeps the dtype of its inputs)"
)
# Primitives that only wrap a jaxpr, which is evaluated instead.
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


@contextmanager
def attention_lifted(notes: dict[str, None], files: Iterable[str] = ()) -> Iterator[None]:
    """Keeps `jax.nn.dot_product_attention` in float64 for float64 queries inside the block.

    Args:
      notes: receives a sentence when that happens.
      files: names of modules that may have imported it under another name.
    """
    original = jax.nn.dot_product_attention

    def wide(query: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(query, "dtype", None) != jnp.float64:
            return original(query, *args, **kwargs)
        notes[NOTE] = None
        return _computed(original, (query, *args), kwargs)

    # `from jax.nn import ...` binds the function in other modules, which need the patch too.
    modules = {name: vars(m) for name, m in sys.modules.items() if m is not None}
    names = [(space, NAME) for space in modules.values() if space.get(NAME) is original]
    names += [
        (space, name)
        for space in (modules.get(file, {}) for file in files)
        for name, x in space.items()
        if x is original and name != NAME
    ]
    for space, name in names:
        space[name] = wide
    try:
        yield
    finally:
        for space, name in names:
            space[name] = original


def _computed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping) -> Any:
    """Evaluates a function without its casts from float64 to float32."""
    flat, tree = jax.tree.flatten((args, dict(kwargs)))
    places = [i for i, x in enumerate(flat) if hasattr(x, "dtype") and hasattr(x, "shape")]

    def of(*arrays: Any) -> Any:
        filled = dict(zip(places, arrays, strict=True))
        args, kwargs = tree.unflatten([filled.get(i, x) for i, x in enumerate(flat)])
        return function(*args, **kwargs)

    arrays = [flat[i] for i in places]
    program, shapes = jax.make_jaxpr(of, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), _evaluated(program, arrays))


def _evaluated(program: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
    known = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
    known |= dict(zip(program.jaxpr.invars, arrays, strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else known[x]

    for equation in program.jaxpr.eqns:
        outs = _operation(equation, list(map(value, equation.invars)))
        known |= dict(zip(equation.outvars, outs, strict=True))
    return list(map(value, program.jaxpr.outvars))


def _operation(equation: Any, values: list[Any]) -> list[Any]:
    """Evaluates one equation, in float64 if one of its inputs was lifted."""
    primitive, params = equation.primitive, equation.params
    if primitive.name in CALLS:
        inner = next(x for x in params.values() if isinstance(x, ClosedJaxpr))
        return _evaluated(inner, values)
    if primitive.name == "convert_element_type" and values[0].dtype == jnp.float64:
        if params["new_dtype"] in (jnp.float32, jnp.float64):
            return values
    # A lifted input is float64 where the jaxpr says float32: all operands must agree again.
    taken = zip(values, equation.invars, strict=True)
    if any(x.aval.dtype == jnp.float32 and value.dtype == jnp.float64 for value, x in taken):
        values = [_as_double(x) for x in values]
        # Parameters such as `preferred_element_type` would narrow the result.
        params = {k: jnp.float64 if _is_single(v) else v for k, v in params.items()}
    out = primitive.bind(*values, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else [out]


def _as_double(x: Any) -> Any:
    return x.astype(jnp.float64) if x.dtype == jnp.float32 else x


def _is_single(x: Any) -> bool:
    return isinstance(x, type | jnp.dtype) and x == jnp.float32
