"""Views of torch's memory: which tensors show the same elements, and how a view is written."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

# Number of elements up to which it is computed whether two views of memory overlap.
LARGE = 1 << 16


def storage_of(tensor: Any) -> int:
    """Where in memory the array begins that a tensor shows."""
    return tensor.untyped_storage().data_ptr()


def view_key(tensor: Any) -> tuple[Any, ...]:
    """What tells one view of memory from another."""
    storage = tensor.untyped_storage()
    elements = storage.nbytes() // tensor.element_size()
    geometry = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset()
    flags = tensor.is_conj(), tensor.is_neg()
    return (storage.data_ptr(), *geometry, tensor.dtype, elements, *flags)


def overlap(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two views share an element; assumed of large ones whose ranges meet."""
    (low, high), (start, end) = _range(one), _range(other)
    if high < start or end < low:
        return False
    if one[5] > LARGE:
        return True
    used = np.zeros(one[5], bool)
    views = [as_strided(used[k[3] :], k[1], k[2]) for k in (one, other)]
    views[0][...] = True
    return bool(views[1].any())


def _range(key: tuple[Any, ...]) -> tuple[int, int]:
    """First and last element of a view."""
    reach = sum((size - 1) * stride for size, stride in zip(key[1], key[2], strict=True))
    return key[3], key[3] + reach


def copied(tensor: Any) -> Any:
    """A copy that lies in memory as the tensor does."""
    import torch

    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.copy_(tensor) if 0 not in tensor.stride() else tensor.clone()


def _with_strides(x: Any, strides: Sequence[int]) -> Any:
    import torch

    return torch.empty_strided(tuple(x.shape), tuple(strides), dtype=x.dtype).copy_(x)


def viewed(x: Any, size: Any, stride: Any, offset: int, strides: Any) -> Any:
    """The part of a tensor that a view of its memory shows."""
    return _with_strides(x, strides).as_strided(size, stride, offset)


def scattered(x: Any, part: Any, size: Any, stride: Any, offset: int, strides: Any) -> Any:
    """Writes a view into a copy of the whole, by the places of its elements in memory."""
    import torch

    flat = _with_strides(x, strides).as_strided((x.numel(),), (1,), 0)
    places = torch.arange(x.numel()).as_strided(size, stride, offset).reshape(-1)
    made = flat.scatter(0, places, part.to(x.dtype).reshape(-1))
    return made.as_strided(tuple(x.shape), tuple(strides), 0)
