"""The torch side: runs a copy of the module with hooks, and controls its dropout masks."""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ....errors import ParityError
from ... import judge
from ...torch_module import to_numpy, to_torch, write
from ..leaves import leaves, refuse_unknown, split_leaves
from ..run import Run, RunRequest, complex_dtype, rounded
from ..tape import Tape
from .noise import RoundingMove
from .recorder import Recorder, is_inexact, state_of, trained_parameters


def run_torch(
    module: Any,
    call: Callable[..., Any],
    request: RunRequest,
    weights: Mapping[str, np.ndarray],
    dtype: str,
    keeps: Sequence[np.ndarray] | None = (),
    all_narrow: bool = False,
    moved: RoundingMove | None = None,
    tape: Tape | None = None,
) -> Run:
    """Runs a copy of `module` in `dtype` with these weights on the CPU.

    Float64 runs lift float32, and with `all_narrow` bfloat16 and float16 too. `moved` adds rounding
    noise to results, `tape` records every operation. Dropout repeats the masks `keeps`; None draws
    masks from numpy's frozen generator with the request's seed.

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
        recorder = Recorder(module, keeps, request, dtype, weights, tape)
        recording = recorder.record_points(all_narrow, moved, copies)
        with recording, torch.set_grad_enabled(request.grads):
            out = call(module, *args, **kwargs)
            recorder.finish()
            _check_unchanged(inputs, copies)
            outputs = split_leaves(out, torch.is_tensor, request.output)
            refuse_unknown(outputs.unknown, "torch")
            recorder.mark_results(outputs.arrays, copies)
            # From here on matrix products are gradients, not points of the forward pass.
            recorder.points.backward = True
            wanted = {**{f"input {k}": v for k, v in floats.items()}, **trained_parameters(module)}
            if request.grads:
                recorder.run.gradients = _gradients(outputs.arrays, wanted, request, dtype)
    return _finished(recorder, outputs, before)


def ready(module: Any, request: RunRequest, weights: Mapping[str, np.ndarray], dtype: str) -> Any:
    """Returns a copy of the module in this dtype and the request's mode, with these weights."""
    module = _in_dtype(copy.deepcopy(module).cpu(), dtype)
    module.train(request.train)  # not chained: some modules override it without returning self
    _ask_for_gradients(module, request.grads)
    write(module, dict(weights))
    return module


def _finished(recorder: Recorder, outputs: Any, before: Mapping[str, Any]) -> Run:
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


def _states(module: Any) -> dict[str, Any]:
    """Returns module state that a call may change, tensors as copies."""
    import torch

    return {k: to_numpy(x) if torch.is_tensor(x) else x for k, x in state_of(module).items()}


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


def _gradients(named: dict, wanted: dict, request: RunRequest, dtype: str) -> dict:
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
