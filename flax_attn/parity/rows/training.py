"""Rows of training: which tensors are trained, and parameters after each optimizer step."""

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
    """Rows for tensors that only one side trains, or that are complex on one side only."""
    rows = []
    params, values = pair.original.trained, pair.original.values
    variables = flax_state(pair.flax_module)
    for move in pair.plan.moves if pair.plan else ():
        for source, target in product(move.sources, move.targets):
            is_param = isinstance(variables[target], nnx.Param)
            kinds = [_kind(values[source]), _kind(variables[target].get_value())]
            if kinds[0] != kinds[1]:
                message = KIND.format(source, kinds[0], target, kinds[1])
            elif source not in params:
                message = NO_PARAM.format(source, target) if is_param else ""
            elif params[source] in (None, is_param):
                message = ""
            elif is_param:
                message = FROZEN.format(source, target)
            else:
                message = FREE.format(source, target, type(variables[target]).__name__)
            if message:
                rows.append(
                    Row(f"{target} is trained", "exact", "", "", judge.failed_fact(message))
                )
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
    """Compares every parameter after each step of torch.optim and of optax, in float64.

    Each side uses its own gradients of the cotangent's loss. Elements whose torch gradient is only
    rounding error are excluded, since adaptive optimizers turn it into arbitrary steps.
    """
    made = optimizers.make(*optimizer)
    notes |= dict.fromkeys(made.notes)
    weights, state, quiet = pair.weights(pair.narrow("float64")), None, {}
    side = pair.flax("float64", mode)
    got = pair.run_flax(side, weights)  # every run draws the same masks
    keeps = pair.axes.to_torch(got.keeps)
    for step, torch_step in enumerate(pair.original.steps(made, steps, keeps), 1):
        got = pair.run_flax(side, weights) if step > 1 else got
        quiet = _rounding_only(quiet, pair.names.gradients(torch_step.gradients), got)
        weights, state = _flax_step(made.optax, state, weights, got)
        for path, want in pair.weights(torch_step.values).items():
            if path in quiet:
                weights[path] = np.where(quiet[path], want, weights[path])
                verdict = judge.same_function(weights[path], want)
                rows.append(Row(f"{path} after step {step}", "step", "float64", mode, verdict))
    for path, mask in quiet.items():
        if mask.any():
            notes[ROUNDING.format(path, int(mask.sum()))] = None


def _rounding_only(before: dict, wanted: dict[str, np.ndarray], got: Run) -> dict[str, np.ndarray]:
    """The elements whose gradient is only rounding error, in this or an earlier step."""
    share = judge.SAME_FUNCTION * judge.whole_gradient(list(wanted.values()))
    now = {
        path: (np.abs(wanted[path]) <= share) & ((wanted[path] != 0) | (got.gradients[path] != 0))
        for path in _names_of_gradients(got)
        if path in wanted
    }
    return {path: before.get(path, False) | mask for path, mask in now.items()}


def _names_of_gradients(got: Run) -> list[str]:
    return [path for path in got.gradients if not path.startswith("input ")]


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
