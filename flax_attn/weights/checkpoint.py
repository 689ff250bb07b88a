"""A checkpoint whose headers were read and checked, and whose tensors are read one by one."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import CheckpointError
from .entry import Entry, entries_of, read_tensor
from .manifest import line_of, manifest_path, read_manifest
from .shards import find, read_entries

CheckpointLike = str | os.PathLike[str] | Mapping[str, np.ndarray]


class Checkpoint:
    """The tensors of a file, an index, a folder that holds one of them, or arrays by name.

    Args:
      path: of the file, index or folder; or the arrays.
      manifest: whether a manifest must be there (True), is not looked at (False), or is checked if
        it is there (None).
      allow_nonfinite: whether NaN and Inf may be in tensors that are read.

    Attributes:
      path: of the file or index.
      entries: by name.

    Raises:
      CheckpointError: for any fault of headers, index and manifest.
    """

    def __init__(self, path: CheckpointLike, manifest: bool | None, allow_nonfinite: bool):
        self.allow_nonfinite = allow_nonfinite
        if isinstance(path, Mapping):
            self.path = Path("arrays")
            self.entries: dict[str, Entry] = entries_of(self.path, path)
            self.lines = None
            if manifest:
                raise CheckpointError(self.path, None, "Arrays in memory have no manifest.")
            return
        self.path = find(Path(path))
        self.entries = read_entries(self.path)
        wanted = os.path.lexists(manifest_path(self.path)) if manifest is None else manifest
        self.lines = read_manifest(self.path, self.entries) if wanted else None

    def read(self, name: str) -> np.ndarray:
        """One tensor, checked.

        Raises:
          CheckpointError: for NaN and Inf unless they are allowed, for a BOOL that is neither, and
            for what the manifest does not say.
        """
        entry = self.entries[name]
        value = read_tensor(name, entry, self.allow_nonfinite)
        if self.lines is not None and line_of(entry.dtype, value) != self.lines[name]:
            why = f"Its data are not those that {manifest_path(self.path).name} was written for."
            raise CheckpointError(self.path, name, why, "Fetch or save it again.")
        return value
