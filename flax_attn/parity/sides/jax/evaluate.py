"""Evaluates a traced JAX program in float64 throughout, or with noise in every rounding.

JAX functions ask for float32 inside (`preferred_element_type`, float32 accumulators, a softmax in
float32), whatever the dtype of their inputs: two right ones then differ by 1e-7 in float64. Lifted,
both compute the same function in float64. And how exactly a function can be computed at all shows
when each of its operations is moved by a unit in the last place.

Every variable of a lifted program whose declared dtype is narrow holds a float64 array. Loops and
branches are built again around their evaluated bodies; what wraps a program (`jit`, `checkpoint`,
custom derivatives, which a differentiated program has resolved) is evaluated in place.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from .noise import moved

# Wraps a program that is evaluated in its place.
CALLS = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin"),
    )
)
SINGLE = ("float32",)
NARROW = ("float32", "bfloat16", "float16")
COMPLEX = "complex64"
# Reads bits, or calls what takes the declared dtypes only.
DECLARED = ("bitcast_convert_type", "pure_callback", "io_callback", "ffi_call")


@dataclass(frozen=True)
class Evaluation:
    """How a traced program is evaluated.

    Attributes:
      lifted: names of the dtypes that become float64; complex64 follows float32.
      noise: seed of the noise in each operation; None for none.
    """

    lifted: tuple[str, ...] = ()
    noise: int | None = None

    def changes(self, program: ClosedJaxpr) -> bool:
        """Whether it would evaluate this program in another way than JAX does."""
        return self.noise is not None or any(map(self._lifts, _computed_dtypes(program.jaxpr)))

    def __call__(self, program: ClosedJaxpr, arrays: Sequence[Any]) -> list[Any]:
        """Evaluates a closed program for these arrays."""
        return self.of(program.jaxpr, program.consts, arrays)

    def _lifts(self, dtype: Any) -> bool:
        name = getattr(dtype, "name", "")
        return name in self.lifted or (name == COMPLEX and "float32" in self.lifted)

    def _wide(self, x: Any) -> Any:
        """A value in the dtype that it has in the evaluated program."""
        dtype = getattr(x, "dtype", None)
        if not self._lifts(dtype):
            return x
        return lax.convert_element_type(x, _wide_dtype(dtype))

    def of(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Evaluates an open program for these constants and arrays."""
        known = dict(zip(jaxpr.constvars, map(self._wide, consts), strict=True))
        known |= dict(zip(jaxpr.invars, map(self._wide, arrays), strict=True))

        def value(x: Any) -> Any:
            return self._wide(jnp.asarray(x.val, x.aval.dtype)) if _is_literal(x) else known[x]

        for number, equation in enumerate(jaxpr.eqns):
            values = list(map(value, equation.invars))
            outs = list(map(self._wide, self.equation(equation, values)))
            if self.noise is not None and not inner(equation):
                outs = moved(equation, values, outs, (self.noise, number))
            known |= dict(zip(equation.outvars, outs, strict=True))
        return list(map(value, jaxpr.outvars))

    def equation(self, equation: Any, values: list[Any]) -> list[Any]:
        """The results of one operation for these operands."""
        name = equation.primitive.name
        rebuilt: Callable[..., list[Any]] | None = REBUILT.get(name)
        if rebuilt is not None:
            return rebuilt(self, equation.params, values)
        if name == "pallas_call" and equation.params["interpret"] is True:
            return self(_interpreted(equation), values)
        if name in CALLS:
            return self.of(*inner(equation)[0], values)
        if name in DECLARED or inner(equation):
            # What holds another program in a way that cannot be built again here.
            return _declared(equation, values)
        return self._bound(equation, values)

    def _bound(self, equation: Any, values: list[Any]) -> list[Any]:
        """One operation, in the dtypes of its operands."""
        primitive, params = equation.primitive, equation.params
        if primitive.name == "reduce_precision" and self._lifts(_rounded_to(params)):
            return values
        touched = any(map(self._lifts, _avals(equation)))
        params = {k: self._parameter(x) for k, x in params.items()} if touched else params
        out = primitive.bind(*values, **primitive.get_bind_params(params))
        return list(out) if primitive.multiple_results else [out]

    def _parameter(self, x: Any) -> Any:
        """A parameter of an operation: dtypes are lifted, and products lose their own algorithm."""
        if isinstance(x, lax.DotAlgorithmPreset):
            return (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        is_dtype = isinstance(x, jnp.dtype) or (isinstance(x, type) and hasattr(x, "dtype"))
        if is_dtype and self._lifts(jnp.dtype(x)):
            return _wide_dtype(jnp.dtype(x))
        return x


def lifted_in(dtype: str) -> tuple[str, ...]:
    """What a JAX side lifts in a run of this dtype: float32 in float64, nothing in others."""
    return SINGLE if dtype == "float64" else ()


@contextmanager
def wide_requests() -> Iterator[None]:
    """Gives float64 wherever code asks JAX for float32 by `dtype=`, `astype` and the like.

    Lifting the traced program is not enough: a loop whose state is float32 and whose body computes
    in the dtype of its inputs cannot be traced in float64, and Python numbers beside a float32
    array have been rounded to it.
    """
    from jax._src import dtypes

    plain = dtypes.check_and_canonicalize_user_dtype

    def wide(dtype: Any, fun_name: str | None = None) -> Any:
        known = plain(dtype, fun_name)
        return jnp.dtype("float64") if known == jnp.float32 else known

    dtypes.check_and_canonicalize_user_dtype = wide
    try:
        # The same precision by its other name: functions traced before are traced again.
        with jax.default_matmul_precision("float32"):
            yield
    finally:
        dtypes.check_and_canonicalize_user_dtype = plain


def _scan(run: Evaluation, params: dict[str, Any], values: list[Any]) -> list[Any]:
    consts, carries = params["num_consts"], params["num_carry"]
    fixed, first = values[:consts], values[consts : consts + carries]

    def body(carry: Any, slices: Any) -> tuple[Any, Any]:
        outs = run(params["jaxpr"], [*fixed, *carry, *slices])
        return tuple(outs[:carries]), tuple(outs[carries:])

    sequences = tuple(values[consts + carries :])
    last, stacked = lax.scan(
        body, tuple(first), sequences, params["length"], params["reverse"], params["unroll"]
    )
    return [*last, *stacked]


def _while(run: Evaluation, params: dict[str, Any], values: list[Any]) -> list[Any]:
    test, count = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body = values[:test], values[test : test + count]
    return list(
        lax.while_loop(
            lambda state: run(params["cond_jaxpr"], [*of_test, *state])[0],
            lambda state: tuple(run(params["body_jaxpr"], [*of_body, *state])),
            tuple(values[test + count :]),
        )
    )


def _cond(run: Evaluation, params: dict[str, Any], values: list[Any]) -> list[Any]:
    index, *operands = values
    branches = [lambda *xs, each=each: tuple(run(each, xs)) for each in params["branches"]]
    return list(lax.switch(index, branches, *operands))


REBUILT = {"scan": _scan, "while": _while, "cond": _cond}


def _interpreted(equation: Any) -> ClosedJaxpr:
    """The loops over blocks as which JAX itself interprets a kernel."""
    from jax._src.pallas.hlo_interpreter import pallas_call_hlo_interpret

    params = {k: x for k, x in equation.params.items() if k != "interpret"}
    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars]
    return jax.make_jaxpr(lambda *xs: pallas_call_hlo_interpret(*xs, **params))(*shapes)


def _declared(equation: Any, values: list[Any]) -> list[Any]:
    """An operation in the dtypes that its program declares."""
    primitive = equation.primitive
    values = [
        lax.convert_element_type(x, var.aval.dtype) if _is_float(x) else x
        for x, var in zip(values, equation.invars, strict=True)
    ]
    out = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(out) if primitive.multiple_results else [out]


def inner(equation: Any) -> list[tuple[Any, Sequence[Any]]]:
    """The programs among the parameters of an equation, each with its constants."""
    parts = (
        part
        for x in equation.params.values()
        for part in (x if isinstance(x, tuple | list) else (x,))
    )
    return [
        (part.jaxpr, part.consts) if isinstance(part, ClosedJaxpr) else (part, ())
        for part in parts
        if hasattr(part, "eqns")
    ]


def _computed_dtypes(jaxpr: Any) -> Any:
    """Every dtype that a program computes in, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield from _avals(equation)
        for part, _ in inner(equation):
            yield from _computed_dtypes(part)


def _avals(equation: Any) -> list[Any]:
    variables = (*equation.invars, *equation.outvars)
    return [getattr(x.aval, "dtype", None) for x in variables]


def _rounded_to(params: dict[str, Any]) -> Any:
    """The dtype to whose precision `reduce_precision` rounds; None if it is none that JAX has."""
    kinds = {7: jnp.bfloat16, 10: jnp.float16, 23: jnp.float32}
    kind = kinds.get(params["mantissa_bits"])
    same = kind is not None and jnp.finfo(kind).nexp == params["exponent_bits"]
    return jnp.dtype(kind) if same else None


def _wide_dtype(dtype: Any) -> Any:
    return jnp.dtype("complex128" if dtype.kind == "c" else "float64")


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _is_literal(x: Any) -> bool:
    return isinstance(x, Literal)
