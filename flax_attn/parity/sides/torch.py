"""The torch side: runs a copy of the module with hooks, and controls its dropout masks."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from ...errors import ParityError
from ...weights.known_layers import a
from .. import draw, judge
from ..torch_module import to_numpy, to_torch, write
from .changes import Changes
from .leaves import counted, leaves, name_of_leaf, rebuilt, refuse_unknown, split_leaves
from .run import (
    Call,
    MaskMismatch,
    Request,
    Run,
    Step,
    bessel_excess,
    complex_dtype,
    fit_mask,
    rounded,
)
from .torch_dispatch import dispatch_mode
from .torch_float64 import lifted
from .torch_fused import record_sdpa
from .torch_inactive import Inactive
from .torch_noise import RoundingMove, noise
from .torch_points import Points


def run_torch(
    module: Any,
    call: Callable[..., Any],
    request: Request,
    weights: Mapping[str, np.ndarray],
    dtype: str,
    keeps: Sequence[np.ndarray] | None = (),
    all_narrow: bool = False,
    moved: RoundingMove | None = None,
    changes: Changes | None = None,
) -> Run:
    """Runs a copy of `module` in `dtype` with these weights on the CPU.

    Float64 runs lift float32, and with `all_narrow` bfloat16 and float16 too. `moved` adds rounding
    noise to results, `changes` replaces some. Dropout repeats the masks `keeps`; None draws masks
    from numpy's frozen generator with the request's seed.

    Raises:
      ParityError: if torch draws other dropout masks than `keeps`, in number or shape, or if the
        module changes its input in place.
    """
    import torch

    with preserve_rng():
        module = ready(module, request, weights, dtype)
        before = _states(module)
        inputs = {name: to_torch(rounded(x, dtype)) for name, x in request.arrays().items()}
        floats = {
            name: x.requires_grad_(request.grads)
            for name, x in inputs.items()
            if is_inexact(x) and not request.is_constant(name)
        }
        copies = {name: x.clone() for name, x in inputs.items()}  # to detect in-place changes
        args, kwargs = request.fill(copies)
        recorder = _Recorder(module, keeps, request, dtype, weights)
        recording = recorder.record_points(all_narrow, moved, changes)
        with recording, torch.set_grad_enabled(request.grads):
            out = call(module, *args, **kwargs)
            recorder.finish()
            _check_unchanged(inputs, copies)
            outputs = split_leaves(out, torch.is_tensor, request.output)
            refuse_unknown(outputs.unknown, "torch")
            # From here on matrix products are gradients, not points of the forward pass.
            recorder.points.backward = True
            wanted = {**{f"input {k}": v for k, v in floats.items()}, **_trained(module)}
            if request.grads:
                recorder.run.gradients = _gradients(outputs.arrays, wanted, request, dtype)
    return _finished(recorder, outputs, before)


def ready(module: Any, request: Request, weights: Mapping[str, np.ndarray], dtype: str) -> Any:
    """Returns a copy of the module in this dtype and the request's mode, with these weights."""
    module = _in_dtype(copy.deepcopy(module).cpu(), dtype)
    module.train(request.train)  # not chained: some modules override it without returning self
    _ask_for_gradients(module, request.grads)
    write(module, dict(weights))
    return module


def _finished(recorder: "_Recorder", outputs: Any, before: Mapping[str, Any]) -> Run:
    """Adds the outputs, masks and module state after the call to the recorded run."""
    module, dtype = recorder.module, recorder.dtype
    run, after = recorder.run, _states(module)
    run.outputs = {name: to_numpy(x) for name, x in outputs.arrays.items()}
    run.outputs |= {name: rounded(x, dtype) for name, x in outputs.numbers.items()}
    run.others, run.keeps = outputs.others, list(recorder.keeps)
    run.state = {name: np.asarray(x) for name, x in after.items() if not isinstance(x, str)}
    run.changed = [name for name, x in after.items() if not _same(x, before.get(name))]
    run.notes += [*_wrong_dtype_note(module, dtype), *recorder.inactive.notes()]
    return run


def is_inexact(tensor: Any) -> bool:
    """Whether a tensor holds floating or complex numbers, which have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _in_dtype(module: Any, dtype: str) -> Any:
    """Casts the module to `dtype`, complex tensors to the complex dtype of that precision."""
    # `Module.to(float64)` would discard the imaginary part of complex parameters.
    import torch

    real, wide = getattr(torch, dtype), getattr(torch, complex_dtype(dtype))

    def cast(tensor: Any) -> Any:
        return tensor.to(wide if tensor.is_complex() else real) if is_inexact(tensor) else tensor

    return module._apply(cast)


def _ask_for_gradients(module: Any, grads: bool) -> None:
    """Enables gradients of the trained parameters; of all, if none is trained."""
    params = [x for x in module.parameters() if is_inexact(x)]
    some = any(x.requires_grad for x in params)
    for x in params:
        x.requires_grad_(grads and (x.requires_grad or not some))


def _trained(module: Any) -> dict[str, Any]:
    return {k: v for k, v in module.named_parameters() if v.requires_grad}


def _states(module: Any) -> dict[str, Any]:
    """Returns module state that a call may change: buffers, plain tensors and numbers."""
    import torch

    states: dict[str, Any] = {name: to_numpy(x) for name, x in module.named_buffers()}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            name = f"{path}.{name}" if path else name
            if torch.is_tensor(value):
                states[name] = to_numpy(value)
            elif isinstance(value, int | float | str | np.ndarray):
                states[name] = value
    return states


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return judge.exact(one, other).ok
    return type(one) is type(other) and one == other


def _wrong_dtype_note(module: Any, dtype: str) -> list[str]:
    """Returns a sentence about arrays of the module that do not follow its dtype, if any."""
    names = wrong_dtype_buffers(module, dtype)
    if not names:
        return []
    return [
        f"{', '.join(names[:3])} of torch does not follow the dtype of the module, "
        f"which runs in {dtype}: register it as a buffer"
    ]


def wrong_dtype_buffers(module: Any, dtype: str) -> list[str]:
    """Returns names of a module's numpy arrays and plain tensors of another floating dtype."""
    import torch

    return [
        f"{path}.{name}".lstrip(".") + (" (a numpy array)" if isinstance(leaf, np.ndarray) else "")
        for path, part in module.named_modules()
        for attribute, value in vars(part).items()
        if not attribute.startswith("_")
        for name, leaf in leaves(value, attribute)
        if (isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f")
        or (torch.is_tensor(leaf) and leaf.is_floating_point())
        if str(leaf.dtype).removeprefix("torch.") != dtype
    ]


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restores the global random states after the block."""
    import torch

    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002


def _check_unchanged(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name, x in before.items():
        if not judge.exact(to_numpy(x), to_numpy(after[name])).ok:
            raise ParityError(
                f"The torch module changes its input {name!r} in place, which no JAX module can: "
                "give it a copy, torch_call=lambda module, *xs: module(*(x.clone() for x in xs))."
            )


def _gradients(named: dict, wanted: dict, request: Request, dtype: str) -> dict:
    import torch

    outputs = {name: x for name, x in named.items() if is_inexact(x) and x.requires_grad}
    if not outputs or not wanted:
        return {name: np.zeros(tuple(x.shape)) for name, x in wanted.items()}
    cotangents = [
        to_torch(rounded(request.cotangent(name, x), dtype)).to(x.dtype)
        for name, x in outputs.items()
    ]
    gradients = list(
        torch.autograd.grad(
            list(outputs.values()), list(wanted.values()), cotangents, allow_unused=True
        )
    )[::-1]  # popped from the end, so that each tensor is freed once it is copied
    return {
        name: np.zeros(tuple(x.shape), to_numpy(x[:0]).dtype) if g is None else to_numpy(g)
        for name, x in wanted.items()
        for g in [gradients.pop()]
    }


class _Recorder:
    """Records submodule outputs and points inside attention; supplies dropout masks."""

    def __init__(
        self,
        module: Any,
        keeps: Sequence[np.ndarray] | None,
        request: Request,
        dtype: str,
        weights: Mapping[str, np.ndarray],
    ):
        self.module, self.wants_taps, self.dtype = module, request.taps, dtype
        self.weights = {k: x for k, x in weights.items() if x.dtype.name == dtype}
        self.keeps, self.drawn = list(keeps or ()), 0
        self.seed = request.seed if keeps is None else None
        self.run = Run()
        self.path: list[str] = []
        self.inputs: list[tuple[Any, ...]] = []
        self.inactive = Inactive()
        fixed = (*module.parameters(), *module.buffers())
        self.points = Points(self._note_point, self._note_gradient, fixed)

    @contextmanager
    def record_points(
        self, all_narrow: bool, moved: RoundingMove | None, changes: Changes | None
    ) -> Iterator[None]:
        with ExitStack() as stack:
            # The mode entered last handles an operation first: `_on_op` sees results to which
            # lifting, noise and changes are already applied.
            if changes is not None:
                stack.enter_context(changes.mode(self.module, lambda: (self.path or [""])[-1]))
                stack.enter_context(changes.functions(lambda: (self.path or [""])[-1]))
            if moved is not None:
                stack.enter_context(noise(moved, self.dtype))
            if self.dtype == "float64":
                self.run.notes = stack.enter_context(lifted(all_narrow))
            for path, part in self.module.named_modules():
                for handle in self._hooks(path, part):
                    stack.callback(handle.remove)
            stack.enter_context(dispatch_mode(self._on_op))
            stack.enter_context(record_sdpa(self.points))
            # Autograd's hooks keep `points` alive, which would leak every recorded tensor.
            stack.callback(self.points.clear)
            yield

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
            # Cloned, since a later operation may change the tensor in place.
            self.inputs.append(tuple(x.detach().clone() for x in arguments if torch.is_tensor(x)))

        def leave(module, args, kwargs, out):
            self.path.pop()
            inputs = self.inputs.pop()
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
            raise ParityError(
                f"torch draws dropout mask {self.drawn}, in {self.run.places[-1] or 'the module'}; "
                f"Flax drew {len(self.keeps)}: a dropout is missing in Flax, or its mask is not "
                "drawn by jax.random.bernoulli, the one draw that is heard."
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
