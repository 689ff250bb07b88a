"""Competitors for any variant: this library's layer against its PyTorch reference.

`flax_attn.parity.port` copies the weights, `flax_attn.parity.compare` verifies the results.
"""

import inspect
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import layers as flax_layers
from ..parity import compare, port
from .competitor import OWN_FAMILY, Competitor
from .program import JaxProgram, TorchProgram, device
from .proof import Proof, proof_of
from .task import BOTH, Task
from .torch_layers import REF

PROVEN = 2**20  # attention weights: a larger task is verified at a smaller size


@dataclass(frozen=True)
class Twin(Task):
    """A layer of this library of width `heads * width`, by the name of its file."""

    layer: str = ""

    @property
    def table(self) -> str:
        return f"{self.layer}, width {self.features}, {self.dtype}"

    def small(self) -> "Twin":
        return self if self.weights <= PROVEN else self.shortened()

    @property
    def kind(self) -> type[nnx.Module]:
        """The class of the layer."""
        return variants()[self.layer]

    @property
    def num_inputs(self) -> int:
        """Number of arrays that the call requires."""
        parameters = list(inspect.signature(self.kind.__call__).parameters.values())[1:]
        return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @property
    def config(self) -> dict[str, Any]:
        """The constructor's required arguments, from the sizes of the task."""
        sizes = _sizes_as_arguments(self)
        return {name: sizes[name] for name in _required(self.kind) if name in sizes}

    def flax(self) -> nnx.Module:
        """Builds this library's layer."""
        module = self.kind(**self.config, rngs=nnx.Rngs(self.seed))  # type: ignore[call-arg]
        module.eval()
        return module

    def torch(self) -> Any:
        """Builds the PyTorch reference."""
        kind = getattr(import_module(f"{REF}.{self.layer}"), self.kind.__name__)
        return kind(**self.config).eval()


@cache
def variants() -> dict[str, type[nnx.Module]]:
    """Returns the layers that a task's sizes can build, by the name of their file.

    Others, such as those for images, need sizes that a task does not contain.
    """
    exports = (getattr(flax_layers, name) for name in vars(flax_layers))
    modules = [x for x in exports if isinstance(x, type) and issubclass(x, nnx.Module)]
    known = {*_sizes_as_arguments(Task(length=1)), "rngs"}
    return {
        module.__module__.rsplit(".", 1)[1]: module
        for module in modules
        if {*_required(module)} <= known
    }


def _required(kind: type[nnx.Module]) -> list[str]:
    """Names of the constructor's required arguments."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty]


def _sizes_as_arguments(task: Task) -> dict[str, Any]:
    """Constructor arguments that follow from a task's sizes."""
    width, halves = task.features, task.heads // 2 if task.heads % 2 == 0 else task.heads
    sizes = dict.fromkeys(("d_in", "d_out", "embed_dim", "in_features", "d_encoder"), width)
    sizes |= dict.fromkeys(("d_decoder", "units", "head_size"), width)
    sizes |= {"context_length": task.length, "dropout": 0.0, "num_heads": task.heads}
    return sizes | {"num_kv_heads": halves, "head_dim": task.width, "dim": width}


def competitors(variant: str) -> list[Competitor]:
    """Returns the layer, its PyTorch reference, and the compiled reference."""
    name = variants()[variant].__name__
    return [
        Competitor(f"{OWN_FAMILY}.{name}", OWN_FAMILY, _flax, prove=_prove),
        Competitor("torch_ref", "torch.eager", partial(_torch, False), prove=_prove),
        Competitor("torch_ref, compiled", "torch.compile", partial(_torch, True), prove=_prove),
    ]


@cache
def _prove(task: Twin) -> Proof:
    small = task.small()
    x = small.inputs()["x"].astype(np.float64)
    report = compare(
        small.torch(),
        small.flax(),
        *([x] * small.num_inputs),
        dtypes=("float64", task.dtype),
        grads=task.which == BOTH,
        taps=False,
        eager=False,
    )
    return proof_of(report)


def _flax(task: Twin) -> JaxProgram:
    graph, params, rest = nnx.split(task.flax(), nnx.Param, ...)
    params = jax.tree.map(lambda x: x.astype(task.dtype), params)

    def call(inputs: Any) -> Any:
        return nnx.merge(graph, inputs["params"], rest)(*[inputs["x"]] * task.num_inputs)

    return JaxProgram(call, task.which, {"params": params})


def _torch(compiled: bool, task: Twin) -> TorchProgram:
    torch = import_module("torch")
    module = port(task.flax(), task.torch())
    module = module.to(device=device(), dtype=getattr(torch, task.dtype))
    run, count = torch.compile(module) if compiled else module, task.num_inputs
    params = dict(module.named_parameters())
    return TorchProgram(lambda inputs: run(*[inputs["x"]] * count), task.which, params)
