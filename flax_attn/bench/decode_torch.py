"""Decoding steps in torch: projections, a static or growing cache, and SDPA."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from .program import TorchProgram, device, tensor
from .workload import PROJECTIONS, Workload


def static(w: Workload) -> TorchProgram:
    """Static cache with unused slots masked; with a window, a ring buffer, all visible if full."""
    torch: Any = import_module("torch")
    slots = min(w.window or w.length, w.length)
    past = _last_slots(w)
    rows, at = (x.to(device()) for x in (torch.arange(w.batch), torch.from_numpy(past % slots)))

    def pack(tensors: Any) -> Any:
        x, weights, keys, values = _projected(w, tensors)
        keys_values = [y.new_zeros(*y.shape[:2], slots, y.shape[3]) for y in (keys, values)]
        for b, n in enumerate(past):
            places = np.arange(max(0, n - slots), n)
            for new, old in zip((keys, values), keys_values, strict=True):
                old[b, :, places % slots] = new[b, :, places]
        visible = torch.arange(slots)[None] <= torch.from_numpy(past)[:, None]
        return (
            x,
            weights,
            keys_values,
            None if visible.all() else visible[:, None, None].to(x.device),
        )

    def call(packed: Any) -> Any:
        x, weights, keys_values, visible = packed
        q, k, v = _heads(w, x, weights)
        for new, old in zip((k, v), keys_values, strict=True):
            if w.batch == 1:
                old[:, :, at[0]] = new[:, :, 0]
            else:
                old[rows, :, at] = new[:, :, 0]
        return _attended(w, q, keys_values[0], keys_values[1], visible, weights)

    return _program(call, pack)


def grown(w: Workload) -> TorchProgram:
    """Cache extended by concatenation in each step; shorter rows are padded on the left."""
    torch = import_module("torch")
    past = np.minimum(_last_slots(w), (w.window or w.length) - 1)

    def pack(tensors: Any) -> Any:
        x, weights, keys, values = _projected(w, tensors)
        most = past.max()
        keys_values = [y.new_zeros(*y.shape[:2], most, y.shape[3]) for y in (keys, values)]
        for b, (n, end) in enumerate(zip(past, _last_slots(w), strict=True)):
            for new, old in zip((keys, values), keys_values, strict=True):
                old[b, :, most - n :] = new[b, :, end - n : end]
        visible = torch.arange(most + 1)[None] >= torch.from_numpy(most - past)[:, None]
        return (
            x,
            weights,
            keys_values,
            None if visible.all() else visible[:, None, None].to(x.device),
        )

    def call(packed: Any) -> Any:
        x, weights, keys_values, visible = packed
        q, k, v = _heads(w, x, weights)
        k, v = (torch.cat(both, dim=2) for both in zip(keys_values, (k, v), strict=True))
        return _attended(w, q, k, v, visible, weights)

    return _program(call, pack)


def _program(call: Callable, pack: Callable) -> TorchProgram:
    return _Step(call, pack, lambda packed: [], lambda grads: {}, "fwd")


class _Step(TorchProgram):
    """A torch program whose inputs include no cotangent."""

    def place(self, arrays: Any) -> Any:
        with self.torch.no_grad():
            return self.pack({name: tensor(x) for name, x in arrays.items()}), None


def _last_slots(w: Workload) -> np.ndarray:
    return np.maximum(1, w.stored * np.arange(1, w.batch + 1) // w.batch) - 1


def _projected(w: Workload, tensors: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the new tokens, the weights `(out, in)`, and all keys and values `B K T H`."""
    torch = import_module("torch")
    weights = [tensors[f"{name}.weight"].T.contiguous() for name in PROJECTIONS]
    x = tensors["x"]
    keys, values = (_split(w, torch.nn.functional.linear(x, y)) for y in weights[1:3])
    return (
        x[torch.arange(w.batch), torch.from_numpy(_last_slots(w))][:, None],
        weights,
        keys,
        values,
    )


def _split(w: Workload, x: Any) -> Any:
    return x.reshape(*x.shape[:2], -1, w.width).transpose(1, 2)


def _heads(w: Workload, x: Any, weights: Any) -> list[Any]:
    linear = import_module("torch").nn.functional.linear
    return [_split(w, linear(x, y)) for y in weights[:3]]


def _attended(w: Workload, q: Any, k: Any, v: Any, visible: Any, weights: Any) -> Any:
    function = import_module("torch").nn.functional
    shared = k.shape[1] != q.shape[1]
    o = function.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=shared)
    return function.linear(o.transpose(1, 2).flatten(2), weights[3])
