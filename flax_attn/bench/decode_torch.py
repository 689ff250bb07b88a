"""Decoding steps in torch: projections, a static or growing cache, and SDPA."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .program import TorchProgram, device, tensor
from .step import Step
from .task import FORWARD, Arrays
from .weights import PROJECTIONS


def static(task: Step) -> TorchProgram:
    """Static cache with unused slots masked; with a window, a ring buffer, all visible if full."""
    torch: Any = import_module("torch")
    slots = min(task.window or task.length, task.length)
    past = task.lengths - 1
    rows, at = (x.to(device()) for x in (torch.arange(task.batch), torch.from_numpy(past % slots)))

    def pack(tensors: Any) -> Any:
        x, weights, keys, values = _projected(task, tensors)
        keys_values = [y.new_zeros(*y.shape[:2], slots, y.shape[3]) for y in (keys, values)]
        for b, n in enumerate(past):
            places = np.arange(max(0, n - slots), n)
            for new, old in zip((keys, values), keys_values, strict=True):
                old[b, :, places % slots] = new[b, :, places]
        visible = torch.arange(slots)[None] <= torch.from_numpy(past)[:, None]
        visible = None if visible.all() else visible[:, None, None].to(x.device)
        return x, weights, keys_values, visible

    def call(packed: Any) -> Any:
        x, weights, keys_values, visible = packed
        q, k, v = _heads(task, x, weights)
        for new, old in zip((k, v), keys_values, strict=True):
            if task.batch == 1:
                old[:, :, at[0]] = new[:, :, 0]
            else:
                old[rows, :, at] = new[:, :, 0]
        return _attended(task, q, keys_values[0], keys_values[1], visible, weights)

    return _Program(call, pack)


def grown(task: Step) -> TorchProgram:
    """Cache extended by concatenation in each step; shorter rows are padded on the left."""
    torch = import_module("torch")
    past = np.minimum(task.lengths - 1, (task.window or task.length) - 1)

    def pack(tensors: Any) -> Any:
        x, weights, keys, values = _projected(task, tensors)
        most = past.max()
        keys_values = [y.new_zeros(*y.shape[:2], most, y.shape[3]) for y in (keys, values)]
        for b, (n, end) in enumerate(zip(past, task.lengths - 1, strict=True)):
            for new, old in zip((keys, values), keys_values, strict=True):
                old[b, :, most - n :] = new[b, :, end - n : end]
        visible = torch.arange(most + 1)[None] >= torch.from_numpy(most - past)[:, None]
        visible = None if visible.all() else visible[:, None, None].to(x.device)
        return x, weights, keys_values, visible

    def call(packed: Any) -> Any:
        x, weights, keys_values, visible = packed
        q, k, v = _heads(task, x, weights)
        k, v = (torch.cat(both, dim=2) for both in zip(keys_values, (k, v), strict=True))
        return _attended(task, q, k, v, visible, weights)

    return _Program(call, pack)


class _Program(TorchProgram):
    """A step on what `pack` makes of the inputs, which include no cotangent."""

    def __init__(self, call: Callable, pack: Callable):
        super().__init__(call, FORWARD)
        self.pack = pack

    def place(self, inputs: Arrays) -> Any:
        with self.torch.no_grad():
            return self.pack({name: tensor(x) for name, x in inputs.items()}), {}, None


def _projected(task: Step, tensors: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the new tokens, the weights `(out, in)`, and all keys and values `B K T H`."""
    torch = import_module("torch")
    weights = [tensors[f"{name}.weight"].T.contiguous() for name in PROJECTIONS]
    x = tensors["x"]
    keys, values = (_split(task, torch.nn.functional.linear(x, y)) for y in weights[1:3])
    last = torch.arange(task.batch), torch.from_numpy(task.lengths - 1)
    return x[last][:, None], weights, keys, values


def _split(task: Step, x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1, task.width).transpose(1, 2)


def _heads(task: Step, x: Any, weights: Any) -> list[Any]:
    linear = import_module("torch").nn.functional.linear
    return [_split(task, linear(x, y)) for y in weights[:3]]


def _attended(task: Step, q: Any, k: Any, v: Any, visible: Any, weights: Any) -> Any:
    function = import_module("torch").nn.functional
    shared = k.shape[1] != q.shape[1]
    o = function.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=shared)
    return function.linear(o.transpose(1, 2).flatten(2), weights[3])
