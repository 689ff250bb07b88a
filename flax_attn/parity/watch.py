"""Progress output, and freeing of memory, while a large model is compared."""

import ctypes
import gc
import sys
from collections.abc import Mapping
from time import monotonic

import numpy as np

LARGE = 2**24  # number of parameters above which a comparison is slow and its copies are gigabytes


class Watch:
    """Prints the progress of a large comparison to stderr: one updated line, or lines in a pipe.

    Frees unused memory between two parts of the work. JAX's traced functions and torch's hooks form
    reference cycles, which only the garbage collector frees, and glibc keeps freed memory of arrays
    below 32 MB.

    Args:
      title: names the pair.
      values: torch's weights; nothing is printed for a small model.
    """

    def __init__(self, title: str, values: Mapping[str, np.ndarray]):
        self.title, self.start = title, monotonic()
        self.large = sum(x.size for x in values.values()) >= LARGE
        self.wide = 0

    def at(self, part: str) -> None:
        """Reports that a part of the work begins."""
        if self.large:
            _clear_line()
            self._write(f"{self.title}: {part} ({monotonic() - self.start:.0f} s)")

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        """Clears the line, where possible."""
        if self.large:
            _clear_line()
            self._write("")

    def _write(self, line: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line:<{self.wide}}" + ("" if line else "\r"))
            self.wide = len(line)
        elif line:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _clear_line() -> None:
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
