"""Strict in tests: promotion of ranks and dtypes raises.

Of each variant and witness the first case runs eagerly and under jit, the others under jit, as the
command does: an eager run compiles every operation by itself, and its function is the same. All but
these first cases are compiled with little effort, since most programs run once, and with XLA 0.10
none has its slower way to make fusions; `flax-attn parity` compiles them all as users do.
"""

import os
from collections.abc import Iterator
from importlib.metadata import version

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: processes then do not fight for processors
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if version("jaxlib").startswith("0.10."):  # whose newer way with fusions compiles twice as long
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"

import jax
import pytest

from flax_attn.parity import Case
from flax_attn.parity.cases.strict import MODES

for name, mode in MODES.items():
    jax.config.update(name, mode)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: what CI leaves out for its length")  # in a wheel too


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        case = _case_of(item)
        if case is not None:
            case.eager = (case.variant, case.witness) not in seen
            seen.add((case.variant, case.witness))


def _case_of(item: pytest.Item) -> Case | None:
    given = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return given if isinstance(given, Case) else None


@pytest.fixture(autouse=True)
def _little_effort(request: pytest.FixtureRequest) -> Iterator[None]:
    case, before = _case_of(request.node), jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", case is None or not case.eager)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
