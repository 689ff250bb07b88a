"""What a person sees, and what memory is let go, while a large model is compared."""

import ctypes
import gc
import sys
from collections.abc import Mapping
from time import monotonic

import numpy as np

LARGE = 2**24  # parameters, beyond which a comparison takes many seconds and copies are gigabytes


class Watch:
    """Tells on stderr what a large comparison is at: one line that changes, or lines in a pipe.

    Between two parts of the work, what nobody holds any more is given back to the system: the
    traced functions of JAX and the hooks of torch are circles, which Python finds only when it
    looks for them, and glibc keeps the memory of arrays below 32 MB for itself.

    Args:
      title: which pair.
      values: torch's weights; a small model is compared in silence.
    """

    def __init__(self, title: str, values: Mapping[str, np.ndarray]):
        self.title, self.start = title, monotonic()
        self.large = sum(x.size for x in values.values()) >= LARGE
        self.wide = 0

    def at(self, part: str) -> None:
        """One part of the work begins."""
        if self.large:
            _clear_line()
            self._write(f"{self.title}: {part} ({monotonic() - self.start:.0f} s)")

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: object) -> None:
        """Takes the line away, where it can be."""
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
