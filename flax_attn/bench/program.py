"""Programs: one competitor on one workload in one pass, compiled, placed, run and waited for."""

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
    """What the race needs of a competitor."""

    compile_seconds: float | None
    temporary: int | None

    def place(self, arrays: Arrays) -> Any:
        """These arrays as the program takes them, on its device."""
        ...

    def compile(self, placed: Any) -> None:
        """Compiles ahead of the first call, where that can be done apart."""
        ...

    def run(self, placed: Any) -> Any:
        """Starts a run; its result may still be on the way."""
        ...

    def wait(self, result: Any) -> None:
        """Until the result is there."""
        ...

    def take(self, result: Any) -> dict[str, np.ndarray]:
        """The output and the gradients, by the names of the workload's arrays."""
        ...

    def chained(self, placed: Any, times: int) -> Callable[[], None] | None:
        """That many runs by one dispatch and a wait, or None where there is no such thing."""
        ...


class JaxProgram:
    """`call(packed)` under jit, and its gradients in all of `packed`.

    Args:
      call: from what `pack` gives to the output.
      pack: from arrays by name to a pytree.
      unpack: from gradients in that structure to gradients by name.
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
            inputs, _ = jax.lax.optimization_barrier(carry)  # the next waits for the one before
            return inputs, self.function(*inputs)

        def many(*inputs: Any) -> Any:
            shapes = jax.eval_shape(self.function, *inputs)
            start = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return jax.lax.fori_loop(0, times, step, (inputs, start))[1]

        run = jax.jit(many).lower(*placed).compile()
        return lambda: self.wait(run(*placed))


class TorchProgram:
    """`call(packed)` in torch, eager or compiled, and its gradients in the tensors of `packed`.

    Args:
      call: from what `pack` gives to the output.
      pack: from tensors by name to whatever `call` takes.
      leaves: the tensors in that, whose gradients are wanted.
      unpack: from numpy gradients, in the order of `leaves`, to gradients by name.
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
        """Nothing: torch compiles in the first call."""

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
    """Where torch computes: a GPU if it has one."""
    return "cuda" if import_module("torch").cuda.is_available() else "cpu"


def tensor(x: np.ndarray) -> Any:
    """A torch tensor of the same values and dtype, on the GPU if torch has one."""
    torch = import_module("torch")
    wide = torch.from_numpy(np.asarray(x, np.float32).copy())  # numpy's bfloat16 is not torch's
    return wide.to(device=device(), dtype=getattr(torch, x.dtype.name))


def array(x: Any) -> np.ndarray:
    """A numpy array of the same values, in float32."""
    return x.detach().to("cpu").float().numpy()
