"""Competitors for any variant: this library's layer against its PyTorch reference.

`flax_attn.parity.port` copies the weights, `flax_attn.parity.compare` verifies the results.
"""

import inspect
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import numpy as np
from flax import nnx

from .. import layers as flax_layers
from ..parity import compare, port
from .competitor import OWN_FAMILY, Competitor
from .program import JaxProgram, Program, TorchProgram, tensor
from .proof import Proof
from .torch_layers import REF
from .workload import BOTH, Workload

PROVEN = 2**20  # attention weights: a larger workload is verified at a smaller size


@cache
def variants() -> dict[str, type[nnx.Module]]:
    """Returns the layers that a workload's sizes can build, by the name of their file.

    Others, such as those for images, need sizes that a workload does not contain.
    """
    exports = (getattr(flax_layers, name) for name in vars(flax_layers))
    modules = [x for x in exports if isinstance(x, type) and issubclass(x, nnx.Module)]
    known = {*_sizes_as_arguments(Workload(length=1)), "rngs"}
    return {
        module.__module__.rsplit(".", 1)[1]: module
        for module in modules
        if {*_required(module)} <= known
    }


def competitors(variant: str) -> list[Competitor]:
    """Returns the layer, its PyTorch reference, and the compiled reference."""
    name = variants()[variant].__name__
    return [
        Competitor(f"{OWN_FAMILY}.{name}", OWN_FAMILY, _flax, prove=_prove),
        Competitor("torch_ref", "torch.eager", partial(_torch, False), prove=_prove),
        Competitor("torch_ref, compiled", "torch.compile", partial(_torch, True), prove=_prove),
    ]


@cache
def _prove(w: Workload, which: str) -> Proof:
    small = w.cut(PROVEN)
    x = small.arrays()["x"].astype(np.float64)
    report = compare(
        twin(small),
        layer(small),
        *([x] * _inputs(small)),
        dtypes=("float64", w.dtype),
        grads=which == BOTH,
        taps=False,
        eager=False,
    )
    worst = max((row.verdict for row in report.rows), key=lambda v: v.error / (v.limit or 1.0))
    return Proof(worst.error, worst.limit, "" if report.ok else report.summary())


def _class_of(w: Workload) -> type[nnx.Module]:
    return variants()[w.layer or ""]


def _inputs(w: Workload) -> int:
    """Number of arrays that the call requires."""
    parameters = list(inspect.signature(_class_of(w).__call__).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def config(w: Workload) -> dict[str, Any]:
    """The constructor's required arguments, from the sizes of the workload."""
    known = _sizes_as_arguments(w)
    return {name: known[name] for name in _required(_class_of(w)) if name in known}


def _required(kind: type[nnx.Module]) -> list[str]:
    """Names of the constructor's required arguments."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in named if p.default is p.empty]


def _sizes_as_arguments(w: Workload) -> dict[str, Any]:
    """Constructor arguments that follow from a workload's sizes."""
    width, halves = w.features, w.heads // 2 if w.heads % 2 == 0 else w.heads
    known = dict.fromkeys(("d_in", "d_out", "embed_dim", "in_features", "d_encoder"), width)
    known |= dict.fromkeys(("d_decoder", "units", "head_size"), width)
    known |= {"context_length": w.length, "dropout": 0.0, "num_heads": w.heads}
    return known | {"num_kv_heads": halves, "head_dim": w.width, "dim": width}


def layer(w: Workload) -> nnx.Module:
    """Builds this library's layer."""
    kind = _class_of(w)
    module = kind(**config(w), rngs=nnx.Rngs(w.seed))  # pyright: ignore[reportCallIssue]
    module.eval()
    return module


def twin(w: Workload) -> Any:
    """Builds the PyTorch reference."""
    kind = _class_of(w)
    module = getattr(import_module(f"{REF}.{w.layer}"), kind.__name__)(**config(w))
    return module.eval()


def _flax(w: Workload, which: str) -> Program:
    module, dtype = layer(w), w.dtype
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    inputs = _inputs(w)
    params = jax.tree.map(lambda x: x.astype(dtype), params)

    def call(packed: Any) -> Any:
        return nnx.merge(graph, packed[0], rest)(*[packed[1]] * inputs)

    return JaxProgram(call, lambda arrays: (params, arrays["x"]), lambda grads: {}, which)


def _torch(compiled: bool, w: Workload, which: str) -> Program:
    torch = import_module("torch")
    module = port(layer(w), twin(w))
    like = tensor(w.arrays()["x"])
    module = module.to(device=like.device, dtype=like.dtype)
    run = torch.compile(module) if compiled else module
    inputs = _inputs(w)  # computed outside the timed call

    def pack(tensors: Any) -> Any:
        return [tensors["x"], *module.parameters()]

    return TorchProgram(
        lambda packed: run(*[packed[0]] * inputs),
        pack,
        lambda packed: packed,
        lambda grads: {},
        which,
    )
