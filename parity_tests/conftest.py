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

from flax_attn.parity.cases.strict import MODES

from .turns import case_of, split, turn_of

TURN = pytest.StashKey[int | None]()

for name, mode in MODES.items():
    jax.config.update(name, mode)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "which part of the long tables of tests runs, a number, or all; another at each commit"
    parser.addoption("--turn", help=text)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "long: what CI leaves out for its length",
        "turns(n): runs at one commit in n, or with one parameter in n; see parity_tests/turns.py",
    ):
        config.addinivalue_line("markers", line)  # in a wheel too
    config.stash[TURN] = turn_of(config.getoption("--turn"))


def pytest_report_header(config: pytest.Config) -> str:
    turn = config.stash[TURN]
    which = "all" if turn is None else f"{turn}, and --turn=all leaves nothing out"
    return f"turn of the long tables: {which}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seen = set()
    for item in items:
        case = case_of(item)
        if case is not None:
            case.eager = (case.variant, case.witness) not in seen
            seen.add((case.variant, case.witness))
    turn, asked = config.stash[TURN], config.getoption("--turn") is not None
    named = config.option.keyword or any(".py" in given for given in config.args)
    if turn is not None and (asked or not named) and "not long" in config.option.markexpr:
        items[:], others = split(items, turn)
        config.hook.pytest_deselected(items=others)


@pytest.fixture(autouse=True)
def _little_effort(request: pytest.FixtureRequest) -> Iterator[None]:
    case, before = case_of(request.node), jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", case is None or not case.eager)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
