"""`python -m parity_tests.faults.policies`: what usual comparisons let pass, into docs/trial.md.

Only faults that reach the logits in eval mode count: these comparisons see nothing else.
"""

import copy
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_attn import parity
from flax_attn._internal.markdown import fill, table, text_between

from .listed import Fault, faults
from .subjects import changed, homes, transformer
from .table import PAGE

MARKS = text_between("<!-- policies -->", "<!-- end -->")
RANDOM = "write(module, draw.parameters(0, describe(module)))"  # in the transformer's file
TRIALS = {  # at low amplitude, with random weights
    "default init": (False, False),
    "random parameters": (False, True),
    "each at 1e-4: default": (True, False),
    "random": (True, True),
}
Logits = dict[str, np.ndarray]  # by dtype


def kl(ours: Logits, theirs: Logits) -> bool:
    p, q = (np.asarray(jax.nn.log_softmax(x["float32"])) for x in (theirs, ours))
    return bool((np.exp(p) * (p - q)).sum(-1).mean() < 0.015)


def twice_own(ours: Logits, theirs: Logits) -> bool:
    error, own = (np.abs(x["bfloat16"] - theirs["float64"]).max() for x in (ours, theirs))
    return bool(error <= 2 * own)


POLICIES = {
    "KL of logits < 0.015": kl,
    "allclose 5e-2": lambda x, y: np.allclose(x["float32"], y["float32"], 5e-2, 5e-2),
    "allclose 1e-3": lambda x, y: np.allclose(x["float32"], y["float32"], 1e-3, 1e-3),
    "max abs 1e-5": lambda x, y: np.abs(x["float32"] - y["float32"]).max() < 1e-5,
    "error <= 2x the reference's own in bfloat16": twice_own,
}
HARNESS = "**float64, norm-relative 1e-12: this harness**"


def in_logits(fault: Fault) -> bool:
    """Whether a fault lies in the logits of the transformer in eval mode."""
    home, port = homes()[fault.port]
    other = fault.whole or port.options.get("train") or port.options.get("grads")
    return home is transformer and not other and fault.group not in ("process", "rewrites", "cache")


@cache
def original(name: str, random: bool) -> tuple[Any, Logits]:
    """Torch's module with random weights or with its default ones, and its logits."""
    port, torch = homes()[name][1], transformer.transformer_torch.torch
    module, found = port.theirs(), {}
    if not random:
        torch.manual_seed(0)
        module = type(module)(port.theirs.args[1]).eval()
    for dtype in ("float32", "bfloat16", "float64"):
        kind = getattr(torch, dtype)
        given = {key: torch.from_numpy(x) for key, x in port.inputs(0).items()}
        given["memory"] = given["memory"].to(kind)
        out = copy.deepcopy(module).requires_grad_(False).to(kind)(**given)
        found[dtype] = out["logits"].double().numpy()
    return module, found


def caught(fault: Fault, low: bool, random: bool) -> list[str]:
    """The policies that catch a fault."""
    (module, theirs), port = original(fault.port, random), homes()[fault.port][1]
    source = fault.source(low) if random else fault.source(low).replace(RANDOM, "pass")
    wrong = replace(changed(port, source), theirs=lambda: module)
    ours = {dtype: _logits(wrong, dtype) for dtype in ("float32", "bfloat16")}
    found = [name for name, passes in POLICIES.items() if not passes(ours, theirs)]
    return found + [HARNESS] * (not wrong.report().ok)


def _logits(wrong: Any, dtype: str) -> np.ndarray:
    ours = wrong.mine(rngs=nnx.Rngs(0))
    if wrong.options["weights"] == "given":  # else a converter has left them
        ours = parity.port(wrong.theirs(), ours)
    ours.eval()
    nnx.update(ours, jax.tree.map(lambda x: x.astype(dtype), nnx.state(ours, nnx.Param)))
    given = wrong.inputs(0)
    given["memory"] = given["memory"].astype(dtype)
    return np.asarray(ours(**given)["logits"]).astype(np.float64)


def main() -> None:
    chosen = [fault for fault in faults() if in_logits(fault)]
    counts = [Counter(n for f in chosen for n in caught(f, *how)) for how in TRIALS.values()]
    rows = [[name, *(str(count[name]) for count in counts)] for name in (*POLICIES, HARNESS)]
    made = table([f"policy: caught of {len(chosen)} faults in the logits", *TRIALS], rows)
    PAGE.write_text(fill(PAGE.read_text("utf-8"), MARKS, made), "utf-8")


if __name__ == "__main__":
    main()
