"""What each room of the tests took, beside its budget: compiled programs, and CPU seconds.

A whole `pytest` fails if it compiles more programs than parity_tests/budget.toml allows: in all by
2 %, or in a room by 10 % and 20. It names the tests that compiled most. Seconds depend on the
machine and are printed only. In a run of several processes each counts its own tests and hands on
its counts. What two rooms need is compiled by the one that a process comes to first, and so a small
room may count a few programs more in one run than in the next.
"""

import os
import resource
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.monitoring
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"
BUDGET = Path(__file__).with_name("budget.toml")
SLACK, SLACK_OF_ROOM = 1.02, 1.1
FEW = 20  # programs that a room may compile in one run and its neighbour in the next
NAMED = 12  # tests, where a budget is exceeded


class Cost(NamedTuple):
    """Of some tests."""

    seconds: float = 0.0
    programs: int = 0
    tests: int = 0

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


class Rooms:
    """A pytest plugin.

    Attributes:
      costs: by test.
      memory: the most that a process held, in GB.
      programs: how many this process has compiled.
      forgotten: how many of them it no longer holds.
    """

    def __init__(self, config: pytest.Config):
        self.config = config
        self.costs: dict[str, Cost] = {}
        self.memory = 0.0
        self.programs = self.forgotten = 0
        self.output = getattr(config, "workeroutput", None)  # of a process that runs tests only
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        self.programs += event == COMPILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seconds, programs = _cpu(), self.programs
        done = yield
        self.costs[item.nodeid] = Cost(_cpu() - seconds, self.programs - programs, 1)
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.memory = max(self.memory, _memory())
        if self.output is not None:
            self.output["rooms"] = [[test, *cost] for test, cost in self.costs.items()]
            self.output["memory"] = self.memory
        elif self.faults() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.costs |= {test: Cost(*cost) for test, *cost in output.get("rooms", ())}
        self.memory = max(self.memory, output.get("memory", 0.0))

    def faults(self) -> list[str]:
        """What exceeds the budget, if the whole of `pytest` ran."""
        return over_budget(self.costs, budget()["programs"]) if is_whole(self.config) else []

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rooms = by_room(self.costs)
        if len(rooms) < 2:
            return
        allowed = budget()["programs"]
        terminalreporter.section("rooms: CPU seconds, compiled programs of those allowed, tests")
        total = sum(rooms.values(), Cost())
        for room, cost in [*sorted(rooms.items(), key=lambda x: -x[1].seconds), ("all", total)]:
            counts = f"{cost.programs:6} of {allowed.get(room, 0):6} {cost.tests:6}"
            terminalreporter.write_line(f"{cost.seconds:7.1f} {counts}  {room}")
        terminalreporter.write_line(f"The largest process held {self.memory:.1f} GB.")
        for fault in self.faults():
            terminalreporter.write_line(fault, red=True)


def budget() -> dict[str, dict[str, int]]:
    """The numbers of budget.toml."""
    return tomllib.loads(BUDGET.read_text("utf-8"))


def by_room(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The cost of each room."""
    rooms: defaultdict[str, Cost] = defaultdict(Cost)
    for test, cost in costs.items():
        rooms[room_of(test)] += cost
    return dict(rooms)


def over_budget(costs: Mapping[str, Cost], allowed: Mapping[str, int]) -> list[str]:
    """A sentence for the total and for each room that compiled too much, and its dearest tests.

    >>> costs = {"parity_tests/test_a.py::x": Cost(1.0, 99, 1), "flax_attn/b.py::y": Cost(1, 1, 1)}
    >>> over_budget(costs, {"all": 100, "cases": 79, "doctests": 1})
    []
    >>> print(*over_budget(costs, {"all": 100, "cases": 78, "doctests": 1}), sep="\\n")
    cases compiled 99 programs, and parity_tests/budget.toml allows 78. Most were compiled by:
        99  parity_tests/test_a.py::x
    """
    rooms = by_room(costs)
    spent = {"all": sum(rooms.values(), Cost()), **rooms}
    faults = []
    for room, cost in spent.items():
        most = allowed.get(room, 0)
        slack = most * SLACK if room == "all" else max(most * SLACK_OF_ROOM, most + FEW)
        if cost.programs > slack:
            mine = [test for test in costs if room in ("all", room_of(test))]
            dearest = sorted(mine, key=lambda test: -costs[test].programs)[:NAMED]
            lines = [f"{costs[test].programs:6}  {test}" for test in dearest]
            said = f"{room} compiled {cost.programs} programs, and parity_tests/budget.toml allows "
            faults.append("\n".join([f"{said}{most}. Most were compiled by:", *lines]))
    return faults


def is_whole(config: pytest.Config) -> bool:
    """Whether this run is README's `pytest`: every test of a commit, and no others."""
    option, default = config.option, "not aot and not nightly"
    narrowed = (option.keyword, option.deselect, getattr(option, "lf", False), option.maxfail)
    by_default = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return by_default and option.markexpr == default and not any(narrowed)


def room_of(nodeid: str) -> str:
    """The room of a test: a folder of core/, or what stands for one.

    >>> room_of("parity_tests/core/masks/test_masks.py::test_a"), room_of("flax_attn/attend.py::x")
    ('masks', 'doctests')
    >>> room_of("parity_tests/test_luong.py::x"), room_of("parity_tests/core/test_a.py")
    ('cases', 'house')
    """
    folder, *rest = nodeid.partition("::")[0].split("/")
    if folder != "parity_tests" or not rest[-1].startswith("test_"):
        return "doctests"
    if rest[0] != "core":
        return rest[0] if len(rest) > 1 else "cases"
    return rest[1] if len(rest) > 2 else "house"


def _cpu() -> float:
    """Seconds of this process and of those that it started and that ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _memory() -> float:
    """The most memory that this process has held, in GB (Linux counts in KB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
