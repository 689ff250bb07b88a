"""Other people's policies on the same faults: what a fixed tolerance lets pass, in Markdown.

Only faults that change the model's logits in eval mode count here: the policies see nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_attn.parity import ParityError

from . import FAULTS, REWRITES
from .fault import Fault
from .setup import Setup, torch_module
from .trial_torch import torch


@dataclass(frozen=True)
class Logits:
    """Torch's and Flax's logits in float32 and bfloat16, and torch's in float64."""

    ours32: np.ndarray
    theirs32: np.ndarray
    ours16: np.ndarray
    theirs16: np.ndarray
    truth: np.ndarray


def kl(found: Logits) -> bool:
    """The mean divergence of the two distributions under 0.015."""
    ours, theirs = _log_softmax(found.ours32), _log_softmax(found.theirs32)
    return bool((np.exp(theirs) * (theirs - ours)).sum(-1).mean() < 0.015)


def close(tolerance: float) -> Callable[[Logits], bool]:
    """`numpy.allclose` with both tolerances the same."""
    return lambda found: np.allclose(found.ours32, found.theirs32, tolerance, tolerance)


def largest(found: Logits) -> bool:
    """The largest difference under 1e-5."""
    return bool(np.abs(found.ours32 - found.theirs32).max() < 1e-5)


def twice_own(found: Logits) -> bool:
    """The largest error in bfloat16 at most twice torch's own."""
    ours, own = (np.abs(x - found.truth).max() for x in (found.ours16, found.theirs16))
    return bool(ours <= 2 * own)


POLICIES: dict[str, Callable[[Logits], bool]] = {
    "KL of logits < 0.015": kl,
    "allclose 5e-2": close(5e-2),
    "allclose 1e-3": close(1e-3),
    "max abs 1e-5": largest,
    "error <= 2x the reference's own low-precision error": twice_own,
}
OURS = "**float64, norm-relative 1e-12**"


def visible(setup: Setup) -> bool:
    """Whether a trial is of the model's logits in eval mode."""
    eval_mode = not setup.options.get("train") and not setup.build
    return setup.pair in ("apart", "square") and eval_mode


def in_logits(fault: Fault) -> bool:
    """Whether a fault lies in the logits of the model in eval mode."""
    return visible(fault.plant(False)) and fault.group not in ("gradient", "process")


def caught(setup: Setup, seed: int | None) -> Iterator[str]:
    """The policies that catch a fault, ours too."""
    found = logits(setup, seed)
    for name, passes in POLICIES.items():
        if not passes(found):
            yield name
    try:
        report = setup.report(seed, grads=False)
    except ParityError:
        return
    if not report.ok:
        yield OURS


def logits(setup: Setup, seed: int | None) -> Logits:
    """Both sides' logits; torch's once for each pair."""
    ours = [_flax(setup, seed, dtype) for dtype in (jnp.float32, jnp.bfloat16)]
    theirs = _torch(setup.pair, seed)
    return Logits(ours[0], theirs["float32"], ours[1], theirs["bfloat16"], theirs["float64"])


def _flax(setup: Setup, seed: int | None, dtype: Any) -> np.ndarray:
    module = nnx.clone(setup.modules(seed)[1])
    module.eval()
    for _, param in nnx.iter_graph(module):
        if isinstance(param, nnx.Param):
            param.set_value(param.get_value().astype(dtype))
    inputs = {name: jnp.asarray(x) for name, x in setup.inputs().items()}
    inputs["memory"] = inputs["memory"].astype(dtype)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return np.asarray(module(**inputs)["logits"]).astype(np.float64)


@cache
def _torch(pair: str, seed: int | None) -> dict[str, np.ndarray]:
    import copy

    found, inputs = {}, Setup(pair).inputs()  # type: ignore[arg-type]
    for dtype in ("float64", "float32", "bfloat16"):
        kind = getattr(torch, dtype)
        module = copy.deepcopy(torch_module(pair, seed)).to(kind)
        given = {name: torch.from_numpy(x) for name, x in inputs.items()}
        given["memory"] = given["memory"].to(kind)
        with torch.no_grad():
            found[dtype] = module(**given)["logits"].double().numpy()
    return found


def _log_softmax(x: np.ndarray) -> np.ndarray:
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def markdown() -> str:
    """How many faults each policy catches, by amplitude and by how the weights were made."""
    faults = [fault for fault in FAULTS if in_logits(fault)]
    rewrites = [rewrite.setup for rewrite in REWRITES if visible(rewrite.setup)]
    trials = {
        "default init": [(fault.setup(False), None) for fault in faults],
        "every parameter random": [(fault.setup(False), 0) for fault in faults],
        "default init, at 1e-4": [(fault.setup(True), None) for fault in faults],
        "random, at 1e-4": [(fault.setup(True), 0) for fault in faults],
        f"of {len(rewrites)} right ports": [(setup, 0) for setup in rewrites],
    }
    found = {head: Counter(p for t in tried for p in caught(*t)) for head, tried in trials.items()}
    lines = [f"| caught of {len(faults)} faults | {' | '.join(trials)} |", "|---" * 6 + "|"]
    for name in (*POLICIES, OURS):
        lines.append(f"| {name} | " + " | ".join(str(found[head][name]) for head in trials) + " |")
    return "\n".join(lines)
