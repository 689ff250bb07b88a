"""Programs: one competitor on one workload and pass, and how it is compiled and run."""

import time
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from .workload import BOTH, COTANGENT

Arrays = Mapping[str, np.ndarray]


class Program(Protocol):
    """Interface of a competitor's program as `Race` uses it."""

    compile_seconds: float | None
    temporary: int | None

    def place(self, arrays: Arrays) -> Any:
        """Converts the arrays to the program's inputs, on its device."""
        ...

    def compile(self, placed: Any) -> None:
        """Compiles ahead of the first call, where the framework supports it."""
        ...

    def run(self, placed: Any) -> Any:
        """Starts a run; its result may be asynchronous."""
        ...

    def wait(self, result: Any) -> None:
        """Blocks until the result is ready."""
        ...

    def take(self, result: Any) -> dict[str, np.ndarray]:
        """Returns the output, and the gradients by the names of the workload's arrays."""
        ...

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        """Returns a function for `times` runs in one dispatch, or None if unsupported."""
        ...


class JaxProgram:
    """Jitted `call(packed)`, and its gradients with respect to all of `packed`.

    Args:
      call: maps the result of `pack` to the output.
      pack: maps arrays by name to a pytree.
      unpack: maps gradients in that structure to gradients by name.
      which: the pass.
    """

    def __init__(self, call: Callable, pack: Callable, unpack: Callable, which: str):
        self.pack, self.unpack, self.which = pack, unpack, which
        self.compile_seconds: float | None = None
        self.temporary: int | None = None
        self.compiled: Any = None

        def both(packed: Any, cotangent: jax.Array) -> Any:
            out, back = jax.vjp(call, packed)
            return out, back(cotangent)[0]

        self.function = both if which == BOTH else lambda packed, cotangent: call(packed)

    def place(self, arrays: Arrays) -> Any:
        cotangent = arrays[COTANGENT] if self.which == BOTH else None
        inputs = {name: x for name, x in arrays.items() if name != COTANGENT}
        placed = jax.tree.map(jnp.asarray, (self.pack(inputs), cotangent))
        return jax.block_until_ready(placed)

    def compile(self, placed: Any) -> None:
        start = time.perf_counter()
        self.compiled = jax.jit(self.function).lower(*placed).compile()
        self.compile_seconds = time.perf_counter() - start
        memory = self.compiled.memory_analysis()
        self.temporary = None if memory is None else int(memory.temp_size_in_bytes)

    def run(self, placed: Any) -> Any:
        return self.compiled(*placed)

    def wait(self, result: Any) -> None:
        jax.block_until_ready(result)

    def take(self, result: Any) -> dict[str, np.ndarray]:
        if self.which != BOTH:
            return {"output": np.asarray(result)}
        out, grads = jax.tree.map(np.asarray, result)
        return {"output": out, **self.unpack(grads)}

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


class TorchProgram:
    """`call(packed)` in torch, eager or compiled, and its gradients for tensors of `packed`.

    Args:
      call: maps the result of `pack` to the output.
      pack: maps tensors by name to the input of `call`.
      leaves: returns the tensors in that input whose gradients are computed.
      unpack: maps numpy gradients, in the order of `leaves`, to gradients by name.
      which: the pass.
    """

    def __init__(
        self, call: Callable, pack: Callable, leaves: Callable, unpack: Callable, which: str
    ):
        self.call, self.pack, self.leaves, self.unpack = call, pack, leaves, unpack
        self.which = which
        self.compile_seconds: float | None = None
        self.temporary: int | None = None
        self.torch = import_module("torch")

    def place(self, arrays: Arrays) -> Any:
        tensors = {name: tensor(x) for name, x in arrays.items()}
        cotangent = tensors.pop(COTANGENT)
        packed = self.pack(tensors)
        for leaf in self.leaves(packed):
            leaf.requires_grad_(self.which == BOTH)
        return packed, cotangent

    def compile(self, placed: Any) -> None:
        """Does nothing: torch compiles in the first call."""

    def run(self, placed: Any) -> Any:
        packed, cotangent = placed
        if self.which != BOTH:
            with self.torch.no_grad():
                return self.call(packed), ()
        out = self.call(packed)
        return out, self.torch.autograd.grad(out, self.leaves(packed), cotangent)

    def wait(self, result: Any) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def take(self, result: Any) -> dict[str, np.ndarray]:
        out, grads = result
        arrays = {"output": array(out)}
        return {**arrays, **self.unpack([array(g) for g in grads])} if grads else arrays

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        return None


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
