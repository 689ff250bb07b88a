"""Training: what is trained, and parameters after each optimizer step."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ...weights.known_layers import flax_state
from .. import judge
from ..report import Row
from ..sides.pair import Pair
from ..sides.run import Run
from ..sides.torch import is_inexact
from ..torch_module import to_numpy, to_torch
from . import optimizers

ROUNDING = "{}: the gradient of {} elements is rounding alone; their steps are left out"


FROZEN = (
    "torch does not train {}, whose requires_grad is False, but in Flax {} is an nnx.Param, which "
    "is trained: hold it in an nnx.Variable that is no Param, or say requires_grad_(True) in torch"
)
FREE = (
    "torch trains {}, but in Flax {} is an nnx.{}, which is not trained: hold it in an nnx.Param, "
    "or say requires_grad_(False) in torch"
)
NO_PARAM = (
    "{} is a buffer of torch, which is not trained, but in Flax {} is an nnx.Param, which is: hold "
    "it in an nnx.Variable that is no Param"
)
KIND = "{} is {} in torch, but {} is {} in Flax: make it the same there"


def trained(pair: Pair) -> list[Row]:
    """A row for every tensor that one side trains and the other does not, or that is complex on
    one side and real on the other."""
    rows = []
    tensors = dict(pair.torch_module.named_parameters(remove_duplicate=False))
    variables = flax_state(pair.flax_module)
    for move in pair.plan.moves if pair.plan else ():
        for source, target in product(move.sources, move.targets):
            is_param, tensor = isinstance(variables[target], nnx.Param), tensors.get(source)
            kinds = [_kind(pair.values[source]), _kind(variables[target].get_value())]
            if kinds[0] != kinds[1]:
                said = KIND.format(source, kinds[0], target, kinds[1])
            elif tensor is None:
                said = NO_PARAM.format(source, target) if is_param else ""
            elif not is_inexact(tensor) or tensor.requires_grad == is_param:
                said = ""
            elif is_param:
                said = FROZEN.format(source, target)
            else:
                said = FREE.format(source, target, type(variables[target]).__name__)
            if said:
                rows.append(Row(f"{target} is trained", "exact", "", "", judge.unlike(said)))
    return rows


def _kind(x: Any) -> str:
    return "complex" if "complex" in str(x.dtype) else "real"


def stepped(
    pair: Pair,
    optimizer: tuple[str, Mapping[str, Any]],
    steps: int,
    mode: str,
    rows: list[Row],
    notes: dict,
) -> None:
    """Adds what every parameter is after each step of torch.optim and of optax, in float64.

    Each side takes its own gradients of the cotangent's loss. Where torch's gradient is nothing but
    rounding, adaptive optimizers make steps of it that mean nothing: those elements stay out.
    """
    made = optimizers.make(*optimizer)
    notes |= dict.fromkeys(made.notes)
    values = pair.narrow("float64")
    carried = [n for m in pair.plan.moves for n in m.sources] if pair.plan else []
    params = {k: to_torch(v).requires_grad_() for k, v in values.items() if k in carried}
    torchs, side = made.torch(list(params.values())), pair.flax("float64", mode)
    ours, state, quiet = pair.weights(values), None, {}
    for step in range(1, steps + 1):
        got = pair.run_flax(side, ours)
        torch_run = pair.torch("float64", values, got.keeps)
        quiet = _quiet(quiet, pair.names.gradients(torch_run.gradients), got)
        values = _torch_step(torchs, params, torch_run, values)
        values |= {second: values[first] for second, first in pair.ties.items()}
        ours, state = _flax_step(made.optax, state, ours, got)
        for path, want in pair.weights(values).items():
            if path in quiet:
                ours[path] = np.where(quiet[path], want, ours[path])
                verdict = judge.same_function(ours[path], want)
                rows.append(Row(f"{path} after step {step}", "step", "float64", mode, verdict))
    for path, mask in quiet.items():
        if mask.any():
            notes[ROUNDING.format(path, int(mask.sum()))] = None


def _quiet(before: dict, wanted: dict[str, np.ndarray], got: Run) -> dict[str, np.ndarray]:
    """The elements whose gradient is nothing but rounding, now or before."""
    share = judge.SAME_FUNCTION * judge.whole_gradient(list(wanted.values()))
    now = {
        path: (np.abs(wanted[path]) <= share) & ((wanted[path] != 0) | (got.gradients[path] != 0))
        for path in _names_of_gradients(got)
        if path in wanted
    }
    return {path: before.get(path, False) | mask for path, mask in now.items()}


def _names_of_gradients(got: Run) -> list[str]:
    return [path for path in got.gradients if not path.startswith("input ")]


def _torch_step(torchs: Any, params: Mapping[str, Any], torch_run: Run, values: dict) -> dict:
    for name, param in params.items():
        param.grad = to_torch(torch_run.gradients[name]) if name in torch_run.gradients else None
    torchs.step()
    return {**values, **{name: to_numpy(param) for name, param in params.items()}}


def _flax_step(
    chain: optax.GradientTransformation, state: Any, params: dict, got: Run
) -> tuple[dict, Any]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        weights = {path: jnp.asarray(params[path]) for path in _names_of_gradients(got)}
        grads = {path: jnp.asarray(got.gradients[path]) for path in weights}
        state = chain.init(weights) if state is None else state
        updates, state = chain.update(grads, state, weights)
        moved: Any = optax.apply_updates(weights, updates)
        return {**params, **{path: np.array(x) for path, x in moved.items()}}, state
