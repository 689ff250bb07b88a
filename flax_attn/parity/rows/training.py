"""Train mode: running statistics after the call, and parameters after each optimizer step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .. import judge
from ..report import Row
from ..sides.pair import Pair
from ..sides.run import Run
from ..torch_module import to_numpy, to_torch
from . import optimizers

ROUNDING = "{}: the gradient of {} elements is rounding alone; their steps are left out"
BIASED = "{}: nnx keeps the biased variance, torch the unbiased one (n / (n - 1)); equal up to that"


def statistics(
    pair: Pair, got: Run, own: Run, dtype: str, mode: str, rows: list[Row], notes: dict
) -> None:
    """Adds what both sides' running statistics are after the call, in float64.

    A running variance may follow either side's convention: torch averages the unbiased variance,
    nnx the biased one.
    """
    if dtype != "float64":
        return
    old = pair.weights(pair.narrow("float64"))
    new = pair.names.carried({**pair.narrow("float64"), **own.state})
    for path, value in got.state.items():
        if path not in new:
            continue
        verdict = judge.same_function(value, new[path])
        if verdict.differs and path.endswith("var"):
            for count, momentum in _updates(pair, own, path):
                share = new[path] - (1 - momentum) * old[path]
                biased = (1 - momentum) * old[path] + share * (count - 1) / count
                other = judge.same_function(value, biased)
                if other.ok:
                    verdict = other
                    notes[BIASED.format(path)] = None
        rows.append(Row(path, "state", dtype, mode, verdict))


def _updates(pair: Pair, own: Run, path: str):
    """How many elements torch averaged for a running variance, and its momentum."""
    for name, call in own.calls.items():
        momentum = call.facts.get("momentum")
        if "running_var" not in call.params or momentum is None:
            continue
        if path.startswith(f"{pair.names.tap(name).partition('#')[0]}."):
            x = call.inputs["0"]
            yield x.size // x.shape[1], momentum


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
        own = pair.torch("float64", values, got.keeps)
        quiet = _quiet(quiet, pair.names.gradients(own.gradients), got)
        values = _torch_step(torchs, params, own, values)
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
    }
    return {path: before.get(path, False) | mask for path, mask in now.items()}


def _names_of_gradients(got: Run) -> list[str]:
    return [path for path in got.gradients if not path.startswith("input ")]


def _torch_step(torchs: Any, params: Mapping[str, Any], own: Run, values: dict) -> dict:
    for name, param in params.items():
        param.grad = to_torch(own.gradients[name]) if name in own.gradients else None
    torchs.step()
    return {**values, **{name: to_numpy(param) for name, param in params.items()}}


def _flax_step(
    chain: optax.GradientTransformation, state: Any, params: dict, got: Run
) -> tuple[dict, Any]:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        held = {path: jnp.asarray(params[path]) for path in _names_of_gradients(got)}
        grads = {path: jnp.asarray(got.gradients[path]) for path in held}
        state = chain.init(held) if state is None else state
        updates, state = chain.update(grads, state, held)
        moved: Any = optax.apply_updates(held, updates)
        return {**params, **{path: np.array(x) for path, x in moved.items()}}, state
