"""Every layer's recorded results by the kernel of this library's own, interpreted, in float32.

Each attention that the kernel serves goes through it, and what it refuses through the others.
"""

from collections import Counter
from functools import partial
from importlib import import_module

import jax
import pytest

from flax_attn.backends import BACKENDS, pallas, protocol
from flax_attn.parity.cases.collect import collect

VARIANTS = sorted({case.variant for case in collect("parity_tests")})


@pytest.fixture
def traced(monkeypatch):
    """How often the kernel was traced, with every request offered to it before the others."""
    counts = Counter()

    def attention(q, k, v, rules):
        counts["by the kernel"] += 1
        return pallas.attention(q, k, v, rules)

    # Weights that are compared are those of the plain formula, which alone has them.
    for_weights = partial(protocol.passed_over, pairs=0)
    first = pallas_first(attention, for_weights)
    monkeypatch.setattr(import_module("flax_attn.attend"), "BACKENDS", first)
    return counts


def pallas_first(attention, passed_over):
    first = BACKENDS["pallas"]._replace(
        attention=attention, passed_over=passed_over, platforms=None
    )
    others = {name: backend for name, backend in BACKENDS.items() if name != "pallas"}
    return {"pallas": first, **others}


@pytest.mark.nightly
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layers_recorded_results_come_from_the_kernel(variant, traced):
    cases = [case for case in collect("parity_tests") if case.variant == variant]
    for case in cases:
        if "float32" in case.dtypes:
            case.dtypes = ("float32",)
            report = case.report(live=False, eager=False)
            assert report.ok, str(report)
            jax.clear_caches()
    print(variant, len(cases), "cases", dict(traced))
