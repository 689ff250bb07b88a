"""Every shape in a signature holds at run time, for every case, in a process that checks them.

Run as a program this file imports flax_attn under jaxtyping and beartype, calls the cases' layers
and prints what it refused; as a test it starts that program and reads it.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import install_import_hook

from parity_tests.tables import with_nightly

ROOT = Path(__file__).parents[3]


@cache
def program(step: int) -> dict[str, dict[str, str]]:
    pytest.importorskip("beartype", reason="shapes are checked at run time by beartype")
    run = subprocess.run(
        [sys.executable, "-m", "parity_tests.core.layers.test_shapes", str(step)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


FAULTS = (
    "attend: q without heads",
    "attend: keys and values of other lengths",
    "layer: tokens that are no floats",
    "layer: a forward with its axes turned",
    "softmax: integers",
)


@pytest.mark.parametrize("step", with_nightly([3, 1], commit=[3]))
def test_every_case_keeps_the_shapes_of_its_signatures_and_faults_are_refused(step):
    """At each commit every third: neighbours differ in a size or an option."""
    found = program(step)["cases"]
    assert len(found) > 100
    refused = {case: error for case, error in found.items() if error}
    assert not refused, "\n".join(f"{case}: {error}" for case, error in refused.items())
    for fault in FAULTS:
        assert program(step)["faults"][fault].startswith("TypeCheckError"), fault


def main(step: int) -> dict[str, dict[str, str]]:
    """The errors by case and by planted fault: cases must have none, faults must all have one."""
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from flax_attn.parity.cases.collect import collect

    with jax.numpy_dtype_promotion("strict"):
        faults = {name: refusal(call) for name, call in planted()}
    some = collect("parity_tests")[::step]
    cases = {str(case): refusal(partial(forward, case)) for case in some}
    return {"cases": cases, "faults": faults}


def refusal(call: Any) -> str:
    """The error a call raises, or nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def forward(case: Any) -> None:
    """The case's call on shapes alone, in bfloat16: there a forgotten cast cannot hide."""
    module = nnx.eval_shape(case.flax_module)
    if jax.tree.leaves(getattr(module, "rules", ())):  # arrays that are no weights keep no values
        module = case.flax_module()
    module.train() if case.train else module.eval()
    parts = [part for _, part in nnx.iter_modules(module)]
    # nnx's own norms cannot run under strict promotion.
    norms = any(isinstance(part, nnx.LayerNorm | nnx.RMSNorm) for part in parts)
    graph, state = nnx.split(module)
    floats, others = {}, {}
    for name, x in case.inputs.items():
        if isinstance(x, tuple) or np.issubdtype(x.dtype, np.floating):
            shape = x if isinstance(x, tuple) else x.shape
            floats[name] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        else:
            others[name] = jnp.asarray(x)

    def call(state, floats):
        module = nnx.merge(graph, jax.tree.map(narrow, state), copy=True)
        return case.flax_call(module, **others, **floats)

    with jax.numpy_dtype_promotion("standard" if norms else "strict"):
        jax.eval_shape(call, state, floats)


def narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x


def planted() -> Iterator[tuple[str, Any]]:
    """Calls that break a signature, each by its name."""
    from flax_attn import attend, reference
    from flax_attn.layers import uniform_causal_average

    layer = uniform_causal_average.UniformCausalAverage()
    q, k = jnp.ones((2, 5, 3, 4)), jnp.ones((2, 7, 3, 4))
    yield "attend: q without heads", lambda: attend(q[0, :, 0], k, k)
    yield "attend: keys and values of other lengths", lambda: attend(q, k, k[:, 1:])
    yield "layer: tokens that are no floats", lambda: layer(jnp.ones((6, 3), int))
    yield "softmax: integers", lambda: reference.softmax(jnp.ones((6, 3), int))

    def turned():
        with patch.object(uniform_causal_average, "tap", lambda name, x: x.mT):
            layer(jnp.ones((6, 3)))

    yield "layer: a forward with its axes turned", turned


if __name__ == "__main__":
    with install_import_hook("flax_attn", "beartype.beartype"):
        print(json.dumps(main(int(sys.argv[1]))))
