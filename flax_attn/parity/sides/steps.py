"""Runs both sides step by step, each split of the tokens with the side's own cache."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ...errors import ParityError
from ...weights.known_layers import a
from ..decode import Cut, Decode
from ..torch_module import to_numpy, to_torch
from .flax.recorder import is_array
from .flax.side import Flax
from .leaves import leaves
from .pair import Pair
from .run import Run, RunRequest, is_floating, rounded
from .torch.float64 import lifted
from .torch.side import preserve_rng, ready


@dataclass(frozen=True)
class Steps:
    """Results of one side for one split.

    Attributes:
      outputs: outputs of the steps, in order.
      caches: the cache returned by each step.
    """

    outputs: list[np.ndarray]
    caches: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Decoded:
    """Steps of both sides, compared with full forward passes.

    Attributes:
      cuts: splits of the tokens.
      axis: token axis of the outputs.
      output: name of the output of a full forward pass that the steps return.
      got: Flax's steps by split.
      torch, truth: torch's steps by split, in the run's dtype and in float64; empty if its full
        forward pass is used instead.
      side: the Flax side, which can take more steps.
    """

    cuts: list[Cut]
    axis: int
    output: str
    got: dict[Cut, Steps]
    torch: dict[Cut, Steps]
    truth: dict[Cut, Steps]
    side: "FlaxSteps"


class FlaxSteps:
    """Runs the Flax side step by step with its cache.

    Args:
      side: the Flax side; steps are jitted if it is.
      weights: weights by path.
      decode: specifies the steps.

    Raises:
      ValueError: if the module makes no cache, or its call takes none.
    """

    def __init__(self, side: Flax, weights: Mapping[str, np.ndarray], decode: Decode):
        self.side, self.decode, self.request = side, decode, side.request
        self.module_state = nnx.split(side.copy(weights))
        arrays = {k: rounded(x, side.dtype) for k, x in self.request.arrays().items()}
        self.axes = decode.along(arrays)
        self.arrays = {k: jnp_array(x, side) for k, x in arrays.items()}
        self.first = next(iter(self.axes))
        self.tokens = arrays[self.first].shape[self.axes[self.first]]
        self.call = decode.flax or side.call
        self.program = jax.jit(self._step) if side.jit else self._step

    def run(self, cut: Cut) -> Steps:
        """Runs all steps of one split, each with the cache returned by the previous step."""
        with self.side.precise():
            outputs, caches = self.take(cut, self.arrays)
            return Steps([np.asarray(y) for y in outputs], caches)

    def take(
        self, cut: Cut, arrays: Mapping[str, Any], count: int | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Returns outputs and caches of the first `count` steps; differentiable."""
        # The module's state is passed on as well: a module may store its cache in variables.
        pieces = {name: [*cut.pieces(arrays[name], axis)] for name, axis in self.axes.items()}
        module_state, cache, outputs, caches = self.module_state, None, [], []
        for i in range(len(cut.lengths) if count is None else count):
            with _errors_at(f"Step {i + 1} of {cut} of Flax"):
                if cache is None and self.decode.flax is None:
                    cache = self._empty()
                now = {name: parts[i] for name, parts in pieces.items()}
                y, cache, module_state = self.program(module_state, cache, now)
            outputs.append(y)
            caches.append(cache)
        return outputs, caches

    def _step(
        self, module_state: Any, cache: Any, pieces: Mapping[str, Any]
    ) -> tuple[Any, Any, Any]:
        module = nnx.merge(*module_state)
        fixed = {k: x for k, x in self.arrays.items() if k not in pieces}
        args, kwargs = self.request.fill({**fixed, **pieces})
        y, cache = two(self.call(module, *args, cache=cache, **kwargs), "Flax")
        return one_array(y, is_array, "Flax"), cache, nnx.split(module)

    def _empty(self) -> Any:
        """Creates the module's own empty cache."""
        shape = self.arrays[self.first].shape
        batch = shape[: self.axes[self.first] % len(shape)]
        length = self.tokens if self.decode.length is None else self.decode.length
        make: Any = nnx.merge(*self.module_state)
        return make.init_cache(batch[0] if len(batch) == 1 else batch, length)


def jnp_array(x: np.ndarray, side: Flax) -> Any:
    """Converts a numpy array to JAX under the side's settings."""
    with side.precise():
        return jnp.asarray(x)


def check_decode(
    decode: Decode | None, module: nnx.Module, call: Callable[..., Any], request: RunRequest
) -> None:
    """Checks, before any run, that the comparison can be run step by step.

    Args:
      decode: specifies the steps; None skips the check.
      module, call: Flax's module and call.
      request: the request of both sides.

    Raises:
      TypeError: if `decode` is not a `Decode`.
      ValueError: if the inputs cannot be split so, if the module makes no cache or its call takes
        none, or in train mode.
    """
    if decode is None:
        return
    if not isinstance(decode, Decode):
        raise TypeError(f"decode takes a Decode, or None; got {decode!r}.")
    if request.train:
        raise ValueError("decode= runs in eval mode, where no step draws a mask; got train=True.")
    decode.checked(request.arrays())
    step = "Decode(flax=step) called as step(module, *inputs, cache=cache), returns (y, cache)"
    if decode.flax is None and not hasattr(module, "init_cache"):
        raise ValueError(
            f"{type(module).__name__} has no init_cache(batch, length), by which Decode makes a "
            f"cache; a step of your own, {step}."
        )
    parameters = inspect.signature(decode.flax or call).parameters.values()
    if not any(x.name == "cache" or x.kind is x.VAR_KEYWORD for x in parameters):
        what = "flax_call" if decode.flax is None else "Decode.flax"
        raise ValueError(
            f"{what} takes no cache=, which Decode gives it; a step of your own, {step}."
        )


def decoded(
    pair: Pair, decode: Decode, runs: tuple[Run, Run, Run], dtype: str, mode: str
) -> Decoded:
    """Runs both sides in one dtype for every split of the tokens.

    Raises:
      ValueError: if the inputs cannot be split so, or Flax has no cache.
      ParityError: if a step fails, or torch's returns a different number of tokens.
    """
    cuts = decode.checked(pair.request.arrays())
    side = FlaxSteps(pair.flax(dtype, mode), pair.weights(pair.narrow(dtype)), decode)
    axis = side.axes[side.first]
    got, _, truth = (run.outputs for run in runs)
    both = {k: x for k, x in truth.items() if k in got and got[k].shape == x.shape}
    output = output_of(both, side.tokens, axis)
    torch_steps, want = pair.original.decoded(decode, cuts, dtype)
    mine = {cut: side.run(cut) for cut in cuts}
    return Decoded(cuts, axis, output, mine, torch_steps, want, side)


def output_of(outputs: Mapping[str, np.ndarray], tokens: int, axis: int) -> str:
    """Returns the first output of a full forward pass with `tokens` entries along `axis`.

    Raises:
      ValueError: if there is none.
    """
    for name, x in outputs.items():
        if is_floating(x) and -x.ndim <= axis < x.ndim and x.shape[axis] == tokens:
            return name
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in outputs.items()) or "none"
    raise ValueError(
        f"Decode holds steps against an output with {tokens} tokens along axis {axis}; outputs of "
        f"one shape on both sides: {shapes}."
    )


@dataclass(frozen=True)
class TorchSteps:
    """Runs the torch side step by step with its cache, without gradients.

    Attributes:
      module: the torch module, copied for every split.
      request: the request with its inputs rounded.
      weights: torch's weights, rounded.
      decode: specifies the steps.
    """

    module: Any
    request: RunRequest
    weights: dict[str, np.ndarray]
    decode: Decode

    def run(self, cut: Cut, dtype: str, all_narrow: bool = False) -> Steps:
        """Runs all steps of one split; float64 runs lift float32, as in a full forward pass."""
        import torch

        axes = self.decode.along(self.request.arrays())
        quick = replace(self.request, grads=False)
        lift = lifted(all_narrow) if dtype == "float64" else nullcontext()
        with preserve_rng(), torch.no_grad(), lift:
            module = ready(self.module, quick, self.weights, dtype)
            inputs = {k: to_torch(rounded(x, dtype)) for k, x in quick.arrays().items()}
            pieces = {name: [*cut.pieces(inputs[name], axis)] for name, axis in axes.items()}
            cache, outputs = None, []
            for i, length in enumerate(cut.lengths):
                with _errors_at(f"Step {i + 1} of {cut} of torch"):
                    # Chunks are views of the inputs, which a step might change in place.
                    now = {name: parts[i].clone() for name, parts in pieces.items()}
                    y, cache = self._step(module, {**inputs, **now}, cache)
                outputs.append(to_numpy(y))
                _check_count(outputs[-1], length, next(iter(axes.values())), i, cut)
            return Steps(outputs)

    def _step(self, module: Any, inputs: Mapping[str, Any], cache: Any) -> tuple[Any, Any]:
        import torch

        args, kwargs = self.request.fill(inputs)
        assert self.decode.torch is not None
        y, cache = two(self.decode.torch(module, *args, cache=cache, **kwargs), "torch")
        return one_array(y, torch.is_tensor, "torch"), cache


def _check_count(y: np.ndarray, length: int, axis: int, i: int, cut: Cut) -> None:
    count = y.shape[axis] if -y.ndim <= axis < y.ndim else "no axis of"
    if count != length:
        raise ParityError(
            f"Step {i + 1} of {cut} of torch was given {length} tokens and returned {count} "
            f"(axis {axis} of shape {list(y.shape)}): a step returns the rows of its own tokens."
        )


def two(out: Any, side: str) -> tuple[Any, Any]:
    """Returns a step's output and cache.

    Raises:
      ParityError: if the step did not return a pair.
    """
    if not isinstance(out, tuple | list) or len(out) != 2:
        got = f"{a(type(out))}" + (f" of {len(out)}" if isinstance(out, tuple | list) else "")
        raise ParityError(f"A step of {side} must return (y, cache); it returned {got}.")
    return out[0], out[1]


def one_array(y: Any, is_one: Callable[[Any], bool], side: str) -> Any:
    """Returns the single array in a step's output.

    Raises:
      ParityError: if there are none or several.
    """
    arrays = [leaf for _, leaf in leaves(y) if is_one(leaf)]
    if len(arrays) != 1:
        raise ParityError(
            f"A step of {side} must return one array beside its cache; it returned {len(arrays)}."
        )
    return arrays[0]


@contextmanager
def _errors_at(what: str) -> Iterator[None]:
    """Converts an exception to a ParityError that says which step failed."""
    try:
        yield
    except Exception as error:
        message = " ".join(str(error).split())
        name = "" if isinstance(error, ParityError) else f"{type(error).__name__}: "
        raise ParityError(f"{what} fails: {name}{message}") from error


def joined(steps: Sequence[np.ndarray], axis: int) -> np.ndarray | None:
    """Concatenates the step outputs along their tokens; None if their shapes do not fit."""
    try:
        return np.concatenate(steps, axis)
    except ValueError:
        return None
