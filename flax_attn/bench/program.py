"""Programs: how one competitor of one task is compiled and run."""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..weights.plan import Plan
from .task import BOTH, COTANGENT, Arrays

Call = Callable[[dict[str, Any]], Any]  # maps inputs by name to the output


class Program:
    """What `Race` asks of a competitor's program.

    Attributes:
      compile_seconds: how long compilation took; None if it happens in the first call.
      temporary: bytes of temporary memory of the compiled program; None if unknown.
      counts: other figures of the compiled program, by name.
    """

    compile_seconds: float | None = None
    temporary: int | None = None
    counts: Mapping[str, float] = {}

    def place(self, inputs: Arrays) -> Any:
        """Converts the inputs to those of the program, on its device."""
        raise NotImplementedError

    def compile(self, placed: Any) -> None:
        """Compiles ahead of the first call, where the framework supports it."""

    def run(self, placed: Any) -> Any:
        """Starts a run; its result may be asynchronous."""
        raise NotImplementedError

    def wait(self, result: Any) -> None:
        """Blocks until the result is ready."""
        jax.block_until_ready(result)

    def take(self, result: Any) -> Arrays:
        """Returns the output, and the gradients by the names of the task's arrays."""
        return {"output": np.asarray(result)}

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        """Returns a function for `times` runs in one dispatch, or None if unsupported."""
        return None


class JaxProgram(Program):
    """Jitted `call(inputs)`, and its gradients with respect to all of them.

    Args:
      call: maps inputs and parameters by name to the output.
      which: the pass.
      params: a layer's parameters by name, which the call gets among its inputs.
      plan: maps the task's weights to these parameters.
    """

    def __init__(self, call: Call, which: str, params: Any = (), plan: Plan | None = None):
        self.which, self.params, self.plan = which, dict(params), plan
        self.compiled: Any = None

        def both(inputs: Any, cotangent: jax.Array) -> Any:
            out, back = jax.vjp(call, inputs)
            return out, back(cotangent)[0]

        self.function = both if which == BOTH else lambda inputs, cotangent: call(inputs)

    def place(self, inputs: Arrays) -> Any:
        cotangent = inputs.get(COTANGENT) if self.which == BOTH else None
        others = {name: x for name, x in inputs.items() if name != COTANGENT}
        placed = jax.tree.map(jnp.asarray, ({**self.params, **others}, cotangent))
        return jax.block_until_ready(placed)

    def compile(self, placed: Any) -> None:
        start = time.perf_counter()
        self.compiled = jax.jit(self.function).lower(*placed).compile()
        self.compile_seconds = time.perf_counter() - start
        memory = self.compiled.memory_analysis()
        self.temporary = None if memory is None else int(memory.temp_size_in_bytes)

    def run(self, placed: Any) -> Any:
        return self.compiled(*placed)

    def take(self, result: Any) -> Arrays:
        if self.which != BOTH:
            return {"output": np.asarray(result)}
        out, grads = jax.tree.map(np.asarray, result)
        return {"output": out, **_named(grads, self.plan)}

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        def step(_: Any, carry: Any) -> Any:
            inputs, _ = jax.lax.optimization_barrier(carry)  # orders the iterations
            return inputs, self.function(*inputs)

        def many(*inputs: Any) -> Any:
            shapes = jax.eval_shape(self.function, *inputs)
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return jax.lax.fori_loop(0, times, step, (inputs, start))[1]

        run = jax.jit(many).lower(*placed).compile()
        return lambda: self.wait(run(*placed))


class TorchProgram(Program):
    """`call(inputs)` in torch, eager or compiled, and its gradients for all of them.

    Args:
      call: maps tensors by name to the output.
      which: the pass.
      params: the parameters of the module that the call runs, by name; gradients are taken of them.
      plan: maps the task's weights to these parameters.
    """

    def __init__(self, call: Call, which: str, params: Any = (), plan: Plan | None = None):
        self.call, self.which, self.params, self.plan = call, which, dict(params), plan
        self.torch = import_module("torch")

    def place(self, inputs: Arrays) -> Any:
        tensors = {name: tensor(x) for name, x in inputs.items()}
        cotangent = tensors.pop(COTANGENT, None)
        leaves = {**self.params, **tensors}
        for leaf in leaves.values():
            leaf.requires_grad_(self.which == BOTH)
        return tensors, leaves, cotangent

    def run(self, placed: Any) -> Any:
        tensors, leaves, cotangent = placed
        if self.which != BOTH:
            with self.torch.no_grad():
                return self.call(tensors), {}
        out = self.call(tensors)
        grads = self.torch.autograd.grad(out, list(leaves.values()), cotangent)
        return out, dict(zip(leaves, grads, strict=True))

    def wait(self, result: Any) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def take(self, result: Any) -> Arrays:
        out, grads = result
        named = _named({name: array(x) for name, x in grads.items()}, self.plan)
        return {"output": array(out), **named}


def _named(grads: Arrays, plan: Plan | None) -> Arrays:
    """Gradients by the task's names, where a plan renames those of parameters."""
    if plan is None:
        return grads
    paths = {path for move in plan.moves for path in move.targets}
    return {**plan.back(grads), **{name: x for name, x in grads.items() if name not in paths}}


def device() -> str:
    """The torch device: "cuda" if available, else "cpu"."""
    return "cuda" if import_module("torch").cuda.is_available() else "cpu"


def tensor(x: np.ndarray) -> Any:
    """Converts to a torch tensor of the same dtype, on the GPU if available."""
    torch = import_module("torch")
    wide = torch.from_numpy(np.asarray(x, np.float32).copy())  # torch cannot read numpy's bfloat16
    return wide.to(device=device(), dtype=getattr(torch, x.dtype.name))


def array(x: Any) -> np.ndarray:
    """Converts a tensor to a float32 numpy array."""
    return x.detach().to("cpu").float().numpy()
