"""Records submodule outputs and points inside attention of a torch run; supplies dropout masks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ....errors import ParityError
from ....weights.known_layers import a
from ... import draw
from ...torch_module import to_numpy, to_torch
from ..leaves import counted, leaves, name_of_leaf, rebuilt, split_leaves
from ..run import Call, MaskMismatch, Run, RunRequest, Step, bessel_excess, fit_mask, rounded
from ..tape import Tape
from .dispatch import dispatch_mode
from .float64 import lifted
from .fused import record_sdpa
from .inactive import Inactive
from .noise import RoundingMove, noise
from .points import Points


def is_inexact(tensor: Any) -> bool:
    """Whether a tensor holds floating or complex numbers, which have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def trained_parameters(module: Any) -> dict[str, Any]:
    """The parameters that gradients are asked of."""
    return {k: v for k, v in module.named_parameters() if v.requires_grad}


def state_of(module: Any) -> dict[str, Any]:
    """What a call may change of a module: buffers, plain tensors, arrays, numbers and texts."""
    import torch

    states: dict[str, Any] = dict(module.named_buffers())
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if torch.is_tensor(value) or isinstance(value, int | float | str | np.ndarray):
                states[f"{path}.{name}" if path else name] = value
    return states


class Recorder:
    """Records submodule outputs and points inside attention; supplies dropout masks."""

    def __init__(
        self,
        module: Any,
        keeps: Sequence[np.ndarray] | None,
        request: RunRequest,
        dtype: str,
        weights: Mapping[str, np.ndarray],
        tape: Tape | None = None,
    ):
        self.module, self.wants_taps, self.dtype = module, request.taps, dtype
        self.tape = tape
        self.weights = {k: x for k, x in weights.items() if x.dtype.name == dtype}
        self.keeps, self.drawn = list(keeps or ()), 0
        self.seed = request.seed if keeps is None else None
        self.run = Run()
        self.path: list[str] = []
        self.inputs: list[tuple[Any, ...]] = []
        self.arguments: list[list[int]] = []
        self.numbers: list[int] = []
        self.inactive = Inactive()
        fixed = (*module.parameters(), *module.buffers())
        self.points = Points(self._note_point, self._note_gradient, fixed)

    @contextmanager
    def record_points(
        self, all_narrow: bool, moved: RoundingMove | None, inputs: Mapping[str, Any]
    ) -> Iterator[None]:
        with ExitStack() as stack:
            # The mode entered last handles an operation first: `_on_op` sees results to which
            # lifting and noise are already applied.
            if self.tape is not None:
                path = lambda: (self.path or [""])[-1]  # noqa: E731
                named = {
                    **dict(self.module.named_parameters()),
                    **dict(self.module.named_buffers()),
                }
                named |= {f"input {name}": x for name, x in inputs.items()}
                stack.enter_context(self.tape.mode(named, path))
            if moved is not None:
                stack.enter_context(noise(moved, self.dtype))
            if self.dtype == "float64":
                self.run.notes = stack.enter_context(lifted(all_narrow))
            for path, part in self.module.named_modules():
                for handle in self._hooks(path, part):
                    stack.callback(handle.remove)
            stack.enter_context(dispatch_mode(self._on_op))
            stack.enter_context(record_sdpa(self.points, self.tape is not None))
            # Autograd's hooks keep `points` alive, which would leak every recorded tensor.
            stack.callback(self.points.clear)
            yield

    def mark_results(self, outputs: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Ends the tape, which knows outputs, inputs, parameters and state by name."""
        import torch

        if self.tape is not None:
            for name, x in outputs.items():
                self.tape.mark(f"output {name}", x)
            for name, x in {**trained_parameters(self.module), **inputs}.items():
                self.tape.mark(f"input {name}" if name in inputs else f"parameter {name}", x)
            for name, x in state_of(self.module).items():
                if torch.is_tensor(x):
                    self.tape.mark(f"state {name}", x)
            self.tape.stop()

    def finish(self) -> None:
        if self.seed is not None:
            return
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
            self.run.order.append(path)
            arguments = (x for _, x in leaves((*args, *kwargs.values())))
            tensors = [x for x in arguments if torch.is_tensor(x)]
            self.arguments.append([self.tape.number(x) for x in tensors] if self.tape else [])
            # Cloned, since a later operation may change the tensor in place.
            self.inputs.append(tuple(x.detach().clone() for x in tensors))

        def leave(module, args, kwargs, out):
            self.path.pop()
            inputs, self.numbers = self.inputs.pop(), self.arguments.pop()
            self._note_bessel(path, part, inputs)
            if path and self.wants_taps:
                return self._note_output(path, self._call_of(path, part, inputs), out)
            return None

        return [
            part.register_forward_pre_hook(enter, with_kwargs=True),
            part.register_forward_hook(leave, with_kwargs=True),
        ]

    def _note_bessel(self, path: str, part: Any, inputs: tuple[Any, ...]) -> None:
        """Records how much a call of BatchNorm adds to its running variance by n / (n - 1)."""
        momentum = getattr(part, "momentum", None)
        tracks = part.training and getattr(part, "running_var", None) is not None
        if tracks and isinstance(momentum, float) and inputs and self.dtype == "float64":
            name, known = f"{path}.running_var".lstrip("."), self.run.bessel
            known[name] = bessel_excess(to_numpy(inputs[0]), momentum, known.get(name, 0.0))

    def _call_of(self, path: str, part: Any, inputs: tuple[Any, ...]) -> Call:
        """Returns what a submodule's output is computed from; parameters are not copied again."""
        facts = {
            name: float(value)
            for name, value in vars(part).items()
            if isinstance(value, int | float) and not name.startswith("_")
        }
        params = {
            role: to_numpy(x) if carried is None else carried
            for role, x in part.named_parameters(recurse=False)
            for carried in [self.weights.get(f"{path}.{role}")]
        }
        buffers = {role: to_numpy(x) for role, x in part.named_buffers(recurse=False)}
        arrays = {str(i): to_numpy(x) for i, x in enumerate(inputs)}
        return Call(type(part).__name__, arrays, {**params, **buffers}, facts)

    def _note_output(self, path: str, call: Call, out: Any) -> Any:
        """Records every leaf of a submodule's output."""
        import torch

        outputs = split_leaves(out, torch.is_tensor, path)
        called = name_of_leaf(path, outputs)
        for name, value in outputs.unknown.items():
            self.run.notes.append(
                f"{name} of torch is {a(type(value))}, which is not compared there"
            )

        def change(name: str, leaf: Any) -> Any:
            if name in outputs.numbers:
                unique = counted(self.run.taps, called(name))
                self.run.taps[unique] = rounded(outputs.numbers[name], self.dtype)
                self.run.calls[unique] = call
            return self._note(called(name), leaf, call) if torch.is_tensor(leaf) else leaf

        return rebuilt(out, change, path)

    def _note(self, name: str, value: Any, call: Call) -> Any:
        """Records a submodule's output; returns a view, whose gradient is this output's alone."""
        name = counted(self.run.taps, name)
        self.run.taps[name] = to_numpy(value)
        self.run.calls[name] = call
        if self.tape is not None:
            self.tape.mark(f"tap {name}", value)
            self.tape.marks |= {f"argument {i} {name}": x for i, x in enumerate(self.numbers)}
        if not (value.requires_grad and is_inexact(value)):
            return value
        # A submodule may return its input itself, as `Identity` does: a hook on that tensor would
        # get the sum of the gradients of all its uses.
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
        if self.tape is not None:
            self.tape.mark(f"tap {name}", value)
        return name

    def _note_gradient(self, name: str, gradient: Any) -> None:
        if self.wants_taps and tuple(gradient.shape) == self.run.taps[name].shape:
            self.run.tap_gradients[name] = to_numpy(gradient)

    def _keep(self, like: Any, rate: Any) -> Any:
        """Returns the mask to repeat, or draws one; records torch's keep rate."""
        self.drawn += 1
        self.run.rates.append(float(rate.double().mean()) if hasattr(rate, "double") else rate)
        self.run.places.append(self.path[-1] if self.path else "")
        shape = tuple(like.shape)
        if self.seed is not None:
            # Torch's generator does not promise the same masks in another version.
            chance = to_numpy(rate) if hasattr(rate, "double") else rate
            self.keeps.append(draw.keep(self.seed, self.drawn, chance, shape))
        elif self.drawn > len(self.keeps):
            call = "flax_call=lambda m, x: m(x, deterministic=False)"
            off = f", or its call turns it off: {call}" * (not self.keeps)
            raise ParityError(
                f"torch draws dropout mask {self.drawn}, in {self.run.places[-1] or 'the module'}; "
                f"Flax drew {len(self.keeps)}: a dropout is missing in Flax, or its mask is not "
                f"drawn by jax.random.bernoulli, the one draw that is heard{off}."
            )
        keep = self.keeps[self.drawn - 1]
        fitted = fit_mask(keep, shape)
        if fitted is None:
            raise MaskMismatch(self.drawn, keep.shape, shape, self.run.places[-1])
        self.keeps[self.drawn - 1] = fitted
        return to_torch(fitted).to(like.dtype)

    def _on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs and records an operation; a Bernoulli draw returns the dropout mask instead."""
        # `F.dropout` on the CPU draws by `bernoulli_`, most hand-written dropouts by either.
        name = func.overloadpacket.__name__
        if name in ("bernoulli_", "bernoulli"):
            # `torch.bernoulli(p)` takes a tensor of probabilities in place of a rate.
            inside = name == "bernoulli" and len(args) == 1
            rate = args[0] if inside else (*args, 0.5)[1]
            keep = self._keep(args[0], kwargs.get("p", rate))
            keep = args[0].copy_(keep) if name == "bernoulli_" else keep
            self.points.after_dropout(keep)
            return keep
        # An operation in place is announced first, while its operand has the old value.
        self.points.before_op(name, args)
        tracked = self.dtype == "float64" and not self.points.backward
        operand = self.inactive.operand(name, args) if tracked else None
        out = func(*args, **kwargs)
        if operand is not None:
            self.inactive.note(name, args, operand, out, (self.path or [""])[-1])
        self.points.after_op(name, args, out)
        return out


def _step(name: str, place: int, others: Sequence[Any], shape: tuple[int, ...]) -> Step:
    import torch

    plain = [to_numpy(x) if torch.is_tensor(x) else x for x in others]
    return Step(name.rstrip("_"), place, tuple(plain), shape)
