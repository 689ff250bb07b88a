"""Every layer's recorded results by the kernel of this library's own, interpreted, in float32.

A layer that calls `attend` is computed by the kernel wherever the kernel serves; layers that need
the weights themselves, and recurrences, never ask a backend.
"""

from collections import Counter
from importlib import import_module

import jax
import pytest

from flax_attn import taps
from flax_attn.backends import BACKENDS, pallas
from parity_tests.core.cases import every_case

pytestmark = pytest.mark.nightly

VARIANTS = sorted({case.variant for case in every_case()})


@pytest.fixture
def counts(monkeypatch):
    """How often `attend` asked the kernel, before all other backends, and how often it computed."""
    counts = Counter()

    def refusal(*request):
        counts["asked"] += 1
        return pallas.refusal(*request)

    def passed_over(request):
        """A recorded dropout mask is compared with the one of the plain formula."""
        return request.rules.dropout and taps.listening() and "listen() needs the weights"

    def attention(*request):
        counts["computed"] += 1
        return pallas.attention(*request)

    first = BACKENDS["pallas"]._replace(
        attention=attention,
        refusal=refusal,
        passed_over=passed_over,
        platforms=None,
        unproven=None,
    )
    others = {name: backend for name, backend in BACKENDS.items() if name != "pallas"}
    backends = {"pallas": first, **others}
    monkeypatch.setattr(import_module("flax_attn.attend"), "BACKENDS", backends)
    return counts


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_layers_recorded_results_come_from_the_kernel(variant, counts):
    for case in every_case():
        if case.variant == variant and "float32" in case.dtypes:
            case.dtypes = ("float32",)
            report = case.report(live=False, eager=False)
            assert report.ok, str(report)
            jax.clear_caches()
    assert counts["computed"] or not counts["asked"]
    print(variant, dict(counts))
