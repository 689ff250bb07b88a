"""Files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of `path` at the end, and only if nothing failed."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(beside, "xb") as file:
            yield file
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
