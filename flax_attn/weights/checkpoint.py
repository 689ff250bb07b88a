"""A checkpoint with validated headers, whose tensors are read one at a time."""

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
    """Tensors of a file, an index, a folder that holds one of them, or arrays by name.

    Args:
      path: path of the file, index or folder; or the arrays.
      manifest: True requires a manifest, False ignores it, None checks it if it exists.
      allow_nonfinite: whether tensors may contain NaN and Inf.

    Attributes:
      path: path of the file or index.
      entries: entries by tensor name.

    Raises:
      CheckpointError: for invalid headers, index or manifest.
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
        if not isinstance(path, str | os.PathLike):
            raise TypeError(
                f"A checkpoint is a path, or arrays of numpy by name; got {type(path).__name__}. "
                "parity.port(module, layer) copies the weights of a torch module in memory."
            )
        self.path = find(Path(path))
        self.entries = read_entries(self.path)
        wanted = os.path.lexists(manifest_path(self.path)) if manifest is None else manifest
        self.lines = read_manifest(self.path, self.entries) if wanted else None

    def read(self, name: str, raw: np.ndarray | None = None) -> np.ndarray:
        """Reads and validates one tensor.

        Args:
          name: name of the tensor.
          raw: bytes to read into, as many as the tensor has; None for new ones.

        Raises:
          CheckpointError: for NaN and Inf unless they are allowed, for BOOL bytes other than 0 and
            1, and for data that differ from the manifest.
        """
        entry = self.entries[name]
        value = read_tensor(name, entry, self.allow_nonfinite, raw)
        if self.lines is not None and line_of(entry.dtype, value) != self.lines[name]:
            why = f"Its data are not those that {manifest_path(self.path).name} was written for."
            raise CheckpointError(self.path, name, why, "Fetch or save it again.")
        return value
