"""A JAX program recorded as torch's is: each operation is evaluated by torch's operation for it.

So one catalogue of mistakes serves both libraries. Formulas that torch has an operation for, such
as a softmax, become that operation; what torch has none for is evaluated by JAX.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from ... import judge
from ..tape import INPUT, PARAMETER, Tape
from .evaluate import CALLS, NARROW, Evaluation, inner
from .operations import is_float, is_tensor, literal, operation_of, to_jax, to_torch, torch_dtype
from .precision import Place, place_of

UNROLLED = 4000  # up to this many operations a loop is recorded step by step
# Functions of one array by JAX's names, and torch's where that is another one.
NAMED = ("silu", "relu", "relu6", "softplus", "elu", "leaky_relu", "selu", "celu", "log_softmax")
RENAMED = {"hard_swish": "hardswish", "soft_sign": "softsign", "log_sigmoid": "logsigmoid"}
SAME_VALUES = ("broadcast_in_dim", "reshape", "stop_gradient", "max")
GATES = ("tanh", "erf", "erfc", "logistic")
STEPS = 4  # operations between such a function and the product that ends a formula of GELU


class Made(NamedTuple):
    """How a value was computed: by which operation, with which parameters, from what."""

    name: str
    params: Mapping[str, Any]
    values: Sequence[Any]
    out: Any


class TorchEvaluation:
    """Evaluates a program by torch while a tape records what torch does.

    Args:
      tape: it, whose mode is on.
    """

    def __init__(self, tape: Tape):
        self.tape = tape
        self.made: dict[int, Made] = {}

    def of(self, jaxpr: Any, consts: Any, arrays: Any, outer: Place) -> list[Any]:
        """The results of a program: tensors, numbers, and what torch has no dtype for."""
        known = dict(zip(jaxpr.constvars, map(to_torch, consts), strict=True))
        known |= dict(zip(jaxpr.invars, arrays, strict=True))

        def value(x: Any) -> Any:
            return literal(x.val) if isinstance(x, Literal) else known[x]

        for equation in jaxpr.eqns:
            place = place_of(equation, outer)
            self.tape.site = (place.file, place.line, 0) if place.file else None
            outs = self._equation(equation, list(map(value, equation.invars)), place)
            known |= dict(zip(equation.outvars, outs, strict=True))
        return list(map(value, jaxpr.outvars))

    def _equation(self, equation: Any, values: list[Any], place: Place) -> list[Any]:
        """The results of one operation, or of the program inside it."""
        name, params = equation.primitive.name, equation.params
        if name in CALLS:
            (jaxpr, consts), *_ = inner(equation)
            named = self._named(str(params.get("name", "")), equation, values)
            return [named] if named is not None else self.of(jaxpr, consts, values, place)
        if name == "cond":
            branch = params["branches"][int(values[0])]
            return self.of(branch.jaxpr, branch.consts, values[1:], place)
        if name == "scan" and params["length"] * len(params["jaxpr"].eqns) <= UNROLLED:
            return self._scan(params, values, place)
        numbers = [isinstance(x, bool | int | float) for x in values]
        if numbers and all(numbers) and [*map(_is_scalar, equation.outvars)] == [True]:
            return [_called(equation, values)[0].item()]
        if not all(is_tensor(x) or n for x, n in zip(values, numbers, strict=True)):
            return self._by_jax(equation, values)
        out = self._formula(Made(name, params, values, None))
        out = operation_of(equation, values) if out is None else out
        shape = getattr(out[0] if isinstance(out, tuple) else out, "shape", None)
        if shape != equation.outvars[0].aval.shape:  # or None
            return self._by_jax(equation, values)
        if isinstance(out, tuple):
            return [*out]
        if not any(out is x for x in values):
            self.made[id(out)] = Made(name, params, values, out)
        return [out]

    def _by_jax(self, equation: Any, values: list[Any]) -> list[Any]:
        """An operation that torch has none for."""
        tensors = [x for x in values if is_tensor(x)]

        def call(*tensors: Any) -> Any:
            left = iter(tensors)
            return _called(equation, [next(left) if is_tensor(x) else x for x in values])

        with self.tape.paused():
            outs = call(*tensors)
        if tensors and all(map(is_tensor, outs)):
            self.tape.add(equation.primitive.name, call, tensors, outs)
        return outs

    def _scan(self, params: Mapping[str, Any], values: list[Any], place: Place) -> list[Any]:
        """A loop, step by step."""
        import torch

        consts, carries = params["num_consts"], params["num_carry"]
        state, rows = values[consts : consts + carries], values[consts + carries :]
        steps, made = range(params["length"]), {}
        for i in reversed(steps) if params["reverse"] else steps:
            operands = [*values[:consts], *state, *(x.select(0, i) for x in rows)]
            outs = self.of(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands, place)
            state, made[i] = outs[:carries], outs[carries:]
        stacks = zip(*(made[i] for i in steps), strict=True)
        return [*state, *(torch.stack([*map(to_torch, xs)]) for xs in stacks)]

    def _named(self, name: str, equation: Any, values: list[Any]) -> Any:
        """Torch's function for a program that has its name, if it gives the same; else None."""
        import torch

        name = RENAMED.get(name.strip("_"), name.strip("_"))
        if name not in (*NAMED, *RENAMED.values()) or not is_float(values[0]):
            return None
        x, function = values[0], getattr(torch.nn.functional, name)
        axes = [(i,) for i in range(x.ndim)[::-1]] if name == "log_softmax" else [()]
        ways = [lambda x, axis=axis: function(x, *axis) for axis in axes]
        with self.tape.paused():
            wanted = _called(equation, values)[0]
        return self._first_of(ways, x, wanted)

    def _first_of(self, ways: Sequence[Callable[[Any], Any]], x: Any, wanted: Any) -> Any:
        """The result of the first function that gives an array; None if none does."""
        for way in ways:
            with self.tape.paused():
                fits = _agree(way(x), wanted)
            if fits:
                return way(x)
        return None

    def _formula(self, last: Made) -> Any:
        """Torch's operation where an operation is the last of a formula for it; else None."""
        import torch

        operands: list[Any] = [*last.values, None, None]
        one, other, *_ = operands
        if last.name == "max" and is_float(one) and not is_tensor(other) and other == 0.0:
            return torch.relu(one)
        if last.name == "div" and is_tensor(other):
            return self._softmax(one, other)
        if last.name == "div" and is_tensor(one):
            return self._mean(one, other)
        if last.name == "mul" and is_float(one) and is_float(other) and one.shape == other.shape:
            return self._gelu(one, other) if self._gated(other) else self._gelu(other, one)
        return None

    def _gelu(self, x: Any, gate: Any) -> Any:
        """GELU or SiLU of `x`, if its product with a gate is that."""
        import torch

        functions = torch.nn.functional
        if not self._gated(gate):
            return None
        ways: list[Any] = [
            lambda x, a=a: functions.gelu(x, approximate=a) for a in ("none", "tanh")
        ]
        with self.tape.paused():
            wanted = x * gate
        return self._first_of([*ways, functions.silu], x, wanted)

    def _gated(self, x: Any, steps: int = STEPS) -> bool:
        """Whether a value is computed by tanh or the like, few operations before."""
        made = self.made.get(id(x))
        if made is None or not steps:
            return False
        return made.name in GATES or any(self._gated(y, steps - 1) for y in made.values)

    def _source(self, x: Any) -> Made:
        """How a value was computed, before it was laid out or bounded by a number."""
        made = self.made.get(id(x), Made("", {}, (), x))
        while made.name in SAME_VALUES:
            x = next((y for y in made.values[::-1] if is_tensor(y)), None)
            made = self.made.get(id(x), Made("", {}, (), x))
        return made

    def _softmax(self, raised: Any, total: Any) -> Any:
        """The softmax that ends in a quotient, or None."""
        import torch

        exp, summed = self.made.get(id(raised)), self._source(total)
        less = self.made.get(id(exp.values[0])) if exp and exp.name == "exp" else None
        if less is None or less.name != "sub" or summed.name != "reduce_sum":
            return None
        (x, most), axes = less.values, summed.params["axes"]
        highest = self._source(most)
        known = highest.name == "reduce_max" and highest.values[0] is x
        if not known or summed.values[0] is not raised or len(axes) != 1:
            return None
        with self.tape.paused():
            wanted = raised / total
        return self._first_of([lambda x: torch.softmax(x, axes[0])], x, wanted)

    def _mean(self, total: Any, count: Any) -> Any:
        """The mean that a sum divided by a number is, or None."""
        summed = self._source(total)
        if summed.name != "reduce_sum" or summed.values[0].numel() != count * total.numel():
            return None
        x, axes = summed.values[0], tuple(summed.params["axes"])
        with self.tape.paused():
            wanted = total / count
        ways = [lambda x, keep=keep: x.mean(axes, keepdim=keep) for keep in (True, False)]
        return self._first_of(ways, x, wanted)


def tape_of(
    program: ClosedJaxpr,
    leaves: Mapping[str, Any],
    inputs: Mapping[str, np.ndarray],
    arrays: Sequence[Any],
) -> tuple[Tape, list[Any]]:
    """The tape of a program, and its results.

    Args:
      program: it.
      leaves: what it is differentiated by, some of `arrays`, by name on the tape.
      inputs: the inputs of the call by name, of which it may hold some as constants.
      arrays: all that it is called with.
    """
    tape, tensors = Tape(of_package=True), [to_torch(x) for x in arrays]
    places = {id(x): place for place, x in enumerate(arrays)}
    marks = {name: tensors[places[id(x)]] for name, x in leaves.items()}
    consts = [to_torch(x) for x in program.consts]
    names = {name.removeprefix(PARAMETER): x for name, x in marks.items()}
    for name, x in inputs.items():
        names |= {f"{INPUT}{name}": y for y in consts if is_tensor(y) and _is(y, to_torch(x))}
    with tape.mode(names):
        evaluation = TorchEvaluation(tape)
        outs = [to_torch(x) for x in evaluation.of(program.jaxpr, consts, tensors, Place())]
    for name, x in marks.items():
        tape.mark(name, x)
    return tape, outs


def _is(x: Any, y: Any) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())


def _is_scalar(variable: Any) -> bool:
    """Whether it is one number, and no random key."""
    return variable.aval.shape == () and torch_dtype(variable.aval.dtype) is not None


def _called(equation: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation by JAX, in float64."""
    with jax.enable_x64(True):
        pairs = zip(values, equation.invars, strict=True)
        operands = [to_jax(x, variable.aval.dtype) for x, variable in pairs]
        return [to_torch(x) for x in Evaluation(NARROW).equation(equation, operands)]


def _agree(x: Any, y: Any) -> bool:
    """Whether two tensors hold the same function's values."""
    arrays = x.numpy(), y.numpy()
    return x.shape == y.shape and judge.same_function(*arrays, zero=True).ok
