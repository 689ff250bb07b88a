"""Torch's side: a copy of the module, run with hooks, its dropout repeating recorded masks."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .errors import ParityError
from .run import Request, Run, counted, is_floating, leaves, rounded
from .source import to_numpy, to_torch, write


def run_torch(
    module: Any,
    call: Callable[..., Any],
    request: Request,
    weights: Mapping[str, np.ndarray],
    dtype: str,
    keeps: Sequence[np.ndarray] = (),
) -> Run:
    """Runs a copy of `module` in `dtype` with these weights, inputs as given, on the CPU.

    Raises:
      ParityError: if torch draws other dropout masks than `keeps`, in number or shape.
    """
    import torch

    kind = getattr(torch, dtype)
    module = copy.deepcopy(module).cpu().to(kind).train(request.train)
    write(module, dict(weights))
    inputs = {name: to_torch(rounded(x, dtype)) for name, x in request.arrays().items()}
    floats = {
        name: x.requires_grad_(request.grads) for name, x in inputs.items() if x.is_floating_point()
    }
    args, kwargs = request.fill({**inputs, **floats})
    recorder = _Recorder(module, keeps, request.taps)
    with recorder.listening(), torch.set_grad_enabled(request.grads):
        out = call(module, *args, **kwargs)
    recorder.finish()
    named = dict(leaves(out, torch.is_tensor))
    return Run(
        outputs={name: to_numpy(x) for name, x in named.items()},
        taps={name: to_numpy(x) for name, x in recorder.taps.items()},
        gradients=_gradients(module, named, floats, request, dtype) if request.grads else {},
        keeps=list(keeps),
    )


def _gradients(module: Any, named: dict, floats: dict, request: Request, dtype: str) -> dict:
    import torch

    params = dict(module.named_parameters())
    wanted = {**{f"input {k}": v for k, v in floats.items()}, **params}
    outputs = {name: x for name, x in named.items() if x.is_floating_point() and x.requires_grad}
    if not outputs or not wanted:
        return {name: np.zeros(tuple(x.shape)) for name, x in wanted.items()}
    cotangents = [
        to_torch(rounded(request.cotangent(name, tuple(x.shape)), dtype)).to(x.dtype)
        for name, x in outputs.items()
    ]
    found = torch.autograd.grad(
        list(outputs.values()), list(wanted.values()), cotangents, allow_unused=True
    )
    return {
        name: to_numpy(torch.zeros_like(x) if g is None else g)
        for (name, x), g in zip(wanted.items(), found, strict=True)
    }


class _Recorder:
    """Notes submodules' outputs and every softmax's input and output; feeds dropout its masks."""

    def __init__(self, module: Any, keeps: Sequence[np.ndarray], taps: bool):
        self.module, self.wants_taps = module, taps
        self.keeps, self.drawn = list(keeps), 0
        self.taps: dict[str, Any] = {}
        self.path: list[str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for path, part in self.module.named_modules():
                for handle in self._hooks(path, part):
                    stack.callback(handle.remove)
            stack.enter_context(self._mode())
            yield

    def finish(self) -> None:
        if self.drawn != len(self.keeps):
            raise ParityError(
                f"Flax drew {len(self.keeps)} dropout masks, torch used {self.drawn}: "
                "dropout stands in different places."
            )

    def _hooks(self, path: str, part: Any) -> list[Any]:
        def enter(module, args):
            self.path.append(path)

        def leave(module, args, out):
            import torch

            self.path.pop()
            if path:
                for name, x in leaves(out, torch.is_tensor, path):
                    self._note(name, x)

        return [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]

    def _note(self, name: str, value: Any) -> None:
        if self.wants_taps:
            self.taps[counted(self.taps, name)] = value.detach().clone()

    def _note_softmax(self, scores: Any, weights: Any, axis: int) -> None:
        """Torch's softmax of a row that is all -inf is NaN by definition, not by the module: noted
        as zeros; what the module makes of that row shows in its output."""
        here = f"{self.path[-1]}." if self.path and self.path[-1] else ""
        nothing = (scores == float("-inf")).all(dim=axis, keepdim=True)
        self._note(f"{here}scores", scores)
        self._note(f"{here}weights", weights.masked_fill(nothing, 0.0))

    def _keep(self, like: Any) -> Any:
        self.drawn += 1
        if self.drawn > len(self.keeps):
            raise ParityError(
                f"torch draws dropout mask {self.drawn}, Flax drew {len(self.keeps)}."
            )
        keep, shape = self.keeps[self.drawn - 1], tuple(like.shape)
        if keep.shape != shape and not _merges(keep.shape, shape):
            raise ParityError(
                f"Dropout mask {self.drawn} has shape {keep.shape} in Flax and {shape} in torch."
            )
        return to_torch(keep.reshape(shape)).to(like.dtype)

    def _mode(self) -> Any:
        from torch.utils._python_dispatch import TorchDispatchMode

        recorder = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                name = func.overloadpacket.__name__
                if name == "bernoulli_":
                    return args[0].copy_(recorder._keep(args[0]))
                out = func(*args, **(kwargs or {}))
                if name == "_softmax":
                    recorder._note_softmax(args[0], out, args[1])
                return out

        return Mode()


def _merges(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes differ only in how their leading axes are split."""
    return a[-2:] == b[-2:] and int(np.prod(a)) == int(np.prod(b)) and min(len(a), len(b)) >= 2


def float_inputs(request: Request) -> list[str]:
    """The names of the inputs that are differentiated."""
    return [name for name, x in request.arrays().items() if is_floating(x)]
