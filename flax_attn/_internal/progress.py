"""Progress of long commands: a bar on a terminal, or a plain line every ten seconds."""

import sys
import threading
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TextColumn, TimeElapsedColumn

SECONDS_BETWEEN_LINES = 10.0  # when there is no bar


class Progress:
    """Reports progress while a command runs, separately from its results.

    The bar is drawn on whichever of stdout and stderr is a terminal, and removed at the end. If
    neither is one, lines go to stderr, so that piped results contain nothing else.

    Args:
      name: the command, the prefix of each line.
      console: where the command prints its results.

    Example:
      >>> from rich.console import Console
      >>> with Progress("flax-attn bench", Console()) as progress:
      ...     progress.begin(2)
      ...     progress.at("T 256: torch")
      >>> progress.text
      'T 256: torch, 0 of 2'
    """

    def __init__(self, name: str, console: Console):
        self.name, self.console = name, console
        self.task, self.done, self.total = "starting", 0, 0
        self._start, self._ended = time.monotonic(), threading.Event()
        self._began = self._start
        shown = console if console.is_terminal else Console(stderr=True)
        columns = TextColumn("{task.description}", style="none", markup=False), TimeElapsedColumn()
        # Redirect stdout through the bar only if both use the same terminal.
        shares: dict[str, Any] = {"redirect_stdout": shown is console}
        self._bar = Bar(*columns, console=shown, transient=True, **shares)
        self._shows_bar = shown.is_terminal
        self._thread = threading.Thread(target=self._write_status, daemon=True)

    def __enter__(self) -> "Progress":
        if self._shows_bar:
            self._bar.start()
            self._line = self._bar.add_task(self.text)
        else:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._shows_bar:
            self._bar.stop()
        else:
            self._thread.join()

    def begin(self, total: int) -> None:
        """Starts a phase of `total` tasks."""
        self.done, self.total, self._began = 0, total, time.monotonic()
        self._draw()

    def at(self, task: str) -> None:
        """Sets the description of the current task."""
        self.task = task
        self._draw()

    def advance(self, task: str = "") -> None:
        """Marks one task as done, optionally with its description."""
        self.task = task or self.task
        self.done += 1
        self._draw()

    def write_line(self, line: str) -> None:
        """Prints a line of the result, above the bar."""
        self.console.out(line, highlight=False)

    @property
    def text(self) -> str:
        """The current task, the number of finished and total tasks, and about how long is left."""
        count = f", {self.done} of {self.total}" if self.total else ""
        if not 0 < self.done < self.total:
            return f"{self.task}{count}"
        each = (time.monotonic() - self._began) / self.done
        return f"{self.task}{count}, about {each * (self.total - self.done):.0f} s left"

    def _draw(self) -> None:
        if self._shows_bar and not self._ended.is_set():
            self._bar.update(self._line, description=self.text)

    def _write_status(self) -> None:
        while not self._ended.wait(SECONDS_BETWEEN_LINES):
            seconds = time.monotonic() - self._start
            print(f"{self.name}: {self.text} ({seconds:.0f} s)", file=sys.stderr, flush=True)
