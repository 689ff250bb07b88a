"""What each room of the tests took: CPU seconds and compiled programs, printed at the end of a run.

Seconds depend on the machine and are never judged; the programs say where they come from. In a run
of several processes each counts its own tests and hands its counts on when it ends.
"""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.monitoring
import pytest

COMPILED = "/jax/core/compile/backend_compile_duration"


class Rooms:
    """A pytest plugin.

    Attributes:
      counts: by room and by what is counted.
      programs: how many this process has compiled.
      forgotten: how many of them it no longer holds.
    """

    def __init__(self, config: pytest.Config):
        self.counts: Counter[tuple[str, str]] = Counter()
        self.output = getattr(config, "workeroutput", None)  # of a process that runs tests only
        self.programs = self.forgotten = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_: Any) -> None:
        self.programs += event == COMPILED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        seconds, programs = _cpu(), self.programs
        done = yield
        room = room_of(item.nodeid)
        self.counts[room, "seconds"] += _cpu() - seconds
        self.counts[room, "programs"] += self.programs - programs
        self.counts[room, "tests"] += 1
        return done

    def pytest_sessionfinish(self) -> None:
        if self.output is not None:
            self.output["rooms"] = [[*key, value] for key, value in self.counts.items()]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for room, what, value in getattr(node, "workeroutput", {}).get("rooms", ()):
            self.counts[room, what] += value

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        rooms = sorted({room for room, _ in self.counts}, key=lambda r: -self.counts[r, "seconds"])
        if len(rooms) > 1:
            terminalreporter.section("CPU seconds, compiled programs and tests of each room")
        for room in rooms if len(rooms) > 1 else ():
            seconds, programs, tests = (
                self.counts[room, what] for what in ("seconds", "programs", "tests")
            )
            terminalreporter.write_line(f"{seconds:7.1f} {programs:6} {tests:6}  {room}")


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
