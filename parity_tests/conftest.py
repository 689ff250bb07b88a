"""Strict in tests: promotion of ranks and dtypes raises.

Cases run under jit, and eagerly by the command alone, which the night calls: an eager run compiles
every operation by itself, and its function is the same. Programs are compiled with little effort,
since most run once, and with XLA 0.10 without its slower way to make fusions, here and in the
processes that tests start; `flax-attn parity` compiles them as users do.
"""

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch: processes then do not fight for processors
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if kept := os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # where one could read half a program
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{kept}/{os.environ['PYTEST_XDIST_WORKER']}"
if version("jaxlib").startswith("0.10."):  # whose newer way with fusions compiles twice as long
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false"

os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for processes that tests start

import jax
import pytest

from flax_attn.parity.cases.strict import MODES

from .rooms import Rooms
from .tables import case_of

HERE = Path(__file__).parent
PROGRAMS = 1000  # compiled ones that a process may hold when a file begins
ALL_NIGHTLY = "\npytestmark = pytest.mark.nightly\n"

for name, mode in MODES.items():
    jax.config.update(name, mode)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", -1)  # nobody reads where a program comes from
gc.disable()  # while tests are collected: nearly all that is made then stays


def pytest_configure(config: pytest.Config) -> None:
    """Declares the mark here, since where the cases are installed there is no pyproject.toml."""
    config.addinivalue_line("markers", "nightly: what .ci/nightly runs, and a commit does not")
    config.pluginmanager.register(Rooms(config), "rooms")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first case of each variant runs at each commit, under jit; the others nightly."""
    for item in items:
        case = case_of(item) if item.path.parent == HERE else None  # not where core uses one
        if case is not None:
            case.eager = False
            if getattr(item, "callspec").indices["case"]:  # noqa: B009 - only functions have one
                item.add_marker(pytest.mark.nightly)
    _spare_rows(items, picked=any("[" in argument for argument in config.args))


def _spare_rows(items: list[pytest.Item], picked: bool) -> None:
    """Takes the mark `nightly(but=ROWS)` off these rows of a table.

    Raises:
      pytest.UsageError: if a table has no such row; not where rows are `picked` by name.
    """
    spared: dict[str, tuple[set[str], set[str]]] = {}
    for item in items:
        for mark in [mark for mark in item.own_markers if mark.kwargs.get("but")]:
            row = item.nodeid.partition("[")[2][:-1]
            named, met = spared.setdefault(
                item.nodeid.partition("[")[0], ({*mark.kwargs["but"]}, set())
            )
            if row in named:
                item.own_markers.remove(mark)
                met.add(row)
    for test, (named, met) in spared.items():
        if named - met and not picked:
            gone = ", ".join(sorted(named - met))
            raise pytest.UsageError(f"{test} has no rows {gone}, which nightly(but=...) names.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files of which every test is nightly, or for other machines, if none runs."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    for_others = "not aot" in config.option.markexpr and collection_path.parent.name == "aot"
    at_night = "not nightly" in config.option.markexpr
    return for_others or (at_night and ALL_NIGHTLY in collection_path.read_text("utf-8")) or None


def pytest_collection_finish() -> None:
    """What was collected stays to the end, so that nobody need look through it for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _forget_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keeps a process to some 4 GB: jax holds all that it has traced and compiled."""
    yield
    rooms = request.config.pluginmanager.get_plugin("rooms")
    if rooms.programs - rooms.forgotten > PROGRAMS:
        rooms.forgotten = rooms.programs
        jax.clear_caches()
