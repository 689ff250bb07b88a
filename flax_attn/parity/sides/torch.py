"""Torch's side: a copy of the module, run with hooks, its dropout repeating recorded masks."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...errors import ParityError
from ..torch_module import to_numpy, to_torch, write
from .run import Call, Request, Run, Step, counted, leaves, one_or, rebuilt, rounded
from .torch_float64 import lifted
from .torch_fused import fused_heard
from .torch_points import Points


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
      ParityError: if torch draws other dropout masks than `keeps`, in number or shape, or if the
        module changes its input in place.
    """
    import torch

    with _as_found():
        module = copy.deepcopy(module).cpu().to(getattr(torch, dtype)).train(request.train)
        module.requires_grad_(request.grads)
        write(module, dict(weights))
        inputs = {name: to_torch(rounded(x, dtype)) for name, x in request.arrays().items()}
        floats = {
            name: x.requires_grad_(request.grads)
            for name, x in inputs.items()
            if x.is_floating_point()
        }
        given = {name: x.clone() for name, x in inputs.items()}
        args, kwargs = request.fill(given)
        recorder = _Recorder(module, keeps, request.taps)
        with recorder.listening(dtype), torch.set_grad_enabled(request.grads):
            out = call(module, *args, **kwargs)
            recorder.finish()
            _check_unchanged(inputs, given)
            named = dict(leaves(out, torch.is_tensor))
            recorder.points.backward = True
            found = _gradients(module, named, floats, request, dtype) if request.grads else {}
    run = recorder.run
    run.outputs = {name: to_numpy(x) for name, x in named.items()}
    run.gradients, run.keeps = found, list(keeps)
    run.state = {name: to_numpy(x) for name, x in module.named_buffers()}
    return run


@contextmanager
def _as_found() -> Iterator[None]:
    """Random states as they were, whatever the module draws."""
    import torch

    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    import torch

    for name, x in before.items():
        if not torch.equal(x.detach().nan_to_num(), after[name].detach().nan_to_num()):
            raise ParityError(
                f"The torch module changes its input {name!r} in place, which no JAX module can: "
                "give it a copy, torch_call=lambda module, *xs: module(*(x.clone() for x in xs))."
            )


def _gradients(module: Any, named: dict, floats: dict, request: Request, dtype: str) -> dict:
    import torch

    params = {k: v for k, v in module.named_parameters() if v.is_floating_point()}
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
    """Notes submodules' outputs and the points inside attention; feeds dropout its masks."""

    def __init__(self, module: Any, keeps: Sequence[np.ndarray], taps: bool):
        self.module, self.wants_taps = module, taps
        self.keeps, self.drawn = list(keeps), 0
        self.run = Run()
        self.path: list[str] = []
        self.inputs: list[tuple[Any, ...]] = []
        fixed = (*module.parameters(), *module.buffers())
        self.points = Points(self._note_point, self._note_gradient, fixed)

    @contextmanager
    def listening(self, dtype: str) -> Iterator[None]:
        with ExitStack() as stack:
            if dtype == "float64":
                self.run.notes = stack.enter_context(lifted())
            for path, part in self.module.named_modules():
                for handle in self._hooks(path, part):
                    stack.callback(handle.remove)
            stack.enter_context(self._mode())
            stack.enter_context(fused_heard(self.points))
            yield

    def finish(self) -> None:
        if self.keeps and not self.module.training:
            raise ParityError(
                f"Flax drew {len(self.keeps)} dropout masks in eval mode: a dropout of it does not "
                "follow nnx.Module.eval(); give it deterministic=True there, or say train=True."
            )
        if self.drawn != len(self.keeps):
            raise ParityError(
                f"Flax drew {len(self.keeps)} dropout masks, torch used {self.drawn}: "
                "dropout stands in different places."
            )

    def _hooks(self, path: str, part: Any) -> list[Any]:
        import torch

        def enter(module, args, kwargs):
            self.path.append(path)
            found = leaves((*args, *kwargs.values()), torch.is_tensor)
            self.inputs.append(tuple(x.detach().clone() for _, x in found))

        def leave(module, args, kwargs, out):
            self.path.pop()
            inputs = self.inputs.pop()
            if path and self.wants_taps:
                call, told = _call_of(part, inputs), one_or(path, out, torch.is_tensor)
                return rebuilt(
                    out, torch.is_tensor, lambda name, x: self._note(told(name), x, call), path
                )
            return None

        return [
            part.register_forward_pre_hook(enter, with_kwargs=True),
            part.register_forward_hook(leave, with_kwargs=True),
        ]

    def _note(self, name: str, value: Any, call: Call) -> Any:
        """Notes a submodule's output; a view of it goes on, so that its gradient is its own."""
        name = counted(self.run.taps, name)
        self.run.taps[name] = to_numpy(value)
        self.run.calls[name] = call
        if not (value.requires_grad and value.is_floating_point()):
            return value
        value = value.view_as(value)
        value.register_hook(lambda gradient: self._note_gradient(name, gradient))
        return value

    def _note_point(
        self, point: str, value: Any, follows: Mapping[str, Any], steps: Sequence[Any] = ()
    ) -> str:
        here = f"{self.path[-1]}." if self.path and self.path[-1] else ""
        name = counted(self.run.taps, here + point)
        if self.wants_taps:
            self.run.taps[name] = to_numpy(value)
            inputs = {k: to_numpy(x) for k, x in follows.items()}
            self.run.calls[name] = Call(point, inputs, steps=[_step(*step) for step in steps])
        return name

    def _note_gradient(self, name: str, gradient: Any) -> None:
        if self.wants_taps:
            self.run.tap_gradients[name] = to_numpy(gradient)

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
                    keep = args[0].copy_(recorder._keep(args[0]))
                    recorder.points.drew(keep)
                    return keep
                recorder.points.about(name, args)
                out = func(*args, **(kwargs or {}))
                recorder.points.saw(name, args, out)
                return out

        return Mode()


def _step(name: str, place: int, others: Sequence[Any], shape: tuple[int, ...]) -> Step:
    import torch

    plain = [to_numpy(x) if torch.is_tensor(x) else x for x in others]
    return Step(name.rstrip("_"), place, tuple(plain), shape)


def _call_of(part: Any, inputs: tuple[Any, ...]) -> Call:
    """What one call of a submodule was computed from."""
    held = {**dict(part.named_parameters(recurse=False)), **dict(part.named_buffers(recurse=False))}
    facts = {
        name: float(value)
        for name, value in vars(part).items()
        if isinstance(value, int | float) and not name.startswith("_")
    }
    return Call(
        type(part).__name__,
        {str(i): to_numpy(x) for i, x in enumerate(inputs)},
        {role: to_numpy(x) for role, x in held.items()},
        facts,
    )


def _merges(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two shapes differ only in how their leading axes are split."""
    return a[-2:] == b[-2:] and int(np.prod(a)) == int(np.prod(b)) and min(len(a), len(b)) >= 2
