"""The command in this process: without workers, or on reports that are known."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_attn.command import proving
from flax_attn.parity.cases.selection import Selection
from flax_attn.parity.cases.workers import Failure, Workers, attempt


class Here(Workers):
    """Works in this process."""

    def as_completed(
        self, work: Callable[[Any], Any], items: Sequence[Any]
    ) -> Iterator[tuple[int, Any]]:
        sys.path[:0] = [folder for folder in self.folders if folder not in sys.path]
        return ((i, attempt(work, item)) for i, item in enumerate(items))


def known_reports(monkeypatch, cases, reports, bundled=()):
    """The command has these cases, and gets these reports of them, without any process."""
    results = (x if isinstance(x, Failure) else (x, "-") for x in reports)

    def call(self, work, item):
        is_machine = work is proving._machine
        return proving.Machine("cpu", "cpu", 2) if is_machine else [*bundled]

    monkeypatch.setattr(proving, "select_cases", lambda *_: Selection(cases, cases, []))
    monkeypatch.setattr(Workers, "call", call)
    monkeypatch.setattr(Workers, "as_completed", lambda *_: enumerate(results))


def forget(*packages: str) -> None:
    """Modules of these packages are imported anew when they are wanted again."""
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]
