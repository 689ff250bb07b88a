"""`read_torch`: reads the tensors of a file written by `torch.save`, which is a pickle."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, quoted
from .dtypes import DTYPES
from .entry import open_regular
from .foreign import refuse_foreign
from .strict_json import check_count, check_name

MIN_TORCH_VERSION = (2, 10)  # weights_only=True can be bypassed up to 2.9.1
_BY_NAME = {dtype.name: dtype for dtype in DTYPES.values()}


def read_torch(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Reads all arrays of a `.pt` or `.bin` file by name, for `load(layer, arrays)`.

    **This is not safe for untrusted files.** Such a file is a pickle, which is a program.
    `torch.load(weights_only=True)` restricts it, but was bypassed before. Read only files that you
    trust, or use safetensors.

    Args:
      path: path of the file, which must contain a state_dict and nothing else.

    Raises:
      CheckpointError: if torch is missing or older than 2.10, if it cannot read the file, or if
        an entry is not a dense tensor with a name.

    Source: https://docs.pytorch.org/docs/stable/notes/serialization.html

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2, dtype=torch.bfloat16)}, f"{folder}/m.pt")
    ...     print(read_torch(f"{folder}/m.pt"))
    {'w': array([1, 1], dtype=bfloat16)}
    """
    path = Path(path)
    torch = _torch(path)
    with open_regular(path) as file:
        refuse_foreign(path, file, "torch")
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a pickle may raise any type
            why = f"torch.load refuses it: {quoted(str(error).partition('. ')[0])}."
            raise CheckpointError(path, None, why) from error
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        why = f"It holds no tensors by name, but {quoted(tensors)}."
        raise CheckpointError(path, None, why, "Save model.state_dict().")
    check_count(path, len(tensors))
    return {name: _numpy_of(path, name, value, torch) for name, value in tensors.items()}


def _torch(path: Path) -> Any:
    why = "It takes torch 2.10 or newer"
    try:
        import torch
    except ImportError:
        raise CheckpointError(path, None, f"{why}, which is not installed.") from None
    version = str(torch.__version__)
    if tuple(int(x) for x in re.findall(r"\d+", version)[:2]) < MIN_TORCH_VERSION:
        hint = "Older ones may run what is in the file."
        raise CheckpointError(path, None, f"{why}; {quoted(version)} is installed.", hint)
    return torch


def _numpy_of(path: Path, name: str, value: Any, torch: Any) -> np.ndarray:
    check_name(path, name)
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    dtype = _BY_NAME.get(str(value.dtype).removeprefix("torch.")) if dense else None
    if dtype is None:
        what = str(value.dtype) if dense else type(value).__name__
        why = f"It is no dense tensor of a dtype that is read, but {quoted(what)}."
        raise CheckpointError(path, name, why)
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().view(dtype).reshape(tuple(value.shape))
